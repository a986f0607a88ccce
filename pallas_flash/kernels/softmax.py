"""The online softmax (FlashAttention, section 3.1; FlashAttention-2, section 3.1.1), through exp2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.spec import LN2, LOG2E, AttentionSpec

# Where the running maximum starts: a finite number, so that exp2(-inf - m) = 0 in a row with no key so far, with no
# guard against NaN; and the smallest one, so that a row whose logits are all of this size still has weights.
NO_MAXIMUM = float(np.finfo(np.float32).min)


class Units(NamedTuple):
    """Those of a row's maximum: scores * `scores_to` are in them, and theirs times `to_log2` is a logit in base 2.

    Base 2 itself saves an operation an element, as the subtraction of the maximum joins the multiplication. Where
    logits may be as large as float32 goes (a bias of finfo.min), that product would overflow: units are then natural.
    """

    scores_to: float
    to_log2: float = 1.0

    def of_scores(self, scores: jax.Array) -> jax.Array:
        return scores if self.scores_to == 1 else scores * self.scores_to

    def of_logits(self, logits: jax.Array) -> jax.Array:
        return logits if self.to_log2 == LOG2E else logits * (LOG2E / self.to_log2)

    def log2(self, values: jax.Array) -> jax.Array:
        return values if self.to_log2 == 1 else values * self.to_log2

    def natural(self, values: jax.Array) -> jax.Array:
        return values if self.to_log2 == LOG2E else values * (self.to_log2 * LN2)


def takes_raw_scores(spec: AttentionSpec, *, any_logits: bool) -> bool:
    """Whether the softmax works on q.k itself, with the scale folded into its exponent: a monotonic map."""
    return spec.scale is not None and spec.scale > 0 and spec.soft_cap is None and not any_logits


def units_of(spec: AttentionSpec, *, any_logits: bool) -> Units:
    """Of the row maxima. any_logits: they may be as large as float32 goes."""
    if any_logits:
        return Units(1.0, LOG2E)
    raw = takes_raw_scores(spec, any_logits=any_logits)
    return Units(spec.scale * LOG2E if raw and spec.scale is not None else LOG2E)


COLUMNS = 8  # of a tile that each thread holds two neighbouring elements a row of


class RowStatistics(NamedTuple):
    """Of each row so far. Maximum and sum stay in parts, of every eighth column: the four threads that share a row
    exchange nothing until the row is done.

    `shift` is what is subtracted before exp2. It is the maximum, or behind it by less than the threshold: any shift
    gives the same result as long as nothing overflows (FlashAttention-4 rescales as seldom).
    """

    m: jax.Array  # [rows, COLUMNS], maxima in the kernel's units
    shift: jax.Array  # [rows], likewise
    l: jax.Array  # noqa: E741  [rows, COLUMNS], sums of exp(logits - shift)


class RowTotals(NamedTuple):
    """Of each row in the end: `RowStatistics`, with the parts put together."""

    m: jax.Array
    shift: jax.Array
    l: jax.Array  # noqa: E741


def totals(stats: RowStatistics) -> RowTotals:
    return RowTotals(stats.m.max(axis=1), stats.shift, stats.l.sum(axis=1))


def fold(operation: Callable[[jax.Array, jax.Array], jax.Array], tile: jax.Array) -> jax.Array:
    """Of every eighth column: [rows, COLUMNS]."""
    parts = [tile[:, first : first + COLUMNS] for first in range(0, tile.shape[1], COLUMNS)]
    half = len(parts) // 2  # two chains of operations that do not wait for each other
    chains = [functools.reduce(operation, chain) for chain in (parts[:half], parts[half:]) if chain]
    return functools.reduce(operation, chains)


def rows_like(rows: jax.Array, tile: jax.Array) -> jax.Array:
    """One value a row, for every column of the tile."""
    return lax.broadcast_in_dim(rows, tile.shape, (0,))


def columns_like(columns: jax.Array, tile: jax.Array) -> jax.Array:
    """One value a column, or one for all, for every row of the tile."""
    return columns if columns.ndim == 0 else lax.broadcast_in_dim(columns, tile.shape, (1,))


def maxima(scores: jax.Array, units: Units) -> jax.Array:
    """[rows, COLUMNS]."""
    return jnp.maximum(units.of_scores(fold(jnp.maximum, scores)), NO_MAXIMUM)


def probabilities(scores: jax.Array, shift: jax.Array, units: Units) -> jax.Array:
    """exp(logits), unnormalised."""
    return jnp.exp2(units.log2(units.of_scores(scores) - rows_like(shift, scores)))


def ahead(m: jax.Array, shift: jax.Array, units: Units) -> jax.Array:
    """How far each part's maximum has run ahead of its row's shift, in base 2."""
    return units.log2(m - rows_like(shift, m))


def rescaled(rescale: jax.Array, log2_alpha: jax.Array, out: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What was summed up under the old shift, under the new one."""

    def scaled(*values: jax.Array) -> tuple[jax.Array, ...]:
        alpha = jnp.exp2(log2_alpha)
        return tuple(value * rows_like(alpha, value) for value in values)

    out, sums = lax.cond(rescale, scaled, lambda *values: values, out, sums)
    return out, sums


