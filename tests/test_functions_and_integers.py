"""User functions are told apart by all that they compute with; integers of every width mean what they say; rounding and
junk stay where they belong."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import flash_attention, masks, reference_attention
from tests.conftest import op_by_op

RNG = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((2, 5, 2, 4), (2, 7, 1, 4), (2, 7, 1, 4)))
X = jnp.asarray(RNG.normal(size=(2, 4, 2, 4)), jnp.float32)
TABLE = jnp.array([0.3, 0.7])


def test_constants_of_an_inner_jit_are_part_of_the_program(implementation: str) -> None:
    results = []
    for table in (jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0])):
        inner = jax.jit(lambda s, h, table=table: s + table[h] * 3)
        mod = lambda s, b, h, i, j, inner=inner: inner(s, h) * (j + 1.0)  # noqa: E731
        plain = lambda s, b, h, i, j, table=table: (s + table[h] * 3) * (j + 1.0)  # noqa: E731
        got = flash_attention(Q, K, V, score_mod=mod, implementation=implementation)
        np.testing.assert_allclose(got, reference_attention(Q, K, V, score_mod=plain), rtol=1e-5, atol=1e-5)
        results.append(got)
    assert not np.allclose(*results)


def test_what_a_function_captured_may_change(implementation: str) -> None:
    captured = {"factor": 1.0}
    mod = lambda s, b, h, i, j: s * captured["factor"]  # noqa: E731
    before = flash_attention(Q, K, V, score_mod=mod, implementation=implementation)
    captured["factor"] = 3.0
    after = flash_attention(Q, K, V, score_mod=mod, implementation=implementation)
    np.testing.assert_allclose(after, flash_attention(Q, K, V, scale=1.5, implementation=implementation), rtol=1e-5)
    assert not np.allclose(before, after)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int64, jnp.int4, jnp.uint4])
def test_lengths_of_every_width(implementation: str, dtype: Any) -> None:
    x = jnp.asarray(RNG.normal(size=(2, 300, 1, 4)), jnp.float32)
    lengths = [100, 120] if jnp.iinfo(dtype).bits >= 8 else [3, 7]
    ids = np.arange(600).reshape(2, 300) % 5
    attend = lambda **integers: flash_attention(x, x, x, **integers, implementation=implementation)  # noqa: E731
    for convert in (np.asarray, jnp.asarray)[: 1 if dtype == np.int64 else 2]:
        want, got = (
            attend(key_value_seq_lengths=convert(lengths).astype(kind), segment_ids=convert(ids).astype(kind))
            for kind in (np.int32, dtype)
        )
        np.testing.assert_array_equal(got, want)


def test_unsigned_ids_beside_signed_ones() -> None:
    """Largest beside -1: the same 32 bits."""
    largest, minus_one = jnp.full((2, 4), 2**32 - 1, jnp.uint32), jnp.full((2, 4), -1)
    with pytest.raises(ValueError, match=r"segment_ids must be of one dtype .* not .*int32 and .*int32"):
        flash_attention(X, X, X, segment_ids=(largest, minus_one))
    small = np.zeros((2, 4), np.uint32)
    assert not flash_attention(X, X, X, segment_ids=(small, minus_one)).any()
    np.testing.assert_array_equal(flash_attention(X, X, X, segment_ids=largest), flash_attention(X, X, X))


def test_numbers_beyond_32_bits(implementation: str) -> None:
    """Lengths are clamped before they are cut; ids that would fall together are refused, or kept under x64."""
    want = flash_attention(Q, K, V, implementation=implementation)
    for mask in (masks.lengths(key_value=2**40), masks.lengths(key_value=np.array([2**31] * 2, np.uint32))):
        np.testing.assert_array_equal(flash_attention(Q, K, V, mask=mask, implementation=implementation), want)
    ids = np.array([[0, 0, 2**32, 2**32]] * 2)
    with pytest.raises(ValueError, match="segment_ids"):
        flash_attention(X, X, X, segment_ids=ids, implementation=implementation)
    with jax.enable_x64(True):
        got = flash_attention(X, X, X, segment_ids=ids, implementation=implementation)
        want = flash_attention(X, X, X, segment_ids=ids // 2**32, implementation=implementation)
    np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("fully_optimised")
def test_the_largest_weight_of_huge_logits_is_one(implementation: str) -> None:
    """Logits near 1e9: the compiler must not compare an exact product with a rounded maximum."""
    q, k = (jnp.asarray(RNG.normal(size=(1, 64, 1, 48)) * 3e4, jnp.float32) for _ in "qk")
    v = jnp.asarray(RNG.normal(size=(1, 64, 1, 48)), jnp.float32)
    dout = RNG.normal(size=v.shape)
    loss = lambda v: jnp.vdot(flash_attention(q, k, v, implementation=implementation), dout)  # noqa: E731
    best = np.einsum("bqnd,bknd->bqk", np.float64(q), np.float64(k))[0].argmax(-1)  # far ahead of the second
    want = np.zeros(v.shape[1:])
    np.add.at(want, best, dout[0])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(v)[0], want, rtol=1e-5, atol=1e-5)


def test_a_nan_query_reaches_no_key_that_it_may_not_read(implementation: str) -> None:
    x = jnp.asarray(RNG.normal(size=(1, 6, 1, 4)), jnp.float32)
    ids = np.array([[0, 0, 0, 1, 1, 1]])
    attend = lambda v: flash_attention(x.at[0, 1].set(jnp.nan), x, v, segment_ids=ids, implementation=implementation)  # noqa: E731
    dv = jax.grad(lambda v: (attend(v)[:, 3:] ** 2).sum())(x)
    assert np.isfinite(dv[:, 3:]).all()


def test_a_pole_at_zero_reaches_no_gradient(implementation: str) -> None:
    def loss(w: Any) -> Any:
        mod = lambda s, b, h, i, j: jnp.sqrt(jnp.abs(w[h] * s))  # noqa: E731
        return (flash_attention(Q, K, V, is_causal=True, score_mod=mod, implementation=implementation) ** 2).sum()

    assert np.isfinite(jax.grad(loss)(jnp.ones(2))).all()


FUNCTIONS: dict[str, dict[str, Any]] = {
    "literal": {"score_mod": lambda s, b, h, i, j: s * 2.0},
    "capture": {"score_mod": lambda s, b, h, i, j: s * TABLE[h] - 0.1 * (i - j)},
    "predicate": {"mask": masks.predicate(lambda b, h, i, j: TABLE[h] * 4 > j)},
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_on_a_mesh(implementation: str, name: str, axis_type: Any) -> None:
    """Sharded over the batch: under jit, and inside shard_map with its checks."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
    loss = lambda x: (flash_attention(x, x, x, **FUNCTIONS[name], implementation=implementation) ** 2).sum()  # noqa: E731
    with op_by_op(implementation):
        want = jax.grad(loss)(X)
    local = jax.shard_map(lambda x: jax.lax.psum(loss(x), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    with jax.set_mesh(mesh):
        sharded = jax.device_put(X, NamedSharding(mesh, P("x")))
        for function in (loss, local):
            np.testing.assert_allclose(jax.jit(jax.grad(function))(sharded), want, rtol=1e-4, atol=1e-5)
