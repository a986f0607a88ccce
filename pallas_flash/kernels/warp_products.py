"""Products for decoding in which each of the four warps of a CTA works on keys of its own (mma.sync).

A tile of scores has 64 rows: row 16 w + r is that of query r for warp w, and its columns are keys of that warp, which
has 16 of every 64 rows of a block. All other mathematics of a tile then works as it is, each warp being a split of its
own, until decode_warps.py puts the four together.

Keys and values in 8 bits come from shared memory through ldmatrix, which moves pairs of bytes as if they were elements,
and are converted in registers: nothing is written back. What a pair of bytes lies beside decides about the order of the
head dim within groups of 16: `queries` reads theirs in the same order, and `in_order` undoes it in the result.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_flash.kernels import eight_bits, memory
from pallas_flash.kernels.mma import BLOCK, BYTES, HALF, Blocks, InRegisters, multiply_add
from pallas_flash.kernels.tile_mask import WARP_ROWS

Ref = Any
WARPS, ROWS = 4, WARP_ROWS
UNIT = WARPS * ROWS  # keys, of which a warp has as many as it has rows
WARP = 32  # threads


class Seen(NamedTuple):
    """Which queries take part with which keys."""

    pairs: jax.Array  # like the weights: 1 where they do, else 0
    alike: bool  # it is known that all queries do with the same keys: then others are made 0


class Products(Protocol):
    def queries(self, q: Ref) -> jax.Array:
        """The first 16 rows of [64, head_dim], for each warp, as `scores` takes them."""
        ...

    def scores(self, queries: jax.Array, keys: Ref) -> jax.Array:
        """queries @ keys.T, [64, keys / 4] in float32. keys: a block [keys, head_dim] in 8 bits."""
        ...

    def add(self, acc: jax.Array, weights: jax.Array, values: Ref, seen: Seen | None) -> jax.Array:
        """acc + weights @ values, [64, head_dim]. With `seen`, a value that is not finite reaches the queries that take
        part with it and no other."""
        ...

    def in_order(self, acc: jax.Array) -> jax.Array:
        """The columns of an accumulator as values have them."""
        ...

    def columns(self, lines: jax.Array, count: int) -> jax.Array:
        """From one number for each thread's key (see `key_of_thread`) to a tile with so many columns."""
        ...


def key_of_thread(thread: jax.Array, block: int) -> jax.Array:
    """Whose key of a block each thread holds something of. With 64 keys two threads have the same."""
    of = lambda first, count: lax.rem(lax.div(thread, _like(thread, first)), _like(thread, count))  # noqa: E731
    key = of(1, ROWS) + of(WARP, WARPS) * _like(thread, ROWS) + of(ROWS, 2) * _like(thread, UNIT)
    return lax.rem(key, _like(thread, block))


def _like(array: jax.Array, value: int) -> jax.Array:
    return array * 0 + value


class Compiled:
    def queries(self, q: Ref) -> jax.Array:
        matrix = plgpu.RefType(memory.transforms(memory.tile_columns(q.shape, q.dtype), q.dtype))
        shape = UNIT, q.shape[1]
        like = plgpu.ShapeDtypeStruct(shape, q.dtype, layout=plgpu.Layout.WGMMA)
        emit = plgpu.inline_mgpu(arg_types=(matrix,), return_type=like)(functools.partial(_queries, shape))
        return emit(q)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)

    def scores(self, queries: jax.Array, keys: Ref) -> jax.Array:
        shape = UNIT, keys.shape[0] // WARPS
        emit = plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WGMMA, _bytes(keys)),
            return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
        )(functools.partial(_scores, eight_bits.convert(keys.dtype, queries.dtype), _kind(queries.dtype)))
        return emit(queries, keys)  # pyright: ignore[reportCallIssue]

    def add(self, acc: jax.Array, weights: jax.Array, values: Ref, seen: Seen | None) -> jax.Array:
        more = () if seen is None else (seen.pairs,)
        convert = eight_bits.convert(values.dtype, weights.dtype)
        layout = plgpu.Layout.WGMMA
        emit = plgpu.inline_mgpu(
            arg_types=(layout, layout, _bytes(values), *[layout] * len(more)),
            return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=layout),
        )(functools.partial(_add, convert, _kind(weights.dtype), alike=seen is not None and seen.alike))
        return emit(acc, weights, values, *more)  # pyright: ignore[reportCallIssue]

    def in_order(self, acc: jax.Array) -> jax.Array:
        like = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=plgpu.Layout.WGMMA)
        emit = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=like)(_in_order)
        return emit(acc)  # pyright: ignore[reportCallIssue]

    def columns(self, lines: jax.Array, count: int) -> jax.Array:
        like = plgpu.ShapeDtypeStruct((UNIT, count), jnp.float32, layout=plgpu.Layout.WGMMA)
        line = plgpu.Layout.WG_STRIDED(lines.shape, vec_size=1)
        emit = plgpu.inline_mgpu(arg_types=(line,), return_type=like)(functools.partial(_columns, count))
        return emit(lines)  # pyright: ignore[reportCallIssue]


