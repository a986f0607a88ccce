"""Masks on one tile of scores in registers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class TileIndex:
    """`spec.Index` of a tile of a kernel: rows are queries and columns keys, or the other way round if transposed. Its
    fields are made when first read: what nobody reads must not be there at all, as Mosaic finds no layout for it.

    Row and column indices are made from one value a row or column: as whole tiles of their own, the compiler would
    keep them in registers across the loop over keys."""

    shape: tuple[int, int]
    batch: jax.Array
    head: jax.Array
    q_base: jax.Array
    kv_base: jax.Array
    q_offset: Any
    transposed: bool = False

    @functools.cached_property
    def q_row(self) -> jax.Array:
        return self._spread(self.q_base, self._q_axis)

    @functools.cached_property
    def q_pos(self) -> jax.Array:
        return self._spread(self.q_base + self.q_offset, self._q_axis)

    @functools.cached_property
    def kv_pos(self) -> jax.Array:
        return self._spread(self.kv_base, 1 - self._q_axis)

    @property
    def _q_axis(self) -> int:
        return int(self.transposed)

    def _spread(self, base: jax.Array, axis: int) -> jax.Array:
        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
        line = plgpu.layout_cast(lax.iota(jnp.int32, self.shape[axis]), layout) + base
        return lax.broadcast_in_dim(line, self.shape, (axis,))
