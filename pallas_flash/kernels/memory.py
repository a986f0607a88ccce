"""Shared-memory buffers in the arrangement that TMA and wgmma both want."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_ROWS = 8


def tile_columns(shape: tuple[int, ...], dtype: Any, *, contract_rows: bool = False, column_parts: int = 1) -> int:
    """Elements of a swizzled row of a buffer of matrices (the last two axes): the widest that fits.

    column_parts: it is also read in that many parts of columns.
    contract_rows: the rows are the axis that a product sums over (V in P V); wgmma then also wants their number to be
    a multiple of the elements in a swizzled row.
    """
    rows, columns = shape[-2:]
    widths = [swizzle // np.dtype(dtype).itemsize for swizzle in (128, 64, 32)]
    return next(w for w in widths if columns // column_parts % w == 0 and not (contract_rows and rows % w))


def transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The arrangement that wgmma can read and TMA can fill: tiles of 8 swizzled rows."""
    return plgpu.TilingTransform((TILE_ROWS, columns)), plgpu.SwizzleTransform(columns * np.dtype(dtype).itemsize)


def matrix(shape: tuple[int, ...], dtype: Any, *, contract_rows: bool = False, column_parts: int = 1) -> Any:
    """A buffer of matrices in that arrangement; the options are those of `tile_columns`."""
    columns = tile_columns(shape, dtype, contract_rows=contract_rows, column_parts=column_parts)
    return plgpu.SMEM(shape, dtype, transforms=transforms(columns, dtype))


def rows(shape: tuple[int, ...]) -> Any:
    """A buffer for one float32 a row."""
    return plgpu.SMEM(shape, jnp.float32)


def store_rows(source: Any, target: Any, rows: Any) -> None:
    """Copy one value a row to `target[rows]` as far as that exists. Unlike copies of matrices, Mosaic's copies of
    contiguous memory are not clipped at the end of the array."""
    length, size = target.shape[0], rows.size
    end = rows.start + size

    @pl.when(end <= length)
    def _() -> None:
        plgpu.copy_smem_to_gmem(source, target.at[rows])

    if rest := length % size:

        @pl.when(end == length - rest + size)
        def _() -> None:
            plgpu.copy_smem_to_gmem(source.at[pl.ds(0, rest)], target.at[pl.ds(rows.start, rest)])


def add_matrix(source: Any, target: Any, predicate: Any = None, *, interpreted: bool) -> None:
    """Add a float32 matrix to one in device memory, in the background, if the predicate holds; the order of several
    sums is not defined. The interpreter only copies: it has no such addition, and no predicate."""
    if not interpreted:
        plgpu.copy_smem_to_gmem(source, target, predicate, reduction_op="add")
        return
    copy = lambda: plgpu.copy_smem_to_gmem(source, target)  # noqa: E731
    copy() if predicate is None else pl.when(predicate)(copy)
