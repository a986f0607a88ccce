"""Maxima and sums of the elements of a row that one thread holds: four threads share a row of a tile, and exchange
nothing until somebody asks for the row as a whole.

Between the two an array of one value a row is not what its layout says: the four threads hold values of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

ROWS, COLUMNS = 64, 8  # of a tile, in units of which its registers come
CHAINS = 2  # of operations that do not wait for each other
Operation = Callable[[Any, Any], Any]


def thread_maxima(tile: jax.Array) -> jax.Array:
    """[rows], of this thread's elements of [rows, columns]; NaN if one of them is."""
    return _of_thread(arith.maximumf, tile)


def thread_sums(tile: jax.Array) -> jax.Array:
    """Likewise."""
    return _of_thread(arith.addf, tile)


def row_maxima(parts: jax.Array) -> jax.Array:
    """From the threads' maxima to those of the rows, which all four then hold."""
    return _of_row(arith.maximumf, parts)


def row_sums(parts: jax.Array) -> jax.Array:
    """Likewise."""
    return _of_row(arith.addf, parts)


def _of_thread(operation: Operation, tile: jax.Array) -> jax.Array:
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=_rows(tile.shape[0]))
    def emit(_: Any, tile: Any) -> Any:
        rows, columns = tile.shape
        held = tile.registers.reshape(rows // ROWS, columns // COLUMNS, 2)  # pairs; of 16 rows, the first or second 8
        registers = np.empty((rows // ROWS, 2), object)
        for part, half in np.ndindex(registers.shape):
            elements = [vector.extract(pair, [], [i]) for pair in held[part, :, half] for i in range(2)]
            chains = [functools.reduce(operation, elements[first::CHAINS]) for first in range(CHAINS)]
            registers[part, half] = functools.reduce(operation, chains)
        return _array(registers)

    return emit(tile)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def _of_row(operation: Operation, parts: jax.Array) -> jax.Array:
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA.reduce(1),), return_type=_rows(*parts.shape))
    def emit(_: Any, parts: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        everyone, width = utils.c(0xFFFFFFFF, i32), utils.c(0x1F, i32)
        registers = np.empty((parts.shape[0] // ROWS, 2), object)
        for place, register in zip(np.ndindex(registers.shape), parts.registers.flat, strict=True):
            value = vector.extract(register, [], [0])
            for lane in (1, 2):
                other = nvvm.shfl_sync(everyone, value, utils.c(lane, i32), width, nvvm.ShflKind.bfly)
                value = operation(value, other)
            registers[place] = value
        return _array(registers)

    return emit(parts)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def _rows(count: int) -> Any:
    return plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(1))


def _array(values: np.ndarray) -> mgpu.FragmentedArray:
    one = ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.empty(fa.WGMMA_ROW_LAYOUT.registers_shape((values.shape[0] * ROWS,)), object)
    for place, value in zip(np.ndindex(registers.shape), values.flat, strict=True):
        registers[place] = vector.from_elements(one, [value])
    return mgpu.FragmentedArray(_registers=registers, _layout=fa.WGMMA_ROW_LAYOUT, _is_signed=None)
