"""The compiled kernels on an NVIDIA GPU, through the public operator, against float32 standard attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import explain, flash_attention, masks
from pallas_flash.dispatch import compute_capability

pytestmark = pytest.mark.gpu

SLOPES = 2.0 ** -np.arange(1, 5, dtype=np.float32)
IDS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (2, 300)), axis=-1), jnp.int32)

CALLS: dict[str, tuple[tuple[int, int, int, int, int, int, int], dict[str, Any]]] = {
    "full": ((2, 256, 384, 4, 4, 128, 128), {}),
    "causal, odd lengths, grouped": ((2, 333, 517, 6, 2, 64, 64), {"is_causal": True}),
    "window, bottom right": ((1, 200, 1000, 2, 2, 128, 128), {"local_window_size": (100, 0), "query_offset": 800}),
    "192/128": ((1, 300, 300, 4, 4, 192, 128), {"is_causal": True}),
    "256": ((1, 512, 512, 2, 2, 256, 256), {"is_causal": True, "scale": 0.5}),
    "head dim 72": ((1, 130, 70, 2, 1, 72, 40), {}),
    "soft cap": ((2, 256, 256, 4, 2, 128, 128), {"is_causal": True, "logits_soft_cap": 3.0}),
    "chunked, query lengths": (
        (2, 300, 300, 2, 2, 64, 64),
        {"mask": masks.chunked(77) & masks.lengths(query=[300, 5])},
    ),
    "segments, key lengths": (
        (2, 300, 300, 4, 2, 128, 128),
        {"is_causal": True, "segment_ids": IDS, "key_value_seq_lengths": jnp.array([300, 77])},
    ),
    "bias, mask": (
        (1, 200, 300, 4, 4, 64, 64),
        {
            "bias": jnp.sin(jnp.arange(4 * 300.0)).reshape(1, 4, 1, 300),
            "mask": jnp.arange(300) % 5 != jnp.arange(200)[:, None] % 7,
        },
    ),
    "slopes, documents": (
        (2, 300, 300, 4, 2, 128, 128),
        {
            "score_mod": lambda s, b, h, q, k: s + jnp.asarray(SLOPES)[h] * (k - q),
            "mask": masks.causal() & masks.predicate(lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
        },
    ),
    "dropout": ((1, 300, 300, 2, 2, 128, 128), {"dropout_rate": 0.2, "dropout_key": jax.random.key(3)}),
}


def inputs(sizes: tuple[int, ...], dtype: Any) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_head_dim = sizes
    rng = np.random.default_rng(sum(sizes))
    shapes = (
        (batch, q_len, q_heads, head_dim),
        (batch, kv_len, kv_heads, head_dim),
        (batch, kv_len, kv_heads, value_head_dim),
    )
    tensors = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    dout = jnp.asarray(rng.normal(size=(*shapes[0][:3], value_head_dim)), dtype)
    return tensors, dout, jnp.asarray(rng.normal(size=shapes[0][:3]), jnp.float32)


def program(implementation: str, **options: Any) -> Any:
    """Of (tensors, dout, dlse): out, lse and the gradients; the lse of rows without keys takes no part. Compiled once:
    most of what these tests take is compilation."""

    def attend(*tensors: Any) -> Any:
        out, lse = flash_attention(*tensors, return_residual=True, implementation=implementation, **options)
        return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

    def both(tensors: Any, dout: Any, dlse: Any) -> Any:
        results, pull = jax.vjp(attend, *tensors)
        return *results, *pull((dout.astype(results[0].dtype), dlse))

    return jax.jit(both)


def run(implementation: str, tensors: Any, dout: Any, dlse: Any, **options: Any) -> Any:
    return program(implementation, **options)(tensors, dout, dlse)


def relative_errors(got: Any, want: Any) -> list[float]:
    return [
        float(np.linalg.norm(np.float64(g) - np.float64(w)) / np.linalg.norm(np.float64(w)))
        for g, w in zip(got, want, strict=True)
    ]


@pytest.fixture(params=["sm90", "sm80"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Each implementation of kernels that runs on this GPU."""
    capability = compute_capability()
    if capability is None or capability < (8, 0):
        pytest.fail(f"these tests need a GPU of compute capability 8.0 or later, not {jax.devices()[0]} ({capability})")
    if request.param == "sm90" and capability != (9, 0):
        pytest.skip(f"the kernels for Hopper do not run on compute capability {capability}")
    return request.param


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_equal_standard_attention(kernels: str, name: str, dtype: Any) -> None:
    """Output and lse within 1.5 times the error that plain attention makes in the same dtype, gradients within 3 times:
    their delta comes from the rounded output, which tells in a peaked softmax. The same bits on repeats."""
    sizes, options = CALLS[name]
    tensors, dout, dlse = inputs(sizes, dtype)
    exact = [x.astype(jnp.float32) for x in (*tensors, dout)]
    want = run("reference", exact[:3], exact[3], dlse, **options, precision="highest")
    ours = program(kernels, **options)
    got = ours(tensors, dout, dlse)
    plain = run("reference", tensors, dout, dlse, **options)
    floor = 2.0**-11 if dtype == jnp.float16 else 2.0**-8
    factors = (1.5, 1.5, 3.0, 3.0, 3.0)
    for factor, mine, theirs in zip(factors, relative_errors(got, want), relative_errors(plain, want), strict=True):
        assert mine <= factor * theirs + 0.25 * floor, (relative_errors(got, want), relative_errors(plain, want))
    again = ours(tensors, dout, dlse)
    assert np.array_equal(np.float32(got[0]), np.float32(again[0])) and np.array_equal(got[1], again[1])
    shifted = [np.roll(np.float32(x), 1, axis=1) for x in got[:1]]
    assert relative_errors(shifted, want[:1])[0] > 100 * floor  # the companion


