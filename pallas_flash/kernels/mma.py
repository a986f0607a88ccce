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
STORES_BLOCKS_FROM = 9  # the compute capability whose GPUs have stmatrix


def product(a: Any, b: Ref, acc: jax.Array | None = None, *, transposed: bool = False) -> jax.Array:
    """acc + a @ b in float32; without acc, a @ b. transposed: a @ b.T.

    a: [m, k] in shared memory or in registers, m a multiple of 64; b: [k, n] in shared memory, or [n, k]. k and n are
    multiples of 16.
    """
    arguments, types = (a, b), [_type_of(a), _type_of(b)]
    if acc is not None:
        arguments, types = (*arguments, acc), [*types, plgpu.Layout.WGMMA]
    sizes = (*a.shape, b.shape[0] if transposed else b.shape[1])
    kind = _kind(b)

    @plgpu.inline_mgpu(
        arg_types=tuple(types),
        return_type=plgpu.ShapeDtypeStruct((sizes[0], sizes[2]), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def emit(_: Any, a: Any, b: Any, acc: Any = None) -> Any:
        left = InRegisters(a) if isinstance(a, mgpu.FragmentedArray) else Blocks.of(a, of_warps=True)
        right = Blocks.of(b, columns_first=transposed)
        return _multiply(kind, left, right, sizes, acc)

    return emit(*arguments)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def product_by_columns(a: Ref, b: Ref) -> jax.Array:
    """a.T @ b in float32. a: [parts, k, columns] in shared memory, of a matrix [k, m] cut into parts of 16, 32 or 64
    columns, m a multiple of 64; b: [k, n]."""
    parts, rows, columns = a.shape
    sizes = (parts * columns, rows, b.shape[1])
    kind = _kind(b)

    @plgpu.inline_mgpu(
        arg_types=(_type_of(a), _type_of(b)),
        return_type=plgpu.ShapeDtypeStruct((sizes[0], sizes[2]), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def emit(_: Any, a: Any, b: Any) -> Any:
        return _multiply(kind, ByColumns.of(a), Blocks.of(b), sizes, None)

    return emit(a, b)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def store(tile: jax.Array, buffer: Ref) -> None:
    """buffer[...] = a 16-bit tile in registers. All threads meet before whoever read the buffer and after.

    Mosaic's own stores meet twice by themselves, and want a thread's elements in another order than products want
    those of a left operand: ptxas would copy them for each product."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _type_of(buffer)))
    def emit(_: Any, tile: Any, buffer: Any) -> None:
        whole_blocks = utils.get_arch().major >= STORES_BLOCKS_FROM
        blocks = Blocks.of(buffer, of_warps=True) if whole_blocks else Blocks.of_pairs(buffer)
        held = InRegisters(tile)
        for row, column in np.ndindex(tile.shape[0] // ROWS, tile.shape[1] // BLOCK):
            emit_one = _store_block if whole_blocks else _store_pairs
            emit_one(blocks, row, column, held.load(row, column))

    emit(tile, buffer)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def _kind(matrix: Ref) -> str:
    return {"bfloat16": "bf16", "float16": "f16"}[np.dtype(matrix.dtype).name]


def _type_of(operand: Any) -> Any:
    if isinstance(operand, jax.Array):
        return plgpu.Layout.WGMMA
    return plgpu.RefType(memory.transforms(memory.tile_columns(operand.shape, operand.dtype), operand.dtype))


def _multiply(kind: str, left: Left, right: Blocks, sizes: tuple[int, int, int], acc: Any) -> Any:
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

    @classmethod
    def of_pairs(cls, matrix: Any) -> Blocks:
        """To be written by `_store_pairs`: address is that of this thread's two elements of the first 8 x 8 of this
        warp."""
        i32 = ir.IntegerType.get_signless(32)
        constant = lambda value: utils.c(value, i32)  # noqa: E731
        _, tiles, _, columns = ir.MemRefType(matrix.type).shape
        field = lambda first, mask: arith.andi(arith.shrui(utils.thread_idx(), constant(first)), constant(mask))  # noqa: E731
        pair, row, warp = field(0, 3), field(2, HALF - 1), field(5, 3)
        chunk = arith.shrui(row, constant({64: 0, 32: 1, 16: 2}[columns]))
        tile_bytes = memory.TILE_ROWS * columns * BYTES
        sizes = (pair, 2 * BYTES), (row, columns * BYTES), (chunk, HALF * BYTES), (warp, 2 * tiles * tile_bytes)
        address = llvm.ptrtoint(i32, utils.memref_ptr(matrix))
        for number, size in sizes:
            address = arith.addi(address, arith.muli(number, constant(size)))
        return cls(address, tiles, columns, ROWS // BLOCK, False)

    def load(self, row: int, column: int, *, transposed: bool = False) -> list[Any]:
        """What a thread holds of the block at this row and column, each in blocks."""
        return _load_block(self.address, *self.place(row, column), transposed=transposed)

    def place(self, row: int, column: int) -> tuple[int, int]:
        """Bytes by which the address of a block differs from that of the first: flipped, and added."""
        tile, flip = divmod(column * BLOCK, self.columns)
        tile += row * self.row_step * 2 * self.tiles
        return flip * BYTES, tile * memory.TILE_ROWS * self.columns * BYTES


class ByColumns(NamedTuple):
    """A matrix in shared memory whose columns are the rows of a left operand, 16 of every 64 a warp's. It stands in
    parts of columns, each of them a swizzled row wide, one after the other."""

    address: Any  # i32, where this thread's row of this warp's first block starts
    step: int  # bytes, from 16 rows to the next
    row: int  # bytes, from 64 columns to the next

    @classmethod
    def of(cls, matrix: Any) -> ByColumns:
        i32 = ir.IntegerType.get_signless(32)
        constant = lambda value: utils.c(value, i32)  # noqa: E731
        _, groups, tiles, _, columns = ir.MemRefType(matrix.type).shape
        assert tiles == 1, "a part is a swizzled row wide"
        tile_bytes = memory.TILE_ROWS * columns * BYTES
        field = lambda value, first, mask: arith.andi(arith.shrui(value, constant(first)), constant(mask))  # noqa: E731
        thread = utils.thread_idx()
        row, right, low, warp = (field(thread, *at) for at in ((0, HALF - 1), (3, 1), (4, 1), (5, 3)))
        parts = arith.muli(warp, constant(BLOCK))
        part, column = (op(parts, constant(columns)) for op in (arith.divui, arith.remui))
        chunk = arith.addi(arith.divui(column, constant(HALF)), right)
        chunk = arith.xori(chunk, arith.shrui(row, constant({64: 0, 32: 1, 16: 2}[columns])))
        address = llvm.ptrtoint(i32, utils.memref_ptr(matrix))
        sizes = (part, groups * tile_bytes), (low, tile_bytes), (row, columns * BYTES), (chunk, HALF * BYTES)
        for number, size in sizes:
            address = arith.addi(address, arith.muli(number, constant(size)))
        return cls(address, BLOCK // memory.TILE_ROWS * tile_bytes, ROWS // columns * groups * tile_bytes)

    def load(self, row: int, column: int) -> list[Any]:
        """What a thread holds of 64 rows by 16 columns of the left operand."""
        return _load_block(self.address, 0, row * self.row + column * self.step, transposed=True)


Left = InRegisters | Blocks | ByColumns


def _load_block(address: Any, flip: int, offset: int, *, transposed: bool) -> list[Any]:
    """Flipped here, or else the compiler holds an address for each flip in registers throughout the loop."""
    i32 = ir.IntegerType.get_signless(32)
    way = ".trans" if transposed else ""
    text = (
        f"{{ .reg .b32 a; xor.b32 a, $4, {flip}; "
        f"ldmatrix.sync.aligned.m8n8.x4{way}.shared.b16 {{$0, $1, $2, $3}}, [a + {offset}]; }}"
    )
    struct = llvm.StructType.get_literal([i32] * 4)
    result = llvm.inline_asm(struct, [address], text, "=r,=r,=r,=r,r", has_side_effects=True)
    return [llvm.extractvalue(i32, result, [i]) for i in range(4)]


def _store_block(blocks: Blocks, row: int, column: int, held: list[Any]) -> None:
    """As `Blocks.load` without `transposed`, the other way."""
    flip, offset = blocks.place(row, column)
    text = (
        f"{{ .reg .b32 a; xor.b32 a, $0, {flip}; "
        f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [a + {offset}], {{$1, $2, $3, $4}}; }}"
    )
    _run(text, [blocks.address, *held])


def _store_pairs(blocks: Blocks, row: int, column: int, held: list[Any]) -> None:
    flip, offset = blocks.place(row, column)
    low = blocks.tiles * memory.TILE_ROWS * blocks.columns * BYTES
    for right in range(2):
        for below in range(2):
            text = f"xor.b32 a, $0, {flip ^ right * HALF * BYTES}; st.shared.b32 [a + {offset + below * low}], $1;"
            _run(f"{{ .reg .b32 a; {text} }}", [blocks.address, held[2 * right + below]])


def _run(text: str, operands: list[Any]) -> None:
    constraints = ",".join("r" * len(operands))
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)
