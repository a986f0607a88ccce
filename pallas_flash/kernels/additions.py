"""Additions to float32 in device memory straight from registers, and stores: no buffer in shared memory, no wait.

Additions of one thread to one address happen in its order. Each element of a tile belongs to one thread, so the sum of
what a single warpgroup adds to an array has a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

Ref = Any
BYTES = 4
VECTORS_FROM = 9  # the compute capability whose GPUs add two elements at once
LANES_OF_A_ROW = 4  # threads that hold parts of the same row, and each its sum


def add(target: Ref, starts: tuple[Any, ...], value: jax.Array) -> None:
    """See `elements.Elements.add`."""
    _for_each_place(target, starts, value, _reduce)


def store_rows(target: Ref, start: Any, value: jax.Array) -> None:
    """target[start:] = one float32 a row of a tile, as far as that exists."""
    _for_each_place(target, (start,), value, _store, clip=True)


def _for_each_place(target: Ref, starts: tuple[Any, ...], value: jax.Array, emit: Any, *, clip: bool = False) -> None:
    layout = plgpu.Layout.WGMMA if value.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *[plgpu.Layout.WG_SPLAT(())] * value.ndim))
    def emit_all(_: Any, target: Any, value: Any, *starts: Any) -> None:
        for place in _places(target, value, [start.registers.item() for start in starts], clip):
            emit(*place)

    emit_all(target, value, *starts)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def _places(target: Any, value: Any, starts: list[Any], clip: bool) -> Iterator[tuple[Any, Any, Any]]:
    """(address, register, whether it is this thread's to write: i32, or None for yes) of a thread's elements. They
    stand at constant distances from its first one. clip: only those inside."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    pitches, _ = target.type.get_strides_and_offset()
    first = next(iter(value.layout.thread_idxs(value.shape)))
    places = [arith.addi(start, arith.index_cast(i32, own)) for start, own in zip(starts, first, strict=True)]
    offset = utils.c(0, i64)
    for place, pitch in zip(places, pitches, strict=True):
        offset = arith.addi(offset, arith.muli(arith.extsi(i64, place), utils.c(pitch * BYTES, i64)))
    address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(target)), offset)
    speaks = None
    if len(value.shape) == 1:
        lane = arith.remui(utils.thread_idx(), utils.c(LANES_OF_A_ROW, i32))
        speaks = arith.cmpi(arith.CmpIPredicate.eq, lane, utils.c(0, i32))
    strides = value.layout.tiling.tile_strides(tuple(utils.get_contiguous_strides(value.shape)))
    for index in np.ndindex(value.registers.shape):
        distance = np.unravel_index(np.dot(index, strides), value.shape)
        writes = speaks
        if clip:
            left = arith.subi(utils.c(target.type.shape[0], i32), places[0])
            inside = arith.cmpi(arith.CmpIPredicate.sgt, left, utils.c(int(distance[0]), i32))
            writes = arith.andi(speaks, inside)
        bytes_ = int(np.dot(distance, pitches)) * BYTES
        flag = None if writes is None else arith.extui(i32, writes)
        yield arith.addi(address, utils.c(bytes_, i64)), value.registers[index], flag


def _held(register: Any) -> list[Any]:
    return [vector.extract(register, [], [i]) for i in range(ir.VectorType(register.type).shape[0])]


def _reduce(address: Any, register: Any, writes: Any) -> None:
    held = _held(register)
    if writes is not None:
        text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.relaxed.gpu.global.add.f32 [$0], $1; }"
        _emit(text, [address, *held, writes], "l,f,r")
    elif utils.get_arch().major >= VECTORS_FROM:
        assert len(held) == 2, "the layout of a product's tile"
        _emit("red.relaxed.gpu.global.add.v2.f32 [$0], {$1, $2};", [address, *held], "l,f,f")
    else:
        for i, element in enumerate(held):
            _emit(f"red.relaxed.gpu.global.add.f32 [$0 + {i * BYTES}], $1;", [address, element], "l,f")


def _store(address: Any, register: Any, writes: Any) -> None:
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1; }"
    _emit(text, [address, *_held(register), writes], "l,f,r")


def _emit(text: str, operands: list[Any], constraints: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)
