"""Copies of matrices between device and shared memory by the threads of one warpgroup, for any shape: cp.async, which
every GPU since Ampere has, and vectors of 16 bytes back.

Mosaic's own copies are cp.async before Hopper only, want arrays of whole tiles there, and are TMA from Hopper on. These
are the same on all, and what lies beyond the end of the rows or of the head dim reads as zeros and is never written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_flash.kernels import memory
from pallas_flash.kernels.tma import Rows

Ref = Any
_SCALAR = plgpu.Layout.WG_SPLAT(())
WARPGROUP, WIDEST = 128, 16  # threads; of them, those that copy parts of the same row
BYTES, ROW_BYTES = 2, 4  # of an element; of a row's number
CHUNK, CHUNK_BYTES = 8, 16  # what a thread copies at once
UNIT = 32  # buffers have a multiple of this many rows and columns


def load(source: Ref, rows: Rows, buffer: Ref) -> None:
    """Start filling `buffer` from source[rows]; `commit` and `wait_for` say when all has landed."""

    def emit(chunk: _Chunk) -> None:
        size = utils.c(CHUNK_BYTES, ir.IntegerType.get_signless(32))
        if chunk.exists is not None:
            size = arith.select(chunk.exists, size, utils.c(0, size.type))
        text = f"cp.async.cg.shared.global.L2::128B [$0 + {chunk.offset}], [a], 16, $3;"
        chunk.emit(text, [size])

    _for_each_chunk(source, rows, buffer, emit)


def load_rows(source: Ref, start: Any, buffer: Ref) -> None:
    """Likewise one float32 a row, from source[start:], all of it inside and `start` a multiple of 4."""
    (rows,) = buffer.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR))
    def emit(_: Any, source: Any, buffer: Any, start: Any) -> None:
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        thread = arith.andi(utils.thread_idx(), utils.c(WARPGROUP - 1, i32))
        own = arith.muli(thread, utils.c(CHUNK_BYTES, i32))
        place = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(buffer)), own)
        first = arith.muli(arith.extsi(i64, start.registers.item()), utils.c(ROW_BYTES, i64))
        address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(source)), arith.addi(first, arith.extui(i64, own)))
        copies = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.ult, own, utils.c(rows * ROW_BYTES, i32)))
        text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.cg.shared.global [$0], [$1], 16; }"
        llvm.inline_asm(_void(), [place, address, copies], text, "r,l,r", has_side_effects=True)

    emit(source, buffer, start)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def store(buffer: Ref, target: Ref, rows: Rows) -> None:
    """Copy a buffer, which the warpgroup has filled and met after, to target[rows], as far as that exists."""

    def emit(chunk: _Chunk) -> None:
        i32 = ir.IntegerType.get_signless(32)
        exists = utils.c(1, i32) if chunk.exists is None else arith.extui(i32, chunk.exists)
        text = (
            f".reg .pred p; setp.ne.b32 p, $3, 0; .reg .b32 w, x, y, z; "
            f"ld.shared.v4.b32 {{w, x, y, z}}, [$0 + {chunk.offset}]; @p st.global.v4.b32 [a], {{w, x, y, z}};"
        )
        chunk.emit(text, [exists])

    _for_each_chunk(target, rows, buffer, emit)


def commit() -> None:
    """What was started since the last time is one group."""
    _emit("cp.async.commit_group;")


def wait_for(pending: int) -> None:
    """Until at most so many of this thread's groups are in flight. Those of the others: meet after it."""
    _emit(f"cp.async.wait_group {pending};")


def meet() -> None:
    """All threads of the warpgroup are here, and each sees what the others wrote to shared memory."""

    @plgpu.inline_mgpu()
    def emit(_: Any) -> None:
        utils.warpgroup_barrier()

    emit()  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def _emit(text: str) -> None:
    @plgpu.inline_mgpu()
    def emit(_: Any) -> None:
        llvm.inline_asm(_void(), [], text, "", has_side_effects=True)

    emit()  # pyright: ignore[reportCallIssue]


def _void() -> ir.Type:
    return ir.Type.parse("!llvm.void")


