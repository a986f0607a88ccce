"""Matrix products of one warpgroup on Hopper's tensor cores (wgmma), and their stand-in for Pallas' interpreter.

What the interpreter cannot run stands here, so that under the interpreter the kernels differ in nothing else: besides
the products, a vote among threads and loads of single elements.
A product runs in the background: `start` issues it, `load` and `wait` wait until at most `pending` are in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

Ref = Any


class TensorCores(Protocol):
    def scratch(self, shape: tuple[int, ...]) -> Any:
        """What the kernel must allocate for accumulators of this shape, one a warpgroup; None: nothing."""

    def accumulator(self, body: Callable[[Ref], Any], shape: tuple[int, int], scratch: Ref | None) -> Any:
        """Run `body` on a float32 accumulator of zeros. `scratch` is this warpgroup's part of `self.scratch`."""

    def start(self, acc: Ref, a: Any, b: Ref) -> None:
        """acc += a @ b in the background; `a` in shared memory or in registers, `b` in shared memory."""

    def load(self, acc: Ref, *, pending: int) -> jax.Array: ...

    def store(self, acc: Ref, value: jax.Array) -> None: ...

    def wait(self, pending: int) -> None: ...

    def any_row(self, rows: jax.Array) -> jax.Array:
        """Whether some row is True, as a scalar. Each warp may ask for its own rows only."""
        ...

    def gather(self, source: Ref, index: tuple[Any, ...], layout: Any) -> jax.Array:
        """source[index] in registers, from an array in device memory that the kernel does not write.

        index: for each axis an int32 within it, a scalar or an array; the arrays have one shape, and `layout`.
        """
        ...


class Wgmma:
    """The real thing."""

    def scratch(self, shape: tuple[int, ...]) -> None:
        return None

    def accumulator(self, body: Callable[[Ref], Any], shape: tuple[int, int], scratch: None) -> Any:
        return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))

    def start(self, acc: Ref, a: Any, b: Ref) -> None:
        plgpu.wgmma(acc, a, b)

    def load(self, acc: Ref, *, pending: int) -> jax.Array:
        return plgpu.layout_cast(plgpu.wgmma_accumulator_load(acc, wait_n=pending), plgpu.Layout.WGMMA)

    def store(self, acc: Ref, value: jax.Array) -> None:
        acc[...] = value

    def wait(self, pending: int) -> None:
        plgpu.wgmma_wait(pending)

    def any_row(self, rows: jax.Array) -> jax.Array:
        return _any_row_of_warp(rows)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)

    def gather(self, source: Ref, index: tuple[Any, ...], layout: Any) -> jax.Array:
        return _gather(source, index, layout)


class Interpreted:
    """The same in plain JAX: accumulators live in shared memory and nothing runs in the background."""

    def scratch(self, shape: tuple[int, ...]) -> Any:
        return plgpu.SMEM(shape, jnp.float32)

    def accumulator(self, body: Callable[[Ref], Any], shape: tuple[int, int], scratch: Ref) -> Any:
        self.store(scratch, jnp.zeros(shape, jnp.float32))
        return body(scratch)

    def start(self, acc: Ref, a: Any, b: Ref) -> None:
        lhs = a if isinstance(a, jax.Array) else a[...]
        self.store(acc, acc[...] + jnp.dot(lhs, b[...], preferred_element_type=jnp.float32))

    def load(self, acc: Ref, *, pending: int) -> jax.Array:
        return acc[...]

    def store(self, acc: Ref, value: jax.Array) -> None:
        acc[...] = value
        plgpu.commit_smem()

    def wait(self, pending: int) -> None:
        pass

    def any_row(self, rows: jax.Array) -> jax.Array:
        return jnp.any(rows)

    def gather(self, source: Ref, index: tuple[Any, ...], layout: Any) -> jax.Array:
        return source[...][index]


@plgpu.inline_mgpu(
    arg_types=(plgpu.Layout.WGMMA.reduce(1),),
    return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT(())),
)
def _any_row_of_warp(_: Any, rows: Any) -> Any:
    i1 = ir.IntegerType.get_signless(1)
    held = [vector.extract(register, [], [0]) for register in rows.registers.flat]
    mine = functools.reduce(arith.ori, held)
    vote = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
    i32 = ir.IntegerType.get_signless(32)
    some = llvm.inline_asm(i32, [arith.extui(i32, mine)], vote, "=r,r", has_side_effects=True)
    return mgpu.FragmentedArray.splat(arith.trunci(i1, some), (), is_signed=False)


def _gather(source: Ref, index: tuple[Any, ...], layout: Any) -> jax.Array:
    """Element by element: nothing is asked of the array's alignment or strides. Addresses are 64 bits wide."""
    lines = [line for line in index if jnp.ndim(line)]
    if not lines:
        return source[index]
    view = source.at[tuple(slice(None) if jnp.ndim(line) else line for line in index)]
    load = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[layout] * len(lines)),
        return_type=plgpu.ShapeDtypeStruct(lines[0].shape, source.dtype, layout=layout),
    )(functools.partial(_load_elements, source.dtype))
    return load(view, *lines)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def _load_elements(dtype: Any, _: Any, source: Any, *index: Any) -> Any:
    registers = np.empty(index[0].registers.shape, object)
    for place in np.ndindex(registers.shape):
        registers[place] = _load_register(source, [line.registers[place] for line in index])
    return mgpu.FragmentedArray(_registers=registers, _layout=index[0].layout, _is_signed=mgpu.utils.is_signed(dtype))


def _load_register(source: Any, index: list[Any]) -> Any:
    (size,) = ir.VectorType(index[0].type).shape
    place = ir.IndexType.get()
    elements = []
    for i in range(size):
        wide = [arith.index_cast(place, vector.extract(register, [], [i])) for register in index]
        elements.append(memref.load(source, wide))
    return vector.from_elements(ir.VectorType.get((size,), elements[0].type), elements)
