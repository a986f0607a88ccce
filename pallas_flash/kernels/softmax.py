"""The online softmax (FlashAttention, section 3.1; FlashAttention-2, section 3.1.1), in base 2."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.spec import LN2, LOG2E

# Where the running maximum starts. It is finite so that exp2(-inf - m) = 0 in a row with no key so far: no NaN guard.
NO_MAXIMUM = -1e30


class RowStatistics(NamedTuple):
    """Of each row so far, with logits in base 2.

    `shift` is what exp2 subtracts. It is the maximum, or behind it by less than the threshold of `advance`: any shift
    gives the same result as long as nothing overflows (FlashAttention-4 rescales as seldom).
    """

    m: jax.Array  # the row's maximum
    shift: jax.Array
    l: jax.Array  # noqa: E741  sum of exp2(logits - shift)


def initial_statistics(rows: int, sink: jax.Array | None) -> RowStatistics:
    """sink: a logit in natural units that takes part in every row's sum and has no value."""
    start, weight = NO_MAXIMUM, 0.0
    if sink is not None:
        start = jnp.maximum(sink * LOG2E, NO_MAXIMUM)
        weight = jnp.where(start > NO_MAXIMUM, 1.0, 0.0)  # a sink of -inf is none
    m = jnp.full((rows,), start, jnp.float32)
    return RowStatistics(m, m, jnp.full((rows,), weight, jnp.float32))


def rows_like(rows: jax.Array, tile: jax.Array) -> jax.Array:
    """One value a row, for every column of the tile."""
    return lax.broadcast_in_dim(rows, tile.shape, (0,))


def new_maximum(stats: RowStatistics, scores: jax.Array, to_log2: float) -> jax.Array:
    return jnp.maximum(stats.m, scores.max(axis=1) * to_log2)


def probabilities(scores: jax.Array, shift: jax.Array, to_log2: float) -> jax.Array:
    """exp(logits), unnormalised; logits_log2 = scores * to_log2."""
    return jnp.exp2(scores * to_log2 - rows_like(shift, scores))


def soft_cap(scores: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(scores / cap), through exp2: the hardware's own tanh is right to 11 bits only."""
    return cap - 2 * cap / (1 + jnp.exp2(scores * (2 * LOG2E / cap)))


class FinalStatistics(NamedTuple):
    """m in natural units and l, as in `spec.Residuals`, and what normalises the accumulator; 0 in a row with no key."""

    m: jax.Array
    l: jax.Array  # noqa: E741
    normalizer: jax.Array


def finish(stats: RowStatistics) -> FinalStatistics:
    alive = stats.l > 0
    return FinalStatistics(
        m=jnp.where(alive, stats.m * LN2, -jnp.inf),
        l=stats.l * jnp.exp2(stats.shift - stats.m),
        normalizer=jnp.where(alive, 1.0 / stats.l, 0.0),
    )
