"""NaN and Inf in values that a mask hides.

A tile that is hidden in part is multiplied as a whole, with weights of 0 where it is hidden, and 0 * NaN is NaN. So the
warpgroup that copies looks through the values of such tiles. It replaces what is not finite by 0 and notes the rows;
the warpgroups that compute note which queries do take part with such a row, and give those NaN.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import matmul, softmax

Ref = Any
COLUMNS = 16  # of scores that are looked at together
ROWS = 64  # the registers of a warpgroup hold this many rows at least


class Junk(NamedTuple):
    """What is known of the values in each slot of their buffer."""

    found: Ref  # int32 [slots], whether there is any
    rows: Ref  # float32 [slots, rows], NaN for a row with any, else 0; only where some was found
    readers: Ref  # float32 [warpgroups, queries], NaN for a query that takes part with such a row, else 0


def scratch(slots: int, rows: int, wgs: int) -> Junk:
    return Junk(
        plgpu.SMEM((slots,), jnp.int32), plgpu.SMEM((slots, rows), jnp.float32), plgpu.SMEM((wgs, ROWS), jnp.float32)
    )


def clean(values: Ref, columns: int, junk: Junk, slot: Any, tensor_cores: matmul.TensorCores) -> None:
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
        some = tensor_cores.any(nothing.astype(jnp.float32) != 0)  # NaN is
        pl.when(some)(lambda: _set(junk.found, slot))

    def clean_part(start: int, part: Any, bad: jax.Array) -> jax.Array:
        tile = _load(at(start, part))
        bad += _poison(tile)
        at(start, part)[...] = jnp.where(tile * 0 == 0, tile, 0).astype(values.dtype)
        return bad

    junk.found[slot] = jnp.int32(0)
    plgpu.commit_smem()  # before some warp finds junk
    for start in starts:
        lax.fori_loop(0, parts, functools.partial(look, start), None, unroll=parts == 1)
    plgpu.commit_smem()

    @pl.when(junk.found[slot] != 0)
    def _() -> None:
        for start in starts:
            bad = lax.fori_loop(0, parts, functools.partial(clean_part, start), _nothing(), unroll=parts == 1)
            junk.rows[slot, pl.ds(start, ROWS)] = bad
        plgpu.commit_smem()


def forget(junk: Junk, wg: jax.Array) -> None:
    """Before a warpgroup's next queries."""
    junk.readers[wg] = _nothing()
    plgpu.commit_smem()


def note_readers(takes_part: jax.Array, junk: Junk, keys: tuple[Any, Any], wg: jax.Array) -> None:
    """takes_part: bool [queries, keys] of a tile. keys: slot and rows of its values."""
    rows = plgpu.layout_cast(junk.rows[keys], plgpu.Layout.WGMMA.reduce(0))
    read = jnp.where(takes_part, lax.broadcast_in_dim(rows, takes_part.shape, (1,)), 0.0)
    junk.readers[wg] = of_readers(junk, wg) + read.sum(axis=1)
    plgpu.commit_smem()


def of_readers(junk: Junk, wg: jax.Array) -> jax.Array:
    """NaN for each of the warpgroup's queries that takes part with junk, else 0."""
    return plgpu.layout_cast(junk.readers[wg], plgpu.Layout.WGMMA.reduce(1))


def _nothing() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _load(tile: Ref) -> jax.Array:
    return plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA).astype(jnp.float32)


def _poison(tile: jax.Array) -> jax.Array:
    """0 for a row that is finite, else NaN."""
    return (tile * 0).sum(axis=1)


def _set(flags: Ref, slot: jax.Array) -> None:
    flags[slot] = jnp.int32(1)
