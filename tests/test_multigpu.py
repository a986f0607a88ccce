"""On two GPUs of one host, `pytest -m multigpu`: what runs on forced CPU devices elsewhere, with the kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import Cache, append_to_cache, flash_attention, flash_decode, paged_flash_decode
from pallas_flash.distributed import from_zigzag, ring_attention, to_zigzag, ulysses_attention
from tests.sharding import collectives, mesh_of

pytestmark = pytest.mark.multigpu

ROWS = P(None, "x")
IDS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (2, 1024)), axis=-1), jnp.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"local_window_size": (200, 0)},
    "lengths, soft cap": {"key_value_seq_lengths": jnp.array([1000, 300]), "logits_soft_cap": 5.0},
    "score_mod, dropout": {
        "score_mod": lambda s, b, h, i, j: s + 0.01 * (h + 1) * (j - i),
        "dropout_rate": 0.1, "dropout_key": jax.random.key(1),
    },
}  # fmt: skip


ATTENTIONS = {
    "ring": ring_attention,
    "zigzag": functools.partial(ring_attention, order="zigzag"),
    "zigzag, heads": functools.partial(ring_attention, order="zigzag", heads_at_once=1),
    "ulysses": ulysses_attention,
}


def tensors() -> list[jax.Array]:
    """dout, q, k, v."""
    heads = (4, 4, 2, 2)
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (2, 1024, n, 128), jnp.bfloat16) for key, n in zip(keys, heads, strict=True)]


def both(attend: Any) -> Any:
    def run(dout: Any, *tensors: Any) -> Any:
        out, pullback = jax.vjp(attend, *tensors)
        return out, *pullback(dout)

    return run


def close(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(z).astype(np.float32) for z in (x, y))
        assert np.linalg.norm(x - y) < 0.01 * np.linalg.norm(y)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_equals_one_gpu(kind: str, name: str) -> None:
    arrays = tensors()
    options = OPTIONS[name] | {"is_causal": True, "implementation": "sm90"}
    local = functools.partial(ATTENTIONS[kind], axis_name="x", **options)
    mesh = mesh_of((2,), ("x",))
    spread = jax.shard_map(lambda q, k, v: local(q, k, v), mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    there, back = (to_zigzag, from_zigzag) if kind.startswith("zigzag") else (lambda x, _: x,) * 2
    placed = [jax.device_put(there(x, 2), NamedSharding(mesh, ROWS)) for x in arrays]
    got = [back(jax.device_put(x, arrays[0].sharding), 2) for x in jax.jit(both(spread))(*placed)]
    close(got, jax.jit(both(functools.partial(flash_attention, **options)))(*arrays))


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_sharded_arguments_stay_where_they_are(axes: Any, spec: Any) -> None:
    arrays = tensors()
    attend = functools.partial(flash_attention, is_causal=True, implementation="sm90")
    placed = [jax.device_put(x, NamedSharding(mesh_of((2,), ("x",), axes), spec)) for x in arrays]
    program = jax.jit(both(attend)).lower(*placed).compile()
    assert collectives(program) == {}
    close(program(*placed), jax.jit(both(attend))(*arrays))


def test_vmap_over_a_sharded_axis() -> None:
    arrays = [x[:, None] for x in tensors()]
    attend = functools.partial(flash_attention, is_causal=True, implementation="sm90")
    mesh = mesh_of((2,), ("x",), AxisType.Explicit)
    placed = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in arrays]
    with jax.set_mesh(mesh):
        program = jax.jit(jax.vmap(both(attend))).lower(*placed).compile()
    assert collectives(program) == {}
    close(program(*placed), jax.jit(jax.vmap(both(attend)))(*arrays))


LENGTHS = jnp.array([1000, 300], jnp.int32)


def decode(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """One more token in a cache, and what it attends to; the score depends on the numbers of sequence and head."""
    cache = append_to_cache(Cache(k, v), k[:, :1], v[:, :1], LENGTHS)
    score_mod = lambda s, b, h, i, j: s + 0.01 * (b + h + 1) * (j - i)  # noqa: E731
    return flash_decode(
        q, cache.key, cache.value, LENGTHS + 1, score_mod=score_mod, return_residual=True, implementation="sm90"
    )


def decode_pages(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """As many pages of 1,024 tokens as sequences, each in the other's; they have no owner, so heads are sharded."""
    return paged_flash_decode(q, k, v, jnp.array([[1], [0]]), LENGTHS, return_residual=True, implementation="sm90")


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("function", "spec"),
    [(decode, P("x")), (decode, P(None, None, "x")), (decode_pages, P(None, None, "x"))],
    ids=["batch", "heads", "pages, heads"],
)
def test_decoding_equals_one_gpu(function: Any, spec: Any, axes: Any) -> None:
    _, q, k, v = tensors()
    arrays = q[:, :1], k, v
    placed = [jax.device_put(x, NamedSharding(mesh_of((2,), ("x",), axes), spec)) for x in arrays]
    program = jax.jit(function).lower(*placed).compile()
    assert collectives(program) == {}
    close(program(*placed), jax.jit(function)(*arrays))
