"""The matrix products of attention in plain JAX, over grouped heads, with one promise beside the arithmetic: a pair
that takes no part contributes nothing, not even 0 * NaN."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.spec import Array, accumulator_dtype


def group(x: Array, num_kv_heads: int) -> Array:
    """[B, N, t, d] -> [B, K, N/K, t, d]: the query heads that share a key head, beside each other."""
    batch, num_heads, rows, width = x.shape
    return x.reshape(batch, num_kv_heads, num_heads // max(num_kv_heads, 1), rows, width)


def finite_part(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


@jax.custom_batching.custom_vmap
def _any(flags: Array) -> Array:
    return jnp.any(flags)


@_any.def_vmap
def _any_vmap(axis_size: int, in_batched: Any, flags: Array) -> tuple[Array, bool]:
    """One flag for all instances of a vmap: `cond` on it stays a branch; on many flags it would compute both sides."""
    del axis_size, in_batched
    return jnp.any(flags), False


def has_junk(*arrays: Array) -> Array:
    """Whether NaN or Inf stands anywhere in the arrays: bool []."""
    return sum((_any(~jnp.isfinite(lax.stop_gradient(x))) for x in arrays), start=jnp.zeros((), bool))


def dot(subscripts: str, a: Array, b: Array, precision: Any) -> Array:
    """An einsum that accumulates in `accumulator_dtype`. A float32 factor (softmax weights, ds) is rounded to bfloat16
    beside a bfloat16 one, but never to float16, whose range it can leave."""
    accumulator = accumulator_dtype(b.dtype)
    if a.dtype != b.dtype:
        common = b.dtype if b.dtype == jnp.bfloat16 else accumulator
        a, b = a.astype(common), b.astype(common)
    if precision is None and a.dtype == accumulator:
        precision = lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=accumulator)


def scores(q: Array, k: Array, precision: Any) -> Array:
    """q.k: [B, N, t, d], [B, K, s, d] -> [B, N, t, s]."""
    product = dot("bkgtd,bksd->bkgts", group(q, k.shape[1]), k, precision)
    return product.reshape(*q.shape[:3], k.shape[2])


def differentiable_scores(q: Array, k: Array, precision: Any) -> Array:
    """`scores` whose derivative never multiplies by a NaN or Inf of q or k; either of them makes its scores NaN."""
    junk_rows, junk_keys = (jnp.where(jnp.isfinite(x).all(axis=-1), 0, jnp.nan) for x in (q, k))
    junk_keys = jnp.repeat(junk_keys, q.shape[1] // max(k.shape[1], 1), axis=1)
    clean = scores(finite_part(q), finite_part(k), precision)
    return clean + (junk_rows[..., :, None] + junk_keys[..., None, :]).astype(clean.dtype)


def sum_over_keys(weights: Array, x: Array, live: Array | None, precision: Any, junk: Array) -> Array:
    """Sum of weights[i, j] * x[j] over the live pairs: [B, N, t, s], [B, K, s, d] -> [B, N, t, d]."""
    rows = (*weights.shape[:3], x.shape[3])
    return _live_sum("bkgts,bksd->bkgtd", weights, x, live, precision, junk, x.shape[1]).reshape(rows)


def sum_over_queries(
    weights: Array, x: Array, live: Array | None, precision: Any, junk: Array, num_kv_heads: int
) -> Array:
    """Sum of weights[i, j] * x[i] over the live pairs and over the heads of a group: [B, N, t, s], [B, N, t, d] ->
    [B, K, s, d]."""
    return _live_sum("bkgts,bkgtd->bksd", weights, group(x, num_kv_heads), live, precision, junk, num_kv_heads)


def _live_sum(
    subscripts: str, weights: Array, x: Array, live: Array | None, precision: Any, junk: Array, num_kv_heads: int
) -> Array:
    def plain(weights: Array, x: Array) -> Array:
        return dot(subscripts, weights, x, precision)

    def careful(weights: Array, x: Array) -> Array:
        """The finite part, plus NaN or Inf where a live pair brings one."""
        taking_part = jnp.ones(shape, bool) if live is None else jnp.broadcast_to(live, shape)
        weights_, x_ = lax.stop_gradient((weights, x))
        # One key head after the other: this branch is rarely taken, and should need little memory.
        heads = (group(taking_part, num_kv_heads), weights_, x_)
        by_head = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0)[:, :, None], heads)
        poison = lax.map(lambda head: _poison(subscripts, *head)[:, 0], by_head)
        finite = plain(weights, finite_part(x))
        return finite + jnp.moveaxis(poison, 0, 1).astype(finite.dtype)

    shape = weights.shape
    return lax.cond(junk, careful, plain, group(weights, num_kv_heads), x)


def _poison(subscripts: str, taking_part: Array, weights: Array, x: Array) -> Array:
    """NaN, Inf or -Inf where a pair that takes part multiplies one, else 0."""
    some = lambda pairs, values: dot(  # noqa: E731
        subscripts, (taking_part & pairs).astype(jnp.bfloat16), values.astype(jnp.bfloat16), None
    )
    positive, negative, zero = weights > 0, weights < 0, weights == 0
    up = some(positive, x == jnp.inf) + some(negative, x == -jnp.inf) > 0
    down = some(positive, x == -jnp.inf) + some(negative, x == jnp.inf) > 0
    nan = (some(jnp.ones_like(zero), jnp.isnan(x)) + some(zero, jnp.isinf(x)) > 0) | (up & down)
    return jnp.where(nan, jnp.nan, jnp.where(up, jnp.inf, jnp.where(down, -jnp.inf, 0)))
