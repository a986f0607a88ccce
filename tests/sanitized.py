"""The small calls of every kernel that tests.sanitize looks at, and what it asks the tools about themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def attention_calls() -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    """Sizes (B, T, S, N, K, H, Hv) and options: each kernel, with tiles cut off, and every addition to the scores."""
    import jax
    import jax.numpy as jnp

    ids = jnp.asarray([[0] * 40 + [1] * 60], jnp.int32)
    everything: dict[str, Any] = {
        "segment_ids": (ids, jnp.asarray([[0] * 70 + [1] * 63], jnp.int32)), "sinks": jnp.ones(2),
        "logits_soft_cap": 5.0, "dropout_rate": 0.2, "dropout_key": jax.random.key(0),
        "key_value_seq_lengths": jnp.array([120]), "mask": jnp.ones((1, 1, 100, 133), bool).at[..., 5].set(False),
    }  # fmt: skip
    return {
        "forward, one backward kernel": ((1, 100, 133, 2, 1, 64, 64), {"is_causal": True}),
        "forward, two backward kernels": ((1, 100, 133, 2, 1, 64, 64), {"is_causal": True, "deterministic": True}),
        "gradient of a bias": ((1, 100, 133, 2, 1, 64, 64), {"bias": jnp.zeros((1, 2, 100, 133))}),
        "shared keys": ((1, 100, 133, 2, 1, 192, 128), {"local_window_size": (20, 3)}),
        "shared keys, two backward kernels": ((1, 100, 133, 2, 1, 256, 256), {"deterministic": True}),
        "everything": ((1, 100, 133, 2, 1, 128, 128), everything),
    }


def attend(name: str, implementation: str) -> Any:
    import jax.numpy as jnp

    from tests.test_gpu import inputs, run

    sizes, options = attention_calls()[name]
    tensors, dout, dlse = inputs(sizes, jnp.bfloat16)
    return run(implementation, tensors, dout, dlse, **options)


def decode(name: str, implementation: str) -> Any:
    """Several splits of ragged lengths, one that is 0; the cache contiguous, or in pages of 8 bits."""
    import jax
    import jax.numpy as jnp

    from pallas_flash import flash_decode, paged_flash_decode, quantise

    q, k, v = (jax.random.normal(jax.random.key(i), (3, *shape), jnp.bfloat16) for i, shape in enumerate(
        ((2, 8, 64), (1024, 2, 64), (1024, 2, 64))))  # fmt: skip
    lengths = jnp.array([1000, 0, 77])
    if "pages" not in name:
        return flash_decode(q, k, v, lengths, implementation=implementation)
    (k, k_scale), (v, v_scale) = (quantise(x.reshape(48, 64, 2, 64), jnp.int8) for x in (k, v))
    table = jnp.arange(48).reshape(3, 16)[:, ::-1]
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return paged_flash_decode(q, k, v, table, lengths, **scales, implementation=implementation)


def copy_by_tma(name: str, implementation: str) -> Any:
    """A kernel that only copies by TMA, and an addition by XLA of what that stored."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(source: Any, target: Any, buffer: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(source, buffer, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffer, target)
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    scratch = {"buffer": plgpu.SMEM(shape.shape, shape.dtype), "barrier": plgpu.Barrier()}
    copied = plgpu.kernel(body, out_type=shape, scratch_types=scratch)
    return jax.jit(lambda x: copied(x) + 1)(jnp.ones(shape.shape, shape.dtype))


def meet_from_two_places(name: str, implementation: str) -> Any:
    """Two warpgroups wait for each other at one named barrier, each in a branch of its own: what PTX allows, and what
    the backward kernels do."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_flash.kernels.barriers import NamedMeeting

    def body(target: Any, buffer: Any) -> None:
        @pl.when(lax.axis_index("wg") == 0)
        def _first() -> None:
            buffer[0] = jnp.zeros((128,), jnp.float32)
            NamedMeeting(2).hold()
            plgpu.copy_smem_to_gmem(buffer, target)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("wg") == 1)
        def _second() -> None:
            buffer[1] = jnp.ones((128,), jnp.float32)
            NamedMeeting(2).hold()

    shape = jax.ShapeDtypeStruct((2, 128), jnp.float32)
    buffer = plgpu.SMEM(shape.shape, shape.dtype)
    return plgpu.kernel(body, out_type=shape, scratch_types=[buffer], num_threads=2, thread_name="wg")()


# What a tool says of these is about the tool: no kernel of ours, and right by construction.
CONTROLS = {
    "initcheck": ("a copy by TMA", copy_by_tma),
    "synccheck": ("a meeting from two places", meet_from_two_places),
}


def calls(implementation: str) -> dict[str, Callable[[str, str], Any]]:
    decoding = ("decoding", "decoding, pages of 8 bits") if implementation == "sm90" else ()
    return dict.fromkeys(attention_calls(), attend) | dict.fromkeys(decoding, decode)


def run(name: str, implementation: str) -> None:
    """Of `calls` or `CONTROLS`."""
    import jax
    import numpy as np

    results = jax.tree.leaves((calls(implementation) | dict(CONTROLS.values()))[name](name, implementation))
    assert all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in results), name
