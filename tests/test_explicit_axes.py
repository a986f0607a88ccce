"""Every public function on a mesh with explicit axes, its operands sharded in different ways: values, gradients and
their types, or a refusal by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import (
    Cache,
    Rotary,
    append_to_cache,
    append_to_pages,
    flash_attention,
    flash_decode,
    paged_flash_decode,
    quantise,
)
from tests.sharding import mesh_of

WHOLE, BATCH, HEADS = P(), P("x"), P(None, None, "x")
ALL_HEADS = P(None, None, ("x", "y"))  # more devices than key heads
LENGTHS = jnp.arange(8)
TABLE = jnp.arange(8)[::-1, None]


def normal(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


Q, K, V, BIAS, SINKS, SCALE, SLOPES = normal((8, 6, 4, 5), (8, 7, 2, 5), (8, 7, 2, 3), (8, 1, 6, 7), (4,), (), (4,))
NEW = Q[:, :3]
CODES = tuple(y for x in (K, V) for y in quantise(x))


def reshard(arrays: Any, specs: Any) -> Any:
    mesh = mesh_of((2, 2), ("x", "y"), AxisType.Explicit)
    return tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True))


def check(function: Callable[..., Any], arrays: Any, specs: Any, want: Any = None) -> tuple[Any, Any]:
    """The results of sharded arrays, which must be those of the arrays as they are."""
    want = jax.jit(function)(*arrays) if want is None else want
    placed = reshard(arrays, specs)
    with jax.set_mesh(mesh_of((2, 2), ("x", "y"), AxisType.Explicit)):
        got = jax.jit(function)(*placed)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    return got, placed


def attend(implementation: str, q: Any, k: Any, v: Any, *more: Any) -> Any:
    options: dict[str, Any] = {"implementation": implementation}
    if more:
        bias, sinks, scale, slopes = more
        score_mod = lambda s, b, h, i, j: s + slopes[h] * (j - i) + 0.1 * b * j  # noqa: E731
        options |= {"bias": bias, "sinks": sinks, "scale": scale, "score_mod": score_mod}
        options["key_value_seq_lengths"] = LENGTHS
    return flash_attention(q, k, v, **options)


def gradients(implementation: str, *arrays: Any) -> Any:
    out, pull = jax.vjp(lambda *arrays: attend(implementation, *arrays), *arrays)
    return out, pull(jnp.cos(out))


@functools.cache
def wanted(count: int) -> Any:
    return jax.jit(lambda *arrays: gradients("reference", *arrays))(*OPERANDS[:count])


OPERANDS = (Q, K, V, BIAS, SINKS, SCALE, SLOPES)
SHARDED = {
    "whole query": (WHOLE, BATCH, BATCH),
    "heads of the query": (HEADS, WHOLE, WHOLE),
    "batch and heads of different operands": (P("x", None, "y"), WHOLE, BATCH, BATCH, P("y"), P(), P("y")),
    "query heads of one key head": (ALL_HEADS, WHOLE, WHOLE, WHOLE, P(), P(), P()),
    "sinks that are sharded as the batch": (BATCH, BATCH, WHOLE, WHOLE, P("x"), P(), P("x")),
}
BY_REFERENCE = ("whole query", "query heads of one key head")


@pytest.mark.parametrize(("by", "name"), [*(("xla", x) for x in SHARDED), *(("reference", x) for x in BY_REFERENCE)])
def test_gradients_have_the_types_of_operands(name: str, by: str) -> None:
    specs = SHARDED[name]
    (_, found), placed = check(lambda *x: gradients(by, *x), OPERANDS[: len(specs)], specs, wanted(len(specs)))
    assert [jax.typeof(x) for x in found] == [jax.typeof(x) for x in placed]


def test_gradients_without_jit() -> None:
    with jax.set_mesh(mesh_of((2, 2), ("x", "y"), AxisType.Explicit)):
        q, k, v = reshard((Q, K, V), (BATCH, WHOLE, BATCH))
        _, found = gradients("xla", q, k, v)
    assert [jax.typeof(x) for x in found] == [jax.typeof(x) for x in (q, k, v)]


@pytest.mark.parametrize("by", ["xla", "reference"])
def test_calls_without_jit_or_mesh_context(by: str) -> None:
    """The small arrays of a call need not be on the mesh."""
    q, k, v, on_mesh = reshard((Q, K, V, SINKS), (BATCH, BATCH, WHOLE, P("y")))
    for sinks in (SINKS, on_mesh):
        out = flash_attention(q, k, v, sinks=sinks, key_value_seq_lengths=LENGTHS, implementation=by)
        want = flash_attention(Q, K, V, sinks=SINKS, key_value_seq_lengths=LENGTHS, implementation=by)
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
    for lengths in (3, np.arange(8), LENGTHS):
        out = flash_decode(q[:, :3], k, v, lengths)
        np.testing.assert_allclose(out, flash_decode(NEW, K, V, lengths), rtol=2e-5, atol=2e-5)
        assert out.sharding.spec == P("x", None, None, None)


@pytest.mark.parametrize("by", ["xla", "reference"])
def test_vmap_over_a_sharded_axis(by: str) -> None:
    check(lambda *x: jax.vmap(lambda *x: gradients(by, *x))(*x), (Q, K, V), (BATCH,) * 3, wanted(3))
    with jax.set_mesh(mesh_of((2, 2), ("x", "y"), AxisType.Explicit)):
        out = jax.vmap(lambda *x: attend(by, *x))(*reshard((Q, K, V), (BATCH,) * 3))
    np.testing.assert_allclose(out, wanted(3)[0], rtol=2e-5, atol=2e-6)


def test_other_derivatives_of_the_reference() -> None:
    loss = lambda q, k, v: (attend("reference", q, k, v) ** 2).sum()  # noqa: E731
    arrays, specs = (Q, K, V), (BATCH, WHOLE, BATCH)
    # Forward over reverse.
    check(lambda q, k, v: jax.jvp(lambda k: jax.grad(loss, 1)(q, k, v), (k,), (k,)), arrays, specs)


class Call(NamedTuple):
    """A function without a derivative, its arrays, and how they are sharded."""

    function: Callable[..., Any]
    arrays: tuple[Any, ...]
    specs: tuple[tuple[P, ...], ...]


def decode(q: Any, k: Any, v: Any, lengths: Any, **options: Any) -> Any:
    score_mod = lambda s, b, h, i, j: s + SLOPES[h] * b * j  # noqa: E731
    options |= {"query_lengths": LENGTHS % 4, "sinks": SINKS, "score_mod": score_mod, "return_residual": True}
    return flash_decode(q, k, v, lengths, local_window_size=2, **options)


def append(k: Any, v: Any, new_k: Any, new_v: Any, lengths: Any) -> Any:
    return append_to_cache(Cache(k, v), new_k, new_v, lengths, query_lengths=LENGTHS % 3, rotary=Rotary(dim=2))


CALLS = {
    "decode": Call(
        decode,
        (NEW, K, V, LENGTHS),
        ((BATCH, BATCH, BATCH, WHOLE), (WHOLE, HEADS, HEADS, P("y")), (ALL_HEADS, WHOLE, WHOLE, WHOLE)),
    ),
    "vmap of decode": Call(jax.vmap(flash_decode), (NEW, K, V, LENGTHS), ((BATCH,) * 4,)),
    "decode int8": Call(
        lambda q, k, ks, v, vs: flash_decode(q, k, v, LENGTHS, k_scale=ks, v_scale=vs),
        (NEW, *CODES),
        ((BATCH,) * 5, (ALL_HEADS, *(WHOLE,) * 4)),
    ),
    "decode pages": Call(
        lambda q, k, v, table: paged_flash_decode(q, k, v, table, LENGTHS),
        (NEW, K, V, TABLE),
        ((BATCH, WHOLE, WHOLE, WHOLE), (P("x", None, "y"), P(None, None, "y"), WHOLE, P("y"))),
    ),
    "append": Call(
        append,
        (K, V, K[:, :2], V[:, :2], LENGTHS),
        ((BATCH,) * 4 + (WHOLE,), (P("x", None, "y"), BATCH, HEADS, WHOLE, P("y"))),
    ),
    "vmap of append": Call(
        jax.vmap(lambda k, v, length: append_to_cache(Cache(k, v), k[:2], v[:2], length)),
        (K, V, LENGTHS),
        ((BATCH,) * 3,),
    ),
    "append int8": Call(
        lambda k, ks, v, vs, new_k, new_v: append_to_cache(Cache(k, v, ks, vs), new_k, new_v, LENGTHS),
        (*CODES, K[:, :2], V[:, :2]),
        ((*(BATCH,) * 4, WHOLE, BATCH), (HEADS,) * 4 + (BATCH, WHOLE)),
    ),
    "append to pages": Call(
        lambda k, v, new_k, new_v, table: append_to_pages(Cache(k, v), table, new_k, new_v, LENGTHS),
        (K, V, K[:, :2], V[:, :2], TABLE),
        ((HEADS, HEADS, WHOLE, HEADS, WHOLE), (WHOLE, WHOLE, BATCH, BATCH, P("y"))),
    ),
    "quantise": Call(quantise, (K,), ((BATCH,), (HEADS,))),
}


@pytest.mark.parametrize("name", CALLS)
def test_decoding(name: str) -> None:
    call = CALLS[name]
    for specs in call.specs:
        check(call.function, call.arrays, specs)


def test_decoding_kernels_lower() -> None:
    """Each GPU runs them on its own part, with the batch and head numbers of the whole call."""
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"), (AxisType.Explicit,) * 2)
    struct = lambda *shape: jax.ShapeDtypeStruct(  # noqa: E731
        shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("x", None, "y"))
    )

    def call(q: Any, k: Any) -> Any:
        score_mod = lambda s, b, h, i, j: s + 0.1 * b * j + h  # noqa: E731
        return flash_decode(q, k, k, jnp.arange(4), score_mod=score_mod, implementation="sm90")

    traced = jax.jit(call).trace(struct(4, 1, 8, 64), struct(4, 256, 4, 64))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "tensor<2x1x4x64xbf16>" in text


def test_a_cache_keeps_its_type() -> None:
    """As a scan over decoding steps wants it."""
    k, v, new_k, new_v, lengths = reshard((K, V, K[:, :2], V[:, :2], LENGTHS), (BATCH, WHOLE, HEADS, HEADS, WHOLE))
    cache = jax.eval_shape(append, k, k, new_k, new_k, lengths)
    assert cache.key.sharding.spec == jax.typeof(k).sharding.spec
    cache = jax.eval_shape(append, v, v, new_v, new_v, lengths)
    assert cache.key.sharding.spec == jax.typeof(v).sharding.spec


REFUSED = {
    "key: the batch": (lambda q, k: flash_attention(q, k, k), (Q, K), (BATCH, P("y"))),
    "key_cache: the key axis": (lambda q, k: flash_decode(q, k, k, LENGTHS), (NEW, K[:, :6]), (BATCH, P(None, "y"))),
    "key_pages: the page axis": (
        lambda q, k: paged_flash_decode(q, k, k, TABLE, LENGTHS),
        (NEW, K),
        (WHOLE, BATCH),
    ),
    "pages.key: the page axis": (
        lambda k, new: append_to_pages(Cache(k, k), TABLE, new, new, LENGTHS),
        (K, K[:, :2]),
        (BATCH, WHOLE),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    function, arrays, specs = REFUSED[name]
    with pytest.raises(ValueError, match=rf"{name} of f(loat)?32\[.*\] is split over .*, not "):
        function(*reshard(arrays, specs))
