"""Stores from registers to rows of an array in device memory that need not follow each other."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

Ref = Any


def scatter(target: Ref, rows: jax.Array, value: jax.Array) -> None:
    """See `matmul.TensorCores.scatter`."""
    line = plgpu.Layout.WGMMA.reduce(1)
    layout = plgpu.Layout.WGMMA if value.ndim == 2 else line

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), line, layout))
    def emit(_: Any, target: Any, rows: Any, value: Any) -> None:
        _scatter(target, rows, value)

    emit(target, rows, value)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def interpreted_scatter(target: Ref, rows: jax.Array, value: jax.Array) -> None:
    columns = tuple(slice(min(sizes)) for sizes in zip(target.shape[1:], value.shape[1:], strict=True))

    @pl.loop(0, rows.shape[0])
    def _(i: jax.Array) -> None:
        @pl.when(rows[i] >= 0)
        def _() -> None:
            target[(rows[i], *columns)] = value[(i, *columns)]


def _scatter(target: Any, rows: Any, value: Any) -> None:
    """A thread holds a few rows, and of each the columns at constant distances from its first one."""
    i64, itemsize = ir.IntegerType.get_signless(64), utils.bytewidth(value.mlir_dtype)
    (pitch, *_), _ = target.type.get_strides_and_offset()
    column = utils.c(0, i64)
    if len(value.shape) == 2:
        _, first = next(iter(value.layout.thread_idxs(value.shape)))
        column = arith.index_cast(i64, first)
    base = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(target)), arith.muli(column, utils.c(itemsize, i64)))
    targets = {}
    for (row,), register in _by_distance(rows):
        index = vector.extract(register, [], [0])
        offset = arith.muli(arith.extsi(i64, index), utils.c(pitch * itemsize, i64))
        targets[row] = index, arith.addi(base, offset)
    for (row, *columns), register in _by_distance(value):
        index, address = targets[row]
        if columns and columns[0] >= target.type.shape[1]:
            continue
        bytes_ = sum(columns) * itemsize
        _store(arith.addi(address, utils.c(bytes_, i64)), index, register, itemsize)


def _by_distance(array: Any) -> list[tuple[tuple[int, ...], Any]]:
    """The registers of a thread, and how far from its first element the first of each stands."""
    strides = array.layout.tiling.tile_strides(tuple(utils.get_contiguous_strides(array.shape)))
    places = [(index, int(np.dot(index, strides))) for index in np.ndindex(array.registers.shape)]
    distance = lambda place: tuple(int(x) for x in np.unravel_index(place, array.shape))  # noqa: E731
    return [(distance(place), array.registers[index]) for index, place in places]


def _store(address: Any, row: Any, register: Any, itemsize: int) -> None:
    """Where row is not below 0."""
    (count,) = ir.VectorType(register.type).shape
    words = count * itemsize // 4
    assert words in (1, 2), "a tile's 16-bit pair, its float32 pair, or a float32"
    word = register if itemsize == 4 else vector.bitcast(ir.VectorType.get((1,), ir.F32Type.get()), register)
    held = [vector.extract(word, [], [i]) for i in range(words)]
    kind, names = ("f32", "$2") if words == 1 else ("v2.f32", "{$2, $3}")
    text = f"{{ .reg .pred p; setp.ge.s32 p, $1, 0; @p st.global.{kind} [$0], {names}; }}"
    constraints = ",".join(["l", "r", *["f"] * words])
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [address, row, *held], text, constraints, has_side_effects=True)
