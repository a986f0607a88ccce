"""What shows when a call is traced, before anything is computed: sizes that are symbols of jax.export, and ranks that a
user forbids NumPy's rules to promote."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

from pallas_flash import (
    Rotary,
    append_to_cache,
    append_to_pages,
    explain,
    explain_decode,
    flash_attention,
    flash_decode,
    masks,
    paged_flash_decode,
    quantise,
)
from pallas_flash.distributed import ring_attention, ulysses_attention
from tests.conftest import inputs
from tests.sharding import mesh_of

SIZES = {"b": 8, "t": 6, "s": 7, "n": 4, "k": 2, "h": 5, "e": 3}
AXES = {"query": "btnh", "key": "bskh", "value": "bske"}
close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def some_tensors() -> list[jax.Array]:
    call = inputs(batch=8, q_len=6, kv_len=7, heads=(4, 2), dims=(5, 3))
    return [jnp.asarray(call[name]) for name in "qkv"]


def everything(slopes: Any, lengths: Any) -> dict[str, Any]:
    """All that adds to scores or masks them, for tensors of 8 batch elements, 6 queries, 7 keys and 4 heads."""
    return {
        "bias": jnp.ones((6, 7)), "scale": jnp.float32(0.3), "sinks": slopes, "is_causal": True,
        "query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "query_offset": lengths,
        "local_window_size": (5, 2), "segment_ids": (jnp.zeros((8, 6), int), jnp.zeros((8, 7), int)),
        "logits_soft_cap": 3.0, "score_mod": lambda s, b, h, i, j: s - slopes[h] * abs(i - j),
        "mask": masks.prefix_lm(lengths) & masks.chunked(4) & masks.predicate(lambda b, h, i, j: i + j + h + b > 1),
        "dropout_rate": 0.1, "dropout_key": jax.random.key(0), "return_residual": True, "return_max_logit": True,
    }  # fmt: skip


def test_no_rank_is_promoted() -> None:
    """Traces under jax_numpy_rank_promotion="raise": every feature, values and gradients, decoding, its cache, a ring
    (whose ranges of tiles are those of the kernels)."""
    with jax.numpy_rank_promotion("raise"):
        q, k, v = some_tensors()
        slopes, lengths = jnp.ones(4), jnp.arange(8)
        call, table = everything(slopes, lengths), lengths[:, None]

        def loss(q: Any, k: Any, v: Any, floats: Any, implementation: str) -> Any:
            out, lse, _ = flash_attention(q, k, v, **call | floats, implementation=implementation)
            return out.sum() + lse.sum()

        floats = {name: call[name] for name in ("bias", "scale", "sinks")}
        for implementation in ("reference", "xla"):
            of = functools.partial(loss, implementation=implementation)
            jax.eval_shape(jax.grad(of, range(4)), q, k, v, floats)
        shared = {name: call[name] for name in ("scale", "sinks", "score_mod", "logits_soft_cap", "return_residual")}
        for dtype in (jnp.int8, jnp.float8_e4m3fn):
            cache = [x for pair in zip(quantise(k, dtype), quantise(v, dtype), strict=True) for x in pair]
            options = {"query_lengths": lengths, "local_window_size": 3, **shared}
            scales = dict(zip(("k_scale", "v_scale"), cache[2:], strict=True))
            jax.eval_shape(lambda o=options | scales, c=cache: flash_decode(q, *c[:2], lengths, **o))
            jax.eval_shape(lambda o=options | scales, c=cache: paged_flash_decode(q, *c[:2], table, lengths, **o))
            for append in (append_to_cache, lambda c, *x, **o: append_to_pages(c, table, *x, **o)):
                new, rotary = (k[:, :2], v[:, :2], lengths), Rotary(dim=4)
                jax.eval_shape(lambda a=append, c=cache, n=new, r=rotary: a(c, *n, query_lengths=lengths, rotary=r))

        def ring(q: Any, k: Any, v: Any) -> Any:
            options = {"query_offset": lengths, "query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
            return ring_attention(q, k, v, axis_name="x", is_causal=True, **options, **shared)[0]

        spread = jax.shard_map(ring, mesh=mesh_of((2,), ("x",)), in_specs=P(None, "x"), out_specs=P(None, "x"))
        jax.eval_shape(jax.grad(lambda q, k, v: spread(q, k, v).sum(), range(3)), q, k[:, :6], v[:, :6])


def structs_with(letter: str) -> list[jax.ShapeDtypeStruct]:
    """query, key and value, in which one size is a symbol."""
    sizes: Any = SIZES | {letter: export.symbolic_shape(letter)[0]}
    return [jax.ShapeDtypeStruct(tuple(sizes[x] for x in axes), jnp.float32) for axes in AXES.values()]


@pytest.mark.parametrize("letter", SIZES)
def test_symbolic_sizes_are_refused_by_name(letter: str) -> None:
    structs = structs_with(letter)
    name = next(name for name, axes in AXES.items() if letter in axes)
    refused: dict[str, Any] = {
        "flash_attention": flash_attention,
        "xla": functools.partial(flash_attention, implementation="xla", is_causal=True, sinks=jnp.zeros(4)),
        "explain": lambda *x: explain(*x) and None,
        "flash_decode": lambda *x: flash_decode(*x, 3),
        "explain_decode": lambda *x: explain_decode(*x, 3) and None,
        "paged_flash_decode": lambda *x: paged_flash_decode(*x, jnp.zeros((8, 2), int), 3),
    }
    for attend in (ring_attention, ulysses_attention):
        local = functools.partial(attend, axis_name="x")
        spread = jax.shard_map(local, mesh=mesh_of((1,), ("x",)), in_specs=P(None, "x"), out_specs=P(None, "x"))
        refused[attend.__name__] = spread
    for function in refused.values():
        with pytest.raises(NotImplementedError, match=rf"{name}\w* float32.* has the symbolic size {letter}: "):
            jax.eval_shape(function, *structs)


def test_vmap_over_an_axis_of_symbolic_size() -> None:
    tensors = some_tensors()
    attend = functools.partial(flash_attention, is_causal=True, implementation="xla")
    gradient = jax.grad(lambda q, k, v: (attend(q, k, v) ** 2).sum())
    exported = export.export(jax.jit(jax.vmap(gradient)))(*structs_with("b"))
    close(exported.call(*tensors), jax.vmap(gradient)(*tensors))


@pytest.mark.parametrize("letter", ["b", "t", "s", "h", "e"])
def test_the_reference_takes_symbolic_sizes(letter: str) -> None:
    tensors = some_tensors()
    options = {"scale": 0.4, "sinks": jnp.zeros(4), "query_seq_lengths": 4, "key_value_seq_lengths": 2**40}
    attend = functools.partial(flash_attention, is_causal=True, implementation="reference", **options)
    exported = export.export(jax.jit(attend))(*structs_with(letter))
    close(exported.call(*tensors), attend(*tensors))
    with pytest.raises(ValueError, match="scale must be given where head_dim is h"):
        jax.eval_shape(functools.partial(attend, scale=None), *structs_with("h"))
    assert explain(*structs_with(letter), scale=1.0, implementation="reference").chosen == "reference"
