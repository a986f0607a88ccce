"""Additions to float32 in device memory straight from registers: no buffer in shared memory, no wait.

Additions of one thread to one address happen in its order. Each element of a tile belongs to one thread, so the sum of
what a single warpgroup adds to an array has a fixed order.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

Ref = Any
BYTES = 4
LANES_OF_A_ROW = 4  # threads that hold parts of the same row, and each its sum


def add(target: Ref, starts: tuple[Any, ...], value: jax.Array) -> None:
    """See `matmul.TensorCores.add`."""
    layout = plgpu.Layout.WGMMA if value.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *[plgpu.Layout.WG_SPLAT(())] * value.ndim))
    def emit(_: Any, target: Any, value: Any, *starts: Any) -> None:
        _add(target, value, [start.registers.item() for start in starts])

    emit(target, value, *starts)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def _add(target: Any, value: Any, starts: list[Any]) -> None:
    """A thread's elements stand at constant distances from its first one."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    pitches, _ = target.type.get_strides_and_offset()
    first = next(iter(value.layout.thread_idxs(value.shape)))
    offset = utils.c(0, i64)
    for start, own, pitch in zip(starts, first, pitches, strict=True):
        place = arith.extsi(i64, arith.addi(start, arith.index_cast(i32, own)))
        offset = arith.addi(offset, arith.muli(place, utils.c(pitch * BYTES, i64)))
    address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(target)), offset)
    speaks = None
    if len(value.shape) == 1:
        lane = arith.remui(utils.thread_idx(), utils.c(LANES_OF_A_ROW, i32))
        speaks = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.eq, lane, utils.c(0, i32)))
    strides = value.layout.tiling.tile_strides(tuple(utils.get_contiguous_strides(value.shape)))
    for index in np.ndindex(value.registers.shape):
        distance = np.unravel_index(np.dot(index, strides), value.shape)
        bytes_ = int(np.dot(distance, pitches)) * BYTES
        _reduce(arith.addi(address, utils.c(bytes_, i64)), value.registers[index], speaks)


def _reduce(address: Any, register: Any, speaks: Any) -> None:
    held = [vector.extract(register, [], [i]) for i in range(ir.VectorType(register.type).shape[0])]
    if speaks is None:
        assert len(held) == 2, "the layout of a product's tile"
        text, constraints = "red.relaxed.gpu.global.add.v2.f32 [$0], {$1, $2};", "l,f,f"
        operands = [address, *held]
    else:
        text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.relaxed.gpu.global.add.f32 [$0], $1; }"
        operands, constraints = [address, *held, speaks], "l,f,r"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)
