"""Copies of matrices between device and shared memory, for any shape.

Pallas' own copies see an array as tiles of 8 rows by one swizzled row. Where the sequence length is no multiple of 8,
or the head dim none of a tile's columns, there is no such view. Here the hardware then sees the array as it is: one
copy for every 8 rows, clipped at the end of the rows and of the columns alike; what lies beyond reads as zeros and is
never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.lowering import register_lowering_rule
from jax.core import ShapedArray  # pyright: ignore[reportAttributeAccessIssue]
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import launch_context, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_flash.kernels import memory

Ref = Any
_SCALAR = plgpu.Layout.WG_SPLAT(())


class Rows(NamedTuple):
    """`size` rows of one head of an array [B, T, N, H], from `start` on; they may run past the array's end."""

    batch: Any
    start: Any
    head: Any
    size: int


def padded(array: jax.Array, rows: int, columns: int) -> jax.Array:
    """[B, T, N, H] with T and H rounded up to multiples of these, by zeros."""
    missing = (0, -array.shape[1] % rows), (0, 0), (0, -array.shape[3] % columns)
    return jnp.pad(array, ((0, 0), *missing)) if missing != ((0, 0),) * 3 else array


def load(
    source: Ref,
    rows: Rows,
    buffer: Ref,
    produced: Ref,
    slot: Any,
    *,
    contract_rows: bool = False,
    to_row: int | None = None,
) -> None:
    """Start filling buffer[slot] from source[rows]; produced[slot] gets one arrival, and completes when all landed.

    contract_rows: as the buffer was made, see `memory.tile_columns`. to_row: fill only from that row on.
    """
    part = buffer.at[slot] if to_row is None else buffer.at[slot, pl.ds(to_row, rows.size)]
    if _is_tiled(source.shape, buffer):
        at = rows.batch, pl.ds(rows.start, rows.size), rows.head
        plgpu.copy_gmem_to_smem(source.at[at], part, produced.at[slot])
        return
    columns = memory.tile_columns(buffer.shape, buffer.dtype, contract_rows=contract_rows)
    target = plgpu.RefType(memory.transforms(columns, buffer.dtype))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), target, *[_SCALAR] * 5))
    def copy(ctx: Any, source: Any, target: Any, barriers: Any, slot: Any, *at: Any) -> None:
        utils.warpgroup_barrier()  # as Pallas' own copies: what read the buffer before has ended
        barrier = _barrier(barriers, slot)
        leader = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        # Under Pallas every thread of the warpgroup arrives: each expects its share.
        barrier.arrive_expect_tx(rows.size * buffer.shape[-1] * buffer.dtype.itemsize // utils.WARPGROUP_SIZE)
        for piece, where, transform in _pieces(target, source, at):
            ctx.async_copy(
                src_ref=source,
                dst_ref=piece,
                gmem_slice=where,
                gmem_transform=transform,
                barrier=barrier,
                arrive=False,
                swizzle=columns * buffer.dtype.itemsize,
                predicate=leader,
            )

    arguments = source, part, _address_p.bind(produced), slot, rows.batch, rows.start, rows.head
    copy(*arguments)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def store(buffer: Ref, target: Ref, rows: Rows) -> None:
    """Start copying a buffer to target[rows], as far as that exists."""
    if _is_tiled(target.shape, buffer):
        plgpu.copy_smem_to_gmem(buffer, target.at[rows.batch, pl.ds(rows.start, rows.size), rows.head])
        return
    columns = memory.tile_columns(buffer.shape, buffer.dtype)
    source = plgpu.RefType(memory.transforms(columns, buffer.dtype))

    @plgpu.inline_mgpu(arg_types=(source, plgpu.RefType(), *[_SCALAR] * 3))
    def copy(ctx: Any, source: Any, target: Any, *at: Any) -> None:
        for piece, where, transform in _pieces(source, target, at):
            ctx.async_copy(
                src_ref=piece,
                dst_ref=target,
                gmem_slice=where,
                gmem_transform=transform,
                swizzle=columns * buffer.dtype.itemsize,
            )

    copy(buffer, target, rows.batch, rows.start, rows.head)  # pyright: ignore[reportCallIssue]


def _is_tiled(shape: tuple[int, ...], buffer: Ref) -> bool:
    return shape[1] % memory.TILE_ROWS == 0 and shape[3] == buffer.shape[-1]


# Where barriers stand in shared memory: Pallas has no operation that says so.
_address_p = Primitive("flash_attention_barrier_address")
_address_p.def_abstract_eval(lambda barriers: ShapedArray((), jnp.int32))


@register_lowering_rule(_address_p, mgpu.LoweringSemantics.Warpgroup)
def _(ctx: Any, barriers: Any) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), barriers[0].get_ptr())


def _barrier(address: Any, slot: Any) -> utils.BarrierRef:
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address.registers.item())
    return utils.BarrierRef(pointer, slot.registers.item(), None, 1)


def _index(scalar: Any) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), scalar.registers.item())


def _pieces(smem: Any, gmem: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...], tuple[Any, ...]]]:
    """(tiles in shared memory, slice of the array, its transforms): for every 8 rows their whole tiles, which lie one
    after the other, and the tile that sticks out over the head dim, if one does."""
    groups, _, _, columns = ir.MemRefType(smem.type).shape
    head_dim = ir.MemRefType(gmem.type).shape[3]
    whole = head_dim // columns
    side_by_side = (
        launch_context.TileTransform((columns,), rounding=launch_context.Rounding.DOWN),
        launch_context.TransposeTransform((1, 0, 2)),
    )
    batch, start, head = (_index(x) for x in at)
    for group in range(groups):
        first = arith.addi(start, utils.c(group * memory.TILE_ROWS, ir.IndexType.get()))
        rows = batch, utils.ds(first, memory.TILE_ROWS), head
        if whole:
            tiles = utils.memref_slice(smem, (group, slice(0, whole)))
            yield tiles, (*rows, utils.ds(0, whole * columns)), side_by_side
        if head_dim % columns:
            yield utils.memref_slice(smem, (group, whole)), (*rows, utils.ds(whole * columns, columns)), ()