class Interpreted:
    def queries(self, q: Ref) -> jax.Array:
        return jnp.tile(q[...][:ROWS], (WARPS, 1))

    def scores(self, queries: jax.Array, keys: Ref) -> jax.Array:
        q, k = queries.reshape(WARPS, ROWS, -1), _of_warps(keys).astype(queries.dtype)
        plgpu.commit_smem()  # a copy may follow that overwrites the block; barriers are enough for it on a GPU
        return jnp.einsum("wrh,wkh->wrk", q, k, preferred_element_type=jnp.float32).reshape(UNIT, -1)

    def add(self, acc: jax.Array, weights: jax.Array, values: Ref, seen: Seen | None) -> jax.Array:
        of_warps = lambda x: x.reshape(WARPS, ROWS, -1)  # noqa: E731
        product = functools.partial(jnp.einsum, "wrk,wkh->wrh", preferred_element_type=jnp.float32)
        v = _of_warps(values).astype(weights.dtype)
        plgpu.commit_smem()  # as above
        if seen is not None and seen.alike:
            v = jnp.where(of_warps(seen.pairs)[:, 0, :, None] > 0, v, 0)
        elif seen is not None and jnp.issubdtype(values.dtype, jnp.floating):
            finite = jnp.isfinite(v)
            junk = product(of_warps(seen.pairs), (~finite).astype(v.dtype)) > 0
            acc = jnp.where(junk.reshape(acc.shape), jnp.nan, acc)
            v = jnp.where(finite, v, 0)
        return acc + product(of_warps(weights), v).reshape(acc.shape)

    def in_order(self, acc: jax.Array) -> jax.Array:
        return acc

    def columns(self, lines: jax.Array, count: int) -> jax.Array:
        tile = lines.reshape(WARPS, 1, WARP)[..., :count]
        return jnp.broadcast_to(tile, (WARPS, ROWS, count)).reshape(UNIT, count)


def _of_warps(matrix: Ref) -> jax.Array:
    rows = matrix[...]
    return rows.reshape(-1, WARPS, ROWS, rows.shape[-1]).swapaxes(0, 1).reshape(WARPS, -1, rows.shape[-1])


def _bytes(matrix: Ref) -> Any:
    return plgpu.RefType(memory.transforms(memory.tile_columns(matrix.shape, matrix.dtype), matrix.dtype))


def _kind(dtype: Any) -> str:
    return {"bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]


def _tile(registers: Any) -> Any:
    return mgpu.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)


def _pair(elements: list[Any]) -> Any:
    return vector.from_elements(ir.VectorType.get((2,), elements[0].type), elements)


def _elements(register: Any) -> list[Any]:
    return [vector.extract(register, [], [i]) for i in range(2)]