class _Chunk(NamedTuple):
    """16 bytes of a thread, in shared memory and in the array."""

    place: Any  # i32, an address in shared memory
    offset: int  # bytes
    source: Any  # i64, an address in device memory, the same for all threads
    own: Any  # i32, bytes from there that are the thread's
    source_offset: int  # and bytes that are the chunk's
    exists: Any  # i1, None: for certain

    def emit(self, text: str, operands: list[Any]) -> None:
        """Instructions that know the place in shared memory as $0, the address in device memory as a, and operands from
        $3 on. The sum that this is stands here, or else the compiler holds it in registers throughout a loop."""
        address = f".reg .b64 a; cvt.u64.u32 a, $2; add.s64 a, a, $1; add.s64 a, a, {self.source_offset};"
        constraints = ",".join(["r", "l", "r", *["r"] * len(operands)])
        arguments = [self.place, self.source, self.own, *operands]
        llvm.inline_asm(_void(), arguments, f"{{ {address} {text} }}", constraints, has_side_effects=True)


def _for_each_chunk(array: Ref, rows: Rows, buffer: Ref, emit: Any) -> None:
    columns = memory.tile_columns(buffer.shape, buffer.dtype)
    matrix = plgpu.RefType(memory.transforms(columns, buffer.dtype))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), matrix, *[_SCALAR] * 3))
    def copy(_: Any, array: Any, buffer: Any, *at: Any) -> None:
        for chunk in _chunks(array, buffer, [x.registers.item() for x in at]):
            emit(chunk)

    at = (jnp.int32(x) for x in (rows.batch, rows.start, rows.head))
    copy(array, buffer, *at)  # pyright: ignore[reportCallIssue]


def _chunks(array: Any, buffer: Any, at: list[Any]) -> Iterator[_Chunk]:
    """All of a thread. Its rows stand a multiple of 8 apart, so that the swizzle, an exclusive or with a row's number,
    is the same for all of them."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    groups, tiles, _, columns = ir.MemRefType(buffer.type).shape
    array_type = ir.MemRefType(array.type)
    (_, length, _, head_dim), (strides, _) = array_type.shape, array_type.get_strides_and_offset()
    row_chunks, tile_chunks = tiles * columns // CHUNK, columns // CHUNK
    width = math.gcd(row_chunks, WIDEST)
    height, tile_bytes = WARPGROUP // width, memory.TILE_ROWS * columns * BYTES
    assert groups * memory.TILE_ROWS % height == 0, "buffers have a multiple of UNIT rows and columns"

    constant = lambda value: utils.c(value, i32)  # noqa: E731
    thread = arith.andi(utils.thread_idx(), constant(WARPGROUP - 1))
    row, chunk = arith.divui(thread, constant(width)), arith.remui(thread, constant(width))
    group, row_of_group = arith.divui(row, constant(8)), arith.remui(row, constant(8))
    tile, chunk_of_tile = (op(chunk, constant(tile_chunks)) for op in (arith.divui, arith.remui))
    flip = arith.shrui(row_of_group, constant({64: 0, 32: 1, 16: 2}[columns]))
    parts = (
        (group, tiles * tile_bytes),
        (tile, tile_bytes),
        (row_of_group, columns * BYTES),
        (arith.xori(chunk_of_tile, flip), CHUNK_BYTES),
    )
    place = llvm.ptrtoint(i32, utils.memref_ptr(buffer))
    for number, size in parts:
        place = arith.addi(place, arith.muli(number, constant(size)))

    source = llvm.ptrtoint(i64, utils.memref_ptr(array))
    for number, stride in zip(at, strides[:3], strict=True):
        source = arith.addi(source, arith.muli(arith.extsi(i64, number), utils.c(stride * BYTES, i64)))
    # What differs from thread to thread is small, and apart from what all have in common.
    own = arith.addi(arith.muli(row, constant(strides[1] * BYTES)), arith.muli(chunk, constant(CHUNK_BYTES)))
    left = arith.subi(constant(length), arith.addi(at[1], row))
    clips = length % (groups * memory.TILE_ROWS) != 0
    for first_row in range(0, groups * memory.TILE_ROWS, height):
        there = arith.cmpi(arith.CmpIPredicate.sgt, left, constant(first_row)) if clips else None
        for first in range(0, row_chunks, width):
            exists, inside = there, head_dim // CHUNK - first  # chunks of the row from here on
            if inside < width:
                within = arith.cmpi(arith.CmpIPredicate.slt, chunk, constant(max(inside, 0)))
                exists = within if there is None else arith.andi(there, within)
            offset = (first_row // memory.TILE_ROWS * tiles + first // tile_chunks) * tile_bytes
            source_offset = (first_row * strides[1] + first * CHUNK) * BYTES
            yield _Chunk(place, offset, source, own, source_offset, exists)
