"""Products of one warpgroup with the instructions that every GPU since Ampere has: ldmatrix and mma.sync.

Each of the four warps multiplies 16 of every 64 rows. Matrices come from shared memory in the arrangement of
`memory.matrix`. Sums, and left operands in registers, are tiles in Mosaic's layout WGMMA: a thread holds the elements
that mma.sync wants of it. (`plgpu.mma` wants each operand in a layout of its own, and P would have to be cast between
the two products.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_flash.kernels import memory

Ref = Any
ROWS = 64  # of a warpgroup; 16 of them a warp's
BLOCK = 16  # rows and columns that one ldmatrix reads
HALF = 8
BYTES = 2


def product(a: Any, b: Ref, acc: jax.Array | None = None, *, transposed: bool = False) -> jax.Array:
    """acc + a @ b in float32; without acc, a @ b. transposed: a @ b.T.

    a: [m, k] in shared memory or in registers, m a multiple of 64; b: [k, n] in shared memory, or [n, k]. k and n are
    multiples of 16.
    """
    arguments, types = (a, b), [_type_of(a), _type_of(b)]
    if acc is not None:
        arguments, types = (*arguments, acc), [*types, plgpu.Layout.WGMMA]
    sizes = (*a.shape, b.shape[0] if transposed else b.shape[1])
    kind = {"bfloat16": "bf16", "float16": "f16"}[np.dtype(b.dtype).name]

    @plgpu.inline_mgpu(
        arg_types=tuple(types),
        return_type=plgpu.ShapeDtypeStruct((sizes[0], sizes[2]), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def emit(_: Any, a: Any, b: Any, acc: Any = None) -> Any:
        left = InRegisters(a) if isinstance(a, mgpu.FragmentedArray) else Blocks.of(a, of_warps=True)
        right = Blocks.of(b, columns_first=transposed)
        return _multiply(kind, left, right, sizes, acc)

    return emit(*arguments)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def _type_of(operand: Any) -> Any:
    if isinstance(operand, jax.Array):
        return plgpu.Layout.WGMMA
    return plgpu.RefType(memory.transforms(memory.tile_columns(operand.shape, operand.dtype), operand.dtype))


def _multiply(kind: str, left: InRegisters | Blocks, right: Blocks, sizes: tuple[int, int, int], acc: Any) -> Any:
    m, k, n = (size // unit for size, unit in zip(sizes, (ROWS, BLOCK, BLOCK), strict=True))
    if acc is None:
        acc = fa.FragmentedArray.splat(utils.c(0.0, ir.F32Type.get()), (sizes[0], sizes[2]), fa.WGMMA_LAYOUT)
    tiles = acc.registers.reshape(m, 2 * n, 2)  # of 8 columns; two halves, of 8 rows, for each warp
    sums = np.empty((m, 2 * n), object)
    for place in np.ndindex(sums.shape):
        sums[place] = [vector.extract(half, [], [i]) for half in tiles[place] for i in range(2)]
    for step in range(k):
        fragments = [left.load(row, step) for row in range(m)]
        for column in range(n):
            block = (column, step) if right.columns_first else (step, column)
            b = right.load(*block, transposed=not right.columns_first)
            for row, a in enumerate(fragments):
                for half in range(2):
                    place = row, 2 * column + half
                    sums[place] = multiply_add(kind, a, b[2 * half : 2 * half + 2], sums[place])
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    tiles = np.empty((m, 2 * n, 2), object)
    for place in np.ndindex(tiles.shape):
        *tile, half = place
        tiles[place] = vector.from_elements(pair, sums[tuple(tile)][2 * half : 2 * half + 2])
    registers = tiles.reshape(acc.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)


def multiply_add(kind: str, a: list[Any], b: list[Any], acc: list[Any]) -> list[Any]:
    """acc + a @ b, 16 x 16 by 16 x 8 elements of one warp."""
    f32 = ir.F32Type.get()
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    result = llvm.inline_asm(llvm.StructType.get_literal([f32] * 4), [*a, *b, *acc], text, constraints)
    return [llvm.extractvalue(f32, result, [i]) for i in range(4)]


class InRegisters(NamedTuple):
    """A 16-bit tile as left operand."""

    tile: mgpu.FragmentedArray

    def load(self, row: int, column: int) -> list[Any]:
        """What a thread holds of 64 rows by 16 columns."""
        rows, columns = self.tile.shape
        tiles = self.tile.registers.reshape(rows // ROWS, columns // HALF, 2)
        i32 = ir.IntegerType.get_signless(32)
        return [utils.bitcast(tiles[row, 2 * column + i, half], i32) for i in range(2) for half in range(2)]


class Blocks(NamedTuple):
    """A matrix in shared memory, to be read in blocks of 16 x 16 (in 8 bits: 16 x 32, a pair standing for one
    element): four times 8 x 8, of which every 8 threads of a warp say where the rows are. The swizzle flips bits of a
    place within 8 rows by the row's number, so that a thread's addresses differ by constants: some added, some
    flipped."""

    address: Any  # i32, where this thread's row of block 0 starts
    tiles: int  # of 8 swizzled rows, side by side
    columns: int  # of a swizzled row
    row_step: int  # blocks of rows that are this warp's: every 4th, or all
    columns_first: bool  # of the four parts of a block, those of the same rows come one after the other

    @classmethod
    def of(cls, matrix: Any, *, of_warps: bool = False, columns_first: bool = False) -> Blocks:
        i32 = ir.IntegerType.get_signless(32)
        constant = lambda value: utils.c(value, i32)  # noqa: E731
        kind = ir.MemRefType(matrix.type)
        _, tiles, _, columns = kind.shape
        columns = columns * utils.bytewidth(kind.element_type) // BYTES
        bit = lambda value, n: arith.andi(arith.shrui(value, constant(n)), constant(1))  # noqa: E731
        thread = utils.thread_idx()
        row, part = arith.andi(thread, constant(HALF - 1)), (bit(thread, 3), bit(thread, 4))
        low, right = part if not columns_first else part[::-1]
        if of_warps:
            warp = arith.andi(arith.shrui(thread, constant(5)), constant(3))
            low = arith.addi(low, arith.muli(warp, constant(2)))
        flip = arith.xori(right, arith.shrui(row, constant({64: 0, 32: 1, 16: 2}[columns])))
        place = arith.addi(arith.muli(row, constant(columns * BYTES)), arith.muli(flip, constant(HALF * BYTES)))
        place = arith.addi(place, arith.muli(low, constant(tiles * memory.TILE_ROWS * columns * BYTES)))
        address = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(matrix)), place)
        return cls(address, tiles, columns, ROWS // BLOCK if of_warps else 1, columns_first)

    def load(self, row: int, column: int, *, transposed: bool = False) -> list[Any]:
        """What a thread holds of the block at this row and column, each in blocks."""
        i32 = ir.IntegerType.get_signless(32)
        tile, flip = divmod(column * BLOCK, self.columns)
        tile += row * self.row_step * 2 * self.tiles
        offset = tile * memory.TILE_ROWS * self.columns * BYTES
        way = ".trans" if transposed else ""
        # Flipped here, or else the compiler holds an address for each flip in registers throughout the loop.
        text = (
            f"{{ .reg .b32 a; xor.b32 a, $4, {flip * BYTES}; "
            f"ldmatrix.sync.aligned.m8n8.x4{way}.shared.b16 {{$0, $1, $2, $3}}, [a + {offset}]; }}"
        )
        struct = llvm.StructType.get_literal([i32] * 4)
        result = llvm.inline_asm(struct, [self.address], text, "=r,=r,=r,=r,r", has_side_effects=True)
        return [llvm.extractvalue(i32, result, [i]) for i in range(4)]
