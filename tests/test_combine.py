"""combine: attention over disjoint sets of keys is attention over their union, with its gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import combine, flash_attention
from pallas_flash.combine import Partial
from tests.conftest import op_by_op

B, T, S, N, H = 2, 5, 12, 2, 4
Q, K, V = (jax.random.normal(jax.random.key(i), (B, n, N, H)) for i, n in enumerate((T, S, S)))
SETS = (slice(0, 3), slice(3, 4), slice(4, 12))


def whole(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
    return flash_attention(q, k, v, return_residual=True, implementation="reference", **kwargs)


def merged(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
    return combine([whole(q, k[:, s], v[:, s], query_offset=7 - s.start, **kwargs) for s in SETS])


def scalar(result: Any) -> Any:
    """A number that depends on every output, rows with no key aside."""
    out, lse = result
    lse = jnp.where(jnp.isfinite(lse), lse, 0)
    return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum() + (lse * jnp.sin(lse)).sum()


@pytest.mark.parametrize("is_causal", [False, True])
def test_union_and_its_gradients(is_causal: bool) -> None:
    want = lambda *qkv: whole(*qkv, query_offset=7, is_causal=is_causal)  # noqa: E731
    got = lambda *qkv: merged(*qkv, is_causal=is_causal)  # noqa: E731
    with op_by_op("reference"):
        values = tuple(got(Q, K, V)), want(Q, K, V)
        gradients = [jax.grad(lambda *qkv, f=f: scalar(f(*qkv)), argnums=(0, 1, 2))(Q, K, V) for f in (got, want)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), *values)
    for x, y in zip(*gradients, strict=True):
        np.testing.assert_allclose(x, y, atol=5e-6)


def random_partials(dtype: Any, dead: Any) -> list[Partial]:
    rng = np.random.default_rng(0)
    outs, lses = rng.normal(size=(3, 4, 5, 8)), rng.normal(size=(3, 4, 5)) * 3
    lses = np.where(dead, -np.inf, lses)
    return [Partial(jnp.asarray(o, dtype), jnp.asarray(x, jnp.float32)) for o, x in zip(outs, lses, strict=True)]


def test_empty_sets_and_rows_with_no_key() -> None:
    """-inf in one set, in all but one, in all; what stands in their out reaches nothing; every gradient is finite."""
    dead = np.zeros((3, 4, 5), bool)
    dead[0, 0], dead[:2, 1], dead[:, 2] = True, True, True
    clean = random_partials(jnp.float32, dead)
    junk = [Partial(jnp.where((lse == -jnp.inf)[..., None], jnp.nan, out), lse) for out, lse in clean]
    out, lse = combine(junk)
    jax.tree.map(np.testing.assert_array_equal, combine(clean), Partial(out, lse))
    assert (out[2] == 0).all() and (lse[2] == -jnp.inf).all() and jnp.isfinite(lse[:2]).all()
    np.testing.assert_array_equal(out[1], clean[2].out[1])
    np.testing.assert_allclose(lse[1], clean[2].lse[1], atol=1e-6)
    gradients = jax.grad(lambda p: scalar(combine(p)))(junk)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert all((g.out[d] == 0).all() and (g.lse[d] == 0).all() for g, d in zip(gradients, dead, strict=True))
    tangents = jax.tree.map(jnp.ones_like, junk)
    pushed = jax.jvp(lambda p: scalar(combine(p)), (junk,), (tangents,))[1]
    pulled = sum(x.sum() for x in jax.tree.leaves(gradients))
    np.testing.assert_allclose(pushed, pulled, rtol=1e-4)


@pytest.mark.parametrize("shift", [0.0, 3e8, -3e8])
def test_large_logits(shift: float) -> None:
    """Weights depend on differences alone, also where the exponentials would leave float32."""
    partials = [Partial(out, jnp.round(lse) * 64 + shift) for out, lse in random_partials(jnp.float32, False)]
    plain = [Partial(out, lse - shift) for out, lse in partials]
    np.testing.assert_allclose(combine(partials).out, combine(plain).out, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_merged_in_float32(dtype: Any) -> None:
    partials = random_partials(dtype, False)
    out, lse = combine(partials)
    exact = combine([Partial(out.astype(jnp.float32), lse) for out, lse in partials])
    assert out.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_array_equal(out, exact.out.astype(dtype))
    running = combine([Partial(jnp.zeros((4, 5, 8)), jnp.full((4, 5), -jnp.inf)), partials[0]])
    assert running.out.dtype == jnp.float32
    np.testing.assert_array_equal(running.out.astype(dtype), partials[0].out)


def test_order_and_grouping_do_not_matter() -> None:
    a, b, c = random_partials(jnp.float32, False)
    for other in (combine([c, a, b]), combine([combine([a, b]), c]), combine(p for p in (a, b, c))):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), other, combine([a, b, c]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), combine([a]), a)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), [a, b, c], [c, a, b])
    batched = jax.jit(jax.vmap(combine))(stacked)
    np.testing.assert_allclose(batched.out[1], combine([c, a, b]).out, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        None,
        "pairs",
        3,
        (jnp.ones((2, 3)), jnp.ones(2)),
        Partial(jnp.ones((2, 3)), jnp.ones(2)),
        [(jnp.ones((2, 3)), jnp.ones(2), jnp.ones(2))],
        [("out", "lse")],
        [(jnp.ones((2, 3), jnp.float8_e4m3fn), jnp.ones(2))],
        [([[1.0], [2.0, 3.0]], jnp.ones(2))],
        [(jnp.ones((2, 3)), jnp.ones(3))],
        [(jnp.ones(()), jnp.ones(()))],
        [(jnp.ones((2, 3)), jnp.ones(2)), (jnp.ones((2, 4)), jnp.ones(2))],
        [(jnp.ones((2, 3), jnp.int32), jnp.ones(2))],
        [(jnp.ones((2, 3)), jnp.ones(2, jnp.int32))],
    ],
)
def test_pairs_that_do_not_fit_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="partials"):
        combine(wrong)
