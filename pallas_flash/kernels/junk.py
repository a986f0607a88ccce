"""NaN and Inf in values that a mask hides.

A tile that is hidden in part is multiplied as a whole, with weights of 0 where it is hidden, and 0 * NaN is NaN. Hardly
any call has such values, so none pays for them: a CTA notes whether an output of its is not finite, and if one is, it
works through all its tiles once more. Then the warpgroup that copies looks through the values of the tiles that are
hidden in part. It replaces what is not finite by 0 and notes the rows; the warpgroups that compute note which queries
do take part with such a row, and give those NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import softmax
from pallas_flash.kernels.elements import Elements
from pallas_flash.kernels.tile_scores import TileScores

Ref = Any
COLUMNS = 16  # of scores that are looked at together
ROWS = 64  # the registers of a warpgroup hold this many rows at least


class Junk(NamedTuple):
    """What is known of the values in each slot of their buffer."""

    found: Ref  # int32 [slots], whether there is any
    rows: Ref  # float32 [slots, rows], NaN for a row with any, else 0; only where some was found
    readers: Ref  # float32 [warpgroups, queries], NaN for a query that takes part with such a row, else 0
    suspects: Ref  # int32 [warpgroups], whether an output of the warpgroup's is not finite


def scratch(slots: int, rows: int, wgs: int, queries: int) -> Junk:
    """queries: of each warpgroup."""
    flags = lambda count: plgpu.SMEM((count,), jnp.int32)  # noqa: E731
    numbers = lambda *shape: plgpu.SMEM(shape, jnp.float32)  # noqa: E731
    return Junk(flags(slots), numbers(slots, rows), numbers(wgs, queries), flags(wgs))


def trust(junk: Junk, wg: Any, elements: Elements) -> None:
    """Before a warpgroup's first queries."""
    junk.suspects[wg] = jnp.int32(0)
    elements.commit()  # before some warp finds an output that is not finite


def inspect(out: jax.Array, junk: Junk, wg: Any, elements: Elements) -> None:
    """Note whether the sums of a query tile, [queries, head_dim], are not finite. That they are so large that their sum
    overflows makes work, but nothing wrong."""
    suspicious = elements.any(softmax.fold(jnp.add, out) * 0 != 0)
    pl.when(suspicious)(lambda: _set(junk.suspects, wg))


def is_suspected(junk: Junk) -> jax.Array:
    """Whether any warpgroup of the CTA found something; after all have ended and told so."""
    flags = [junk.suspects[wg] for wg in range(junk.suspects.shape[0])]
    return functools.reduce(jnp.bitwise_or, flags) != 0


def clean(values: Ref, columns: int, junk: Junk, slot: Any, elements: Elements) -> None:
    """Make values, [rows, head_dim], finite and say in junk[slot] which rows were not. Reads `columns` at a time."""
    rows, head_dim = values.shape
    starts = [*range(0, rows - ROWS + 1, ROWS), *([rows - ROWS] if rows % ROWS else [])]
    parts = head_dim // columns  # several in a loop, as together they would not fit into registers

    def at(start: int, part: Any) -> Ref:
        first = 0 if parts == 1 else pl.multiple_of(part * columns, columns)
        return values.at[pl.ds(start, ROWS), pl.ds(first, columns)]

    def look(start: int, part: Any, _: None) -> None:  # in 16 bits: two elements an instruction
        tile = plgpu.layout_cast(at(start, part)[...], plgpu.Layout.WGMMA)
        nothing = softmax.fold(jnp.add, tile * 0)
        some = elements.any(nothing.astype(jnp.float32) != 0)  # NaN is
        pl.when(some)(lambda: _set(junk.found, slot))

    def clean_part(start: int, part: Any, bad: jax.Array) -> jax.Array:
        tile = _load(at(start, part))
        bad += _poison(tile)
        at(start, part)[...] = jnp.where(tile * 0 == 0, tile, 0).astype(values.dtype)
        return bad

    junk.found[slot] = jnp.int32(0)
    elements.commit()  # before some warp finds junk
    for start in starts:
        lax.fori_loop(0, parts, functools.partial(look, start), None, unroll=parts == 1)
    elements.commit()

    @pl.when(junk.found[slot] != 0)
    def _() -> None:
        for start in starts:
            bad = lax.fori_loop(0, parts, functools.partial(clean_part, start), _nothing(ROWS), unroll=parts == 1)
            junk.rows[slot, pl.ds(start, ROWS)] = bad
        elements.commit()


def forget(junk: Junk, wg: Any, elements: Elements) -> None:
    """Before a warpgroup's next queries."""
    junk.readers[wg] = _nothing(junk.readers.shape[1])
    elements.commit()


def note_readers(tile_of: Callable[[], TileScores], junk: Junk, slot: Any, wg: Any) -> None:
    """Where junk was found in values[slot], note which queries of their tile take part with it."""

    def note_columns(part: jax.Array) -> None:
        tile, first = tile_of(), part * COLUMNS
        # The flag is 1, which the compiler does not know: else it keeps the mask's bits from the step, just in case.
        tile = tile._replace(index=tile.index.columns(first, COLUMNS, zero=junk.found[slot] - 1))
        shape = tile.index.shape
        logits = tile.biased(plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA))
        logits = tile.masked(logits, None) if tile.spec.mask else logits
        bad = plgpu.layout_cast(junk.rows[slot, pl.ds(first, COLUMNS)], plgpu.Layout.WGMMA.reduce(0))
        read = jnp.where(logits > -jnp.inf, lax.broadcast_in_dim(bad, shape, (1,)), 0.0)
        junk.readers[wg] = of_readers(junk, wg) + read.sum(axis=1)
        tile.elements.commit()

    pl.when(junk.found[slot] != 0)(lambda: pl.loop(0, junk.rows.shape[1] // COLUMNS)(note_columns))


def of_readers(junk: Junk, wg: Any) -> jax.Array:
    """NaN for each of the warpgroup's queries that takes part with junk, else 0."""
    return plgpu.layout_cast(junk.readers[wg], plgpu.Layout.WGMMA.reduce(1))


def _nothing(rows: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _load(tile: Ref) -> jax.Array:
    return plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA).astype(jnp.float32)


def _poison(tile: jax.Array) -> jax.Array:
    """0 for a row that is finite, else NaN."""
    return (tile * 0).sum(axis=1)


def _set(flags: Ref, slot: jax.Array) -> None:
    flags[slot] = jnp.int32(1)