def _parts(tile: Any) -> Any:
    """[columns / 8, 2]: registers of two neighbouring elements, of a warp's rows 0 to 7 and 8 to 15."""
    return tile.registers.reshape(tile.shape[1] // HALF, 2)


def _queries(shape: tuple[int, int], _: Any, q: Any) -> Any:
    """Of 16 columns a thread takes four neighbours, where ldmatrix would give it two and two."""
    i32 = ir.IntegerType.get_signless(32)
    constant = lambda value: utils.c(value, i32)  # noqa: E731
    kind = ir.MemRefType(q.type)
    _, tiles, _, columns = kind.shape
    thread = utils.thread_idx()
    row = arith.andi(arith.shrui(thread, constant(2)), constant(HALF - 1))
    mask = columns // HALF - 1  # of the 16-byte units of a swizzled row, of which the swizzle flips the number
    flip = arith.andi(arith.shrui(row, constant({64: 0, 32: 1, 16: 2}[columns])), constant(mask))
    unit = arith.xori(arith.andi(arith.shrui(thread, constant(1)), constant(1)), flip)
    place = arith.addi(arith.muli(row, constant(columns * BYTES)), arith.muli(unit, constant(HALF * BYTES)))
    place = arith.addi(place, arith.muli(arith.andi(thread, constant(1)), constant(HALF * BYTES // 2)))
    address = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(q)), place)
    pair = ir.VectorType.get((2,), kind.element_type)
    like = fa.FragmentedArray.splat(_zero(kind.element_type), shape, fa.WGMMA_LAYOUT)
    registers = np.empty((shape[1] // HALF, 2), object)
    for step in range(shape[1] // BLOCK):
        tile, column = divmod(step * BLOCK, columns)
        for half in range(2):
            offset = (half * tiles + tile) * memory.TILE_ROWS * columns * BYTES
            text = f"{{ .reg .b32 a; xor.b32 a, $2, {column * BYTES}; ld.shared.v2.b32 {{$0, $1}}, [a + {offset}]; }}"
            struct = llvm.StructType.get_literal([i32] * 2)
            found = llvm.inline_asm(struct, [address], text, "=r,=r,r", has_side_effects=True)
            for i in range(2):
                registers[2 * step + i, half] = utils.bitcast(llvm.extractvalue(i32, found, [i]), pair)
    return _tile(registers.reshape(like.registers.shape))


def _zero(kind: Any) -> Any:
    return arith.constant(kind, ir.FloatAttr.get(kind, 0.0))


def _scores(convert: eight_bits.Convert, kind: str, _: Any, queries: Any, keys: Any) -> Any:
    rows, _, _, _ = ir.MemRefType(keys.type).shape
    parts = rows * memory.TILE_ROWS // UNIT  # 16 keys of the warp each
    q, k = InRegisters(queries), Blocks.of(keys, of_warps=True)
    zero, high_byte = _zero(ir.F32Type.get()), convert.high_byte()
    sums = [[zero] * 4 for _ in range(2 * parts)]
    for column in range(queries.shape[1] // (2 * BLOCK)):
        fragments = [q.load(0, 2 * column + side) for side in range(2)]
        for part in range(parts):
            held = k.load(part, column)  # rows 0 to 7 and 8 to 15 of the left half, then of the right one
            for side in range(2):
                for half in range(2):
                    b = [convert.pair(held[2 * side + half], high_byte, *two) for two in ((0, 1), (2, 3))]
                    place = 2 * part + half
                    sums[place] = multiply_add(kind, fragments[side], b, sums[place])
    like = fa.FragmentedArray.splat(zero, (UNIT, parts * ROWS), fa.WGMMA_LAYOUT)
    registers = np.empty((2 * parts, 2), object)
    for place, half in np.ndindex(registers.shape):
        registers[place, half] = _pair(sums[place][2 * half : 2 * half + 2])
    return _tile(registers.reshape(like.registers.shape))


def _add(
    convert: eight_bits.Convert,
    kind: str,
    _: Any,
    acc: Any,
    weights: Any,
    values: Any,
    seen: Any = None,
    *,
    alike: bool,
) -> Any:
    parts = weights.shape[1] // ROWS
    p, v = InRegisters(weights), Blocks.of(values, of_warps=True)
    visible = None if seen is None or not convert.has_junk else InRegisters(seen)
    registers, high_byte = _parts(acc).copy(), convert.high_byte()
    for part in range(parts):
        a = p.load(0, part)
        pairs = None if visible is None else visible.load(0, part)
        shown = None if pairs is None or not alike else [eight_bits.where_one(x) for x in pairs[::2]]
        for column in range(acc.shape[1] // (2 * BLOCK)):
            held = v.load(part, column, transposed=True)
            if shown is not None:
                held = [arith.andi(word, shown[place % 2]) for place, word in enumerate(held)]
            for side in range(2):
                for odd in range(2):
                    tile = 4 * column + 2 * side + odd
                    sums = _elements(registers[tile, 0]) + _elements(registers[tile, 1])
                    b = [convert.pair(held[2 * side + half], high_byte, odd, odd + 2) for half in range(2)]
                    if pairs is not None and not alike:
                        sums = _with_junk(convert, kind, pairs, b, sums)
                        b = [convert.finite(x) for x in b]
                    sums = multiply_add(kind, a, b, sums)
                    registers[tile] = _pair(sums[:2]), _pair(sums[2:])
    return _tile(registers.reshape(acc.registers.shape))


def _with_junk(convert: eight_bits.Convert, kind: str, seen: list[Any], b: list[Any], sums: list[Any]) -> list[Any]:
    """NaN where a query takes part with a value that is not finite."""
    f32 = ir.F32Type.get()
    count = multiply_add(kind, seen, [convert.is_junk(x) for x in b], [_zero(f32)] * 4)
    nan = arith.constant(f32, ir.FloatAttr.get(f32, float("nan")))
    some = [arith.cmpf(arith.CmpFPredicate.OGT, x, _zero(f32)) for x in count]
    return [arith.select(junk, nan, x) for junk, x in zip(some, sums, strict=True)]


def _shuffled(value: Any, lane: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    everyone, width = utils.c(0xFFFFFFFF, i32), utils.c(0x1F, i32)
    return nvvm.shfl_sync(everyone, value, lane, width, nvvm.ShflKind.idx)


def _in_order(_: Any, acc: Any) -> Any:
    """Of 16 columns thread t of four holds 4t and 4t + 2, then 4t + 1 and 4t + 3; of each half it should have two."""
    i32 = ir.IntegerType.get_signless(32)
    constant = lambda value: utils.c(value, i32)  # noqa: E731
    thread = utils.thread_idx()
    own = arith.andi(arith.shrui(thread, constant(1)), constant(1))
    first = arith.addi(arith.andi(thread, constant(WARP - 4)), own)
    second_pair = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, constant(1)), constant(0))
    old, new = _parts(acc), np.empty_like(_parts(acc))
    for tile, half in np.ndindex(new.shape):
        group, right = tile // 2 * 2, tile % 2
        lane = arith.addi(first, constant(2 * right))
        even, odd = (_elements(old[group + i, half]) for i in range(2))
        found = [[_shuffled(x, lane) for x in pair] for pair in zip(even, odd, strict=True)]
        new[tile, half] = _pair([arith.select(second_pair, b, a) for a, b in zip(*found, strict=True)])
    return _tile(new.reshape(acc.registers.shape))


def _columns(count: int, _: Any, lines: Any) -> Any:
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    constant = lambda value: utils.c(value, i32)  # noqa: E731
    first = arith.muli(arith.andi(utils.thread_idx(), constant(3)), constant(2))
    (held,) = lines.registers.flat
    held = vector.extract(held, [], [0]) if isinstance(held.type, ir.VectorType) else held
    registers = np.empty((count // HALF, 2), object)
    for tile in range(count // HALF):
        lanes = [arith.addi(first, constant(tile * HALF + i)) for i in range(2)]
        registers[tile, :] = _pair([_shuffled(held, lane) for lane in lanes])
    like = fa.FragmentedArray.splat(_zero(f32), (UNIT, count), fa.WGMMA_LAYOUT)
    return _tile(registers.reshape(like.registers.shape))
