"""Single elements of a tile in registers: a vote over them, and loads from device memory into each.

Tiles have Mosaic's layout WGMMA, one value a row or column the parts of it. Nothing is asked of an array's alignment or
strides, and addresses are 64 bits wide.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

Ref = Any


class Span(NamedTuple):
    """Consecutive elements along one axis of an array in device memory, for one axis of a tile."""

    axis: int  # of the tile: 0, its rows, or 1, its columns
    size: int
    start: Any  # int32 scalar
    clip: bool  # some may stand behind the array's end: its last element stands for them


class Elements(Protocol):
    """What kernels do with single elements beside products of matrices. The interpreter has its own way."""

    def any(self, flags: jax.Array) -> jax.Array:
        """Whether some element of a tile, or of one value a row, is True, as a scalar. Each warp may ask for its own
        elements only."""
        ...

    def gather(self, source: Ref, index: tuple[Any, ...], layout: Any = plgpu.Layout.WGMMA) -> jax.Array:
        """source[index] from device memory into the registers of a tile. index: for each axis an int32 within it, a
        scalar or a tile; at least one is a tile. layout: that of the tile, or of another array."""
        ...

    def take(self, source: Ref, spans: tuple[Span, ...]) -> jax.Array:
        """The elements at these spans of an array in device memory, one span for each axis of the array: a tile for
        two, one value for each row or column of a tile for one."""
        ...

    def add(self, target: Ref, starts: tuple[Any, ...], value: jax.Array) -> None:
        """Add a tile, or one value a row of a tile, to float32 in device memory from `starts` on, all of it inside, an
        even number of columns. The sum of what one warpgroup adds to an element has a fixed order."""
        ...

    def commit(self) -> None:
        """What the warpgroup wrote to shared memory is there for all its threads, and whatever reads it next."""


def uniform(scalar: jax.Array) -> jax.Array:
    """The same int32, of which the compiler now knows that it is that of a whole warp: it may stand in a register that
    the threads share."""
    same = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),), return_type=same)
    def broadcast(_: Any, scalar: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        everyone, first, width = (mgpu.utils.c(value, i32) for value in (0xFFFFFFFF, 0, 0x1F))
        value = nvvm.shfl_sync(everyone, scalar.registers.item(), first, width, nvvm.ShflKind.idx)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return broadcast(scalar)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def any_of_warp(flags: jax.Array) -> jax.Array:
    layout = plgpu.Layout.WGMMA if flags.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)
    answer = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=answer)
    def vote(_: Any, flags: Any) -> Any:
        i1, i32 = (ir.IntegerType.get_signless(bits) for bits in (1, 32))
        held = [
            vector.extract(register, [], [i])
            for register in flags.registers.flat
            for i in range(ir.VectorType(register.type).shape[0])
        ]
        mine = functools.reduce(arith.ori, held)
        ask = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
        some = llvm.inline_asm(i32, [arith.extui(i32, mine)], ask, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(arith.trunci(i1, some), (), is_signed=False)

    return vote(flags)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def gather(source: Ref, index: tuple[Any, ...], layout: Any = plgpu.Layout.WGMMA) -> jax.Array:
    tiles = [place for place in index if jnp.ndim(place)]
    load = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[layout] * len(tiles)),
        return_type=plgpu.ShapeDtypeStruct(tiles[0].shape, source.dtype, layout=layout),
    )(functools.partial(_load_gathered, source.dtype))
    view = source.at[tuple(slice(None) if jnp.ndim(place) else place for place in index)]
    return load(view, *tiles)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def _load_gathered(dtype: Any, _: Any, source: Any, *index: Any) -> Any:
    registers = np.empty(index[0].registers.shape, object)
    for place in np.ndindex(registers.shape):
        held = [tile.registers[place] for tile in index]
        wide = lambda i: [arith.index_cast(ir.IndexType.get(), vector.extract(x, [], [i])) for x in held]  # noqa: B023, E731
        (size,) = ir.VectorType(held[0].type).shape
        registers[place] = _vector([memref.load(source, wide(i)) for i in range(size)])
    return mgpu.FragmentedArray(_registers=registers, _layout=index[0].layout, _is_signed=mgpu.utils.is_signed(dtype))


def _vector(elements: list[Any]) -> Any:
    return vector.from_elements(ir.VectorType.get((len(elements),), elements[0].type), elements)


def _in_order(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: span.axis))


def take(source: Ref, spans: tuple[Span, ...]) -> jax.Array:
    layout = plgpu.Layout.WGMMA if len(spans) == 2 else plgpu.Layout.WGMMA.reduce(1 - spans[0].axis)
    shape = tuple(span.size for span in _in_order(spans))
    static = tuple(span._replace(start=None) for span in spans)
    load = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * len(spans)),
        return_type=plgpu.ShapeDtypeStruct(shape, source.dtype, layout=layout),
    )(functools.partial(_load_taken, source.dtype, layout.to_mgpu(), static))
    starts = [jnp.asarray(span.start, jnp.int32) for span in spans]
    return load(source, *starts)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def _load_taken(dtype: Any, layout: Any, spans: tuple[Span, ...], _: Any, source: Any, *starts: Any) -> Any:
    """A thread's elements stand at constant distances from its first one, so that addresses do, too."""
    i32, wide = ir.IntegerType.get_signless(32), ir.IndexType.get()
    constant = lambda kind, value: arith.constant(kind, ir.IntegerAttr.get(kind, int(value)))  # noqa: E731
    order = [_in_order(spans).index(span) for span in spans]
    shape = tuple(span.size for span in _in_order(spans))
    first = next(iter(layout.thread_idxs(shape)))
    first = [
        arith.addi(start.registers.item(), arith.index_cast(i32, first[dim]))
        for start, dim in zip(starts, order, strict=True)
    ]

    @functools.cache
    def place(axis: int, distance: int) -> Any:
        if not spans[axis].clip:
            return arith.addi(arith.index_cast(wide, first[axis]), constant(wide, distance))
        last = constant(i32, source.type.shape[axis] - 1)
        return arith.index_cast(wide, arith.minsi(arith.addi(first[axis], constant(i32, distance)), last))

    strides = layout.tiling.tile_strides(tuple(mgpu.utils.get_contiguous_strides(shape)))
    registers = np.empty(layout.registers_shape(shape), object)
    for index in np.ndindex(registers.shape):
        distance = np.unravel_index(np.dot(index, strides), shape)
        columns = range(layout.vector_length)  # of a register, along the last axis
        distances = [[*distance[:-1], distance[-1] + column] for column in columns]
        elements = [memref.load(source, [place(i, d[dim]) for i, dim in enumerate(order)]) for d in distances]
        registers[index] = _vector(elements)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=mgpu.utils.is_signed(dtype))


def interpreted_gather(source: Ref, index: tuple[Any, ...], layout: Any = None) -> jax.Array:
    return source[...][index]


def interpreted_take(source: Ref, spans: tuple[Span, ...]) -> jax.Array:
    lines = [jnp.minimum(s.start + jnp.arange(s.size), n - 1) for s, n in zip(spans, source.shape, strict=True)]
    taken = source[...][jnp.ix_(*lines)]
    return taken if spans == _in_order(spans) else taken.T


def interpreted_add(target: Ref, starts: tuple[Any, ...], value: jax.Array) -> None:
    part = target.at[tuple(pl.ds(start, size) for start, size in zip(starts, value.shape, strict=True))]
    part[...] = part[...] + value