def advance(
    stats: RowStatistics,
    scores: jax.Array,
    out: jax.Array,
    units: Units,
    is_needed: Callable[[jax.Array], jax.Array],
) -> tuple[RowStatistics, jax.Array, jax.Array]:
    """One step over a tile of scores: the statistics with it, the tile's weights exp(scores - shift), and `out`, what
    was summed up so far, under the new shift. is_needed: how far maxima have run ahead -> whether to rescale."""
    m = jnp.maximum(maxima(scores, units), stats.m)
    rescale = is_needed(ahead(m, stats.shift, units))
    shift = lax.cond(rescale, lambda: m.max(axis=1), lambda: stats.shift)
    out, sums = rescaled(rescale, units.log2(stats.shift - shift), out, stats.l)
    p = probabilities(scores, shift, units)
    return RowStatistics(m, shift, sums + fold(jnp.add, p)), p, out


def soft_cap(scores: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(scores / cap), through exp2: the hardware's own tanh is right to 11 bits only. Near 0, where that
    subtracts nearly equal numbers, by the first terms of the series."""
    ratio = scores * (1 / cap)
    square = ratio * ratio
    series = scores * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return jnp.where(jnp.abs(ratio) < 0.1, series, cap - 2 * cap / (1 + jnp.exp2(ratio * (2 * LOG2E))))


class FinalStatistics(NamedTuple):
    """m in natural units and l, as in `spec.Residuals`, and what normalises the accumulator; 0 in a row with no key."""

    m: jax.Array
    l: jax.Array  # noqa: E741
    normalizer: jax.Array


def finish(stats: RowTotals, units: Units) -> FinalStatistics:
    alive = stats.l > 0
    return FinalStatistics(
        m=jnp.where(alive, units.natural(stats.m), -jnp.inf),
        l=stats.l * jnp.exp2(units.log2(stats.shift - stats.m)),
        normalizer=jnp.where(alive, 1.0 / stats.l, 0.0),
    )


def finish_with_sink(stats: RowTotals, units: Units, sink: jax.Array) -> FinalStatistics:
    """sink: a logit in natural units that takes part in every row's sum and has no value; m is still that of the keys.
    It joins at the end, when the keys' maximum is known."""
    sinks = jnp.full(stats.m.shape, units.of_logits(sink), jnp.float32)
    m = jnp.maximum(stats.m, sinks)
    alpha = jnp.exp2(units.log2(stats.shift - m))
    l = stats.l * alpha + jnp.exp2(units.log2(sinks - m))  # noqa: E741
    return FinalStatistics(
        m=jnp.where(stats.l > 0, units.natural(stats.m), -jnp.inf),
        l=l,
        normalizer=jnp.where(l > 0, alpha / l, 0.0),
    )


def finish_as(spec: AttentionSpec, stats: RowTotals, units: Units, sink: jax.Array | None) -> FinalStatistics:
    """As a call says. Its kernel takes the maximum of the keys' logits from m, if that is asked for, and only then adds
    the sink to m."""
    if sink is None:
        final = finish(stats, units)
    else:
        final = finish_with_sink(stats, units, sink)
        if not spec.return_max_logit:
            final = final._replace(m=jnp.maximum(final.m, sink))
    keep = 1 - spec.dropout_rate
    return final if keep == 1 else final._replace(normalizer=final.normalizer / keep)
