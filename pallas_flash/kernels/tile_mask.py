"""Where the elements of a tile of scores in registers stand."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.elements import Span

WARP_ROWS = 16  # queries of a tile that each warp has for itself


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
    columns_inside: bool = False  # it is known that none stands behind the end of the arrays

    @functools.cached_property
    def q_row(self) -> jax.Array:
        return self.spread(self._line(self.q_base, self.q_axis), self.q_axis)

    @functools.cached_property
    def q_pos(self) -> jax.Array:
        return self.spread(self._line(self.q_base + self.q_offset, self.q_axis), self.q_axis)

    @functools.cached_property
    def kv_pos(self) -> jax.Array:
        return self.spread(self._line(self.kv_base, self.kv_axis), self.kv_axis)

    @property
    def q_axis(self) -> int:
        return int(self.transposed)

    @property
    def kv_axis(self) -> int:
        return 1 - self.q_axis

    def span(self, axis: int, length: int) -> Span:
        """Where the tile's rows (axis 0) or columns stand along the axis of an array of this many queries or keys."""
        base = self.q_base if axis == self.q_axis else self.kv_base
        # A tile begins inside the array, but its rows may be the second warpgroup's and all stand behind the end.
        clip = axis == 0 or not (self.columns_inside or length % self.shape[axis] == 0)
        return Span(axis, self.shape[axis], base, clip)

    def spread(self, line: jax.Array, axis: int) -> jax.Array:
        """One value for each row (axis 0) or column as a tile."""
        return lax.broadcast_in_dim(line, self.shape, (axis,))

    def columns(self, first: Any, size: int, *, zero: Any) -> TileIndex:
        """Of a part of the tile. zero: 0, which the compiler need not know."""
        return dataclasses.replace(
            self, shape=(self.shape[0], size), q_base=self.q_base + zero, kv_base=self.kv_base + first
        )

    def _line(self, base: jax.Array, axis: int) -> jax.Array:
        return line(self.shape[axis], axis) + base


@dataclasses.dataclass(frozen=True)
class GroupedIndex:
    """The same where all query heads of a key head share a tile: row token * group + head, keys as columns."""

    shape: tuple[int, int]
    batch: jax.Array
    first_head: jax.Array
    group: int  # heads
    tokens: int  # of the whole call
    row_base: jax.Array
    kv_base: jax.Array
    q_offset: jax.Array  # position of token 0

    @property
    def head(self) -> jax.Array:
        heads = self.first_head if self.group == 1 else self.first_head + lax.rem(self._rows, self._group)
        return self._spread(heads, 0)

    @property
    def q_pos(self) -> jax.Array:
        tokens = 0 if self.tokens == 1 else self._rows if self.group == 1 else lax.div(self._rows, self._group)
        return self._spread(self.q_offset + tokens, 0)

    @property
    def kv_pos(self) -> jax.Array:
        return self._spread(line(self.shape[1], 1) + self.kv_base, 1)

    def columns(self, first: Any, size: int, *, zero: Any) -> GroupedIndex:
        """As of `TileIndex`."""
        return dataclasses.replace(
            self, shape=(self.shape[0], size), row_base=self.row_base + zero, kv_base=self.kv_base + first
        )

    @property
    def _rows(self) -> jax.Array:
        return line(self.shape[0], 0) + self.row_base

    @property
    def _group(self) -> jax.Array:
        return jnp.full((self.shape[0],), self.group, jnp.int32)

    def _spread(self, values: jax.Array, axis: int) -> jax.Array:
        return values if values.ndim == 0 else lax.broadcast_in_dim(values, self.shape, (axis,))


@dataclasses.dataclass(frozen=True)
class WarpIndex(GroupedIndex):
    """Likewise, but for a tile as in `warp_products`: 16 queries, and for each warp keys of its own."""

    @property
    def kv_pos(self) -> jax.Array:
        rows = lambda value: jnp.full((self.shape[0],), value, jnp.int32)  # noqa: E731
        columns = lambda value: jnp.full((self.shape[1],), value, jnp.int32)  # noqa: E731
        own = line(self.shape[0], 0)
        key = line(self.shape[1], 1)
        part = lax.div(key, columns(WARP_ROWS))
        key += part * columns(self.shape[0] - WARP_ROWS)
        first = lax.div(own, rows(WARP_ROWS)) * rows(WARP_ROWS)
        return self._spread(first, 0) + self._spread(key + self.kv_base, 1)

    @property
    def _rows(self) -> jax.Array:
        return lax.rem(line(self.shape[0], 0), jnp.full((self.shape[0],), WARP_ROWS, jnp.int32)) + self.row_base


def line(size: int, axis: int) -> jax.Array:
    """0, 1, ... along the rows (axis 0) or columns of a tile."""
    return plgpu.layout_cast(lax.iota(jnp.int32, size), plgpu.Layout.WGMMA.reduce(1 - axis))
