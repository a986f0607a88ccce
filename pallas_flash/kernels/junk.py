"""NaN and Inf in values that a mask hides.

A tile that is hidden in part is multiplied as a whole, with weights of 0 where it is hidden, and 0 * NaN is NaN. So
the warpgroup that copies looks through the values of such tiles. It replaces what is not finite by 0 and notes the
rows; the weights of pairs that do take part with such a row become NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import matmul

Ref = Any
ROWS = 64  # the registers of a warpgroup hold this many rows at least


class Junk(NamedTuple):
    """What is known of the values in each slot of their buffer."""

    found: Ref  # int32 [slots], whether there is any
    rows: Ref  # float32 [slots, rows], NaN for a row with any, else 0


def scratch(slots: int, rows: int) -> Junk:
    return Junk(plgpu.SMEM((slots,), jnp.int32), plgpu.SMEM((slots, rows), jnp.float32))


def clean(values: Ref, columns: int, junk: Junk, slot: jax.Array, tensor_cores: matmul.TensorCores) -> None:
    """Make values[slot], [rows, head_dim], finite and say in `junk` which rows were not. Reads `columns` at a time."""
    rows, head_dim = values.shape[1:]
    starts = [*range(0, rows - ROWS + 1, ROWS), *([rows - ROWS] if rows % ROWS else [])]
    at = lambda start, column: values.at[slot, pl.ds(start, ROWS), pl.ds(column, columns)]  # noqa: E731
    junk.found[slot] = jnp.int32(0)
    plgpu.commit_smem()  # before some warp finds junk
    for start in starts:
        bad = _nothing()
        for column in range(0, head_dim, columns):
            bad += _poison(_load(at(start, column)))
        some = tensor_cores.any(bad != 0)  # NaN is
        pl.when(some)(lambda: _set(junk.found, slot))
    plgpu.commit_smem()

    @pl.when(junk.found[slot] != 0)
    def _() -> None:
        for start in starts:
            bad = _nothing()
            for column in range(0, head_dim, columns):
                tile = _load(at(start, column))
                bad += _poison(tile)
                at(start, column)[...] = jnp.where(tile * 0 == 0, tile, 0).astype(values.dtype)
            junk.rows[slot, pl.ds(start, ROWS)] = bad
        plgpu.commit_smem()


def poison(weights: jax.Array, p: jax.Array, junk: Junk, slot: jax.Array) -> jax.Array:
    """The weights [queries, keys] of a tile, NaN where a key with junk takes part, which p > 0 says."""

    def poisoned(weights: jax.Array) -> jax.Array:
        rows = plgpu.layout_cast(junk.rows[slot], plgpu.Layout.WGMMA.reduce(0))
        return weights + jnp.where(p > 0, lax.broadcast_in_dim(rows, weights.shape, (1,)), 0.0)

    return lax.cond(junk.found[slot] != 0, poisoned, lambda weights: weights, weights)


def _nothing() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _load(tile: Ref) -> jax.Array:
    return plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA).astype(jnp.float32)


def _poison(tile: jax.Array) -> jax.Array:
    """0 for a row that is finite, else NaN."""
    return (tile * 0).sum(axis=1)


def _set(flags: Ref, slot: jax.Array) -> None:
    flags[slot] = jnp.int32(1)