@pytest.mark.parametrize("name", ["causal, odd lengths, grouped", "192/128", "256", "segments, key lengths", "dropout"])
def test_deterministic_gradients(kernels: str, name: str) -> None:
    """As right as the others, and the same bits on repeats."""
    sizes, options = CALLS[name]
    tensors, dout, dlse = inputs(sizes, jnp.bfloat16)
    ours = program(kernels, **options, deterministic=True)
    got, *others = (ours(tensors, dout, dlse) for _ in range(4))
    exact = [x.astype(jnp.float32) for x in (*tensors, dout)]
    want = run("reference", exact[:3], exact[3], dlse, **options, precision="highest")
    assert max(relative_errors(got, want)) < 1.5e-2
    for again in others:
        assert all(np.array_equal(np.float32(x), np.float32(y)) for x, y in zip(got, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("shape", [(2, 4, 300, 301), (1, 4, 300, 301), (2, 1, 1, 301), (1, 4, 300, 1), (1, 4, 1, 1)])
def test_the_gradient_of_a_bias(kernels: str, shape: tuple[int, ...], head_dim: int) -> None:
    tensors, dout, dlse = inputs((2, 300, 301, 4, 2, head_dim, head_dim), jnp.bfloat16)
    bias = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    if bias.size > 4:
        bias.ravel()[::7] = -np.inf
    exact = [x.astype(jnp.float32) for x in (*tensors, dout)]
    want = run("reference", [*exact[:3], bias], exact[3], dlse, is_causal=True, precision="highest")
    got = run(kernels, [*tensors, bias], dout, dlse, is_causal=True)
    assert max(relative_errors(got, want)) < 1.5e-2
    assert np.all(np.asarray(got[-1])[bias == -np.inf] == 0)


def test_the_kernels_refuse_by_name(kernels: str) -> None:
    (q, k, v), _, _ = inputs((1, 64, 64, 2, 2, 64, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="score_mod uses the operation sin,"):
        flash_attention(q, k, v, score_mod=lambda s, *place: jnp.sin(s), implementation=kernels)
    assert explain(q, k, v).chosen == ("sm90" if compute_capability() == (9, 0) else "xla")
    assert explain(*(x.astype(jnp.float32) for x in (q, k, v))).chosen == "xla"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_xla_on_a_gpu(dtype: Any) -> None:
    """The path that calls take by themselves."""
    sizes = (2, 333, 517, 6, 2, 64, 48)
    tensors, dout, dlse = inputs(sizes, dtype)
    bias = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 333, 517)), jnp.float32)
    options = {"bias": bias, "key_value_seq_lengths": jnp.array([517, 100]), "is_causal": True, "query_offset": 184}
    exact = [x.astype(jnp.float32) for x in (*tensors, dout)]
    want = run("reference", exact[:3], exact[3], dlse, **options, precision="highest")
    limit = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    assert max(relative_errors(run("xla", tensors, dout, dlse, **options), want)) < limit
