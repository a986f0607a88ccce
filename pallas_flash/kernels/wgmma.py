"""A product on Hopper's tensor cores that starts from nothing: the first of its instructions overwrites.

`plgpu.wgmma` adds to an accumulator, whose zeros cost an instruction a register in every step, while the warpgroup has
its turn at the tensor cores. Measured: 2 to 4 % of the forward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_flash.kernels import memory

Ref = Any
WARPGROUP = 128  # threads
_OVERWRITE = 0  # wgmma's scale-d: what the accumulator held before counts so many times


def issue(a: Ref, b: Ref) -> jax.Array:
    """Start a @ b.T of two matrices in shared memory, [m, k] and [n, k]. What comes back is in flight: `landed`."""
    shape, columns = (a.shape[0], b.shape[0]), memory.tile_columns(b.shape, b.dtype)
    itemsize = np.dtype(b.dtype).itemsize
    matrix = plgpu.RefType(memory.transforms(columns, b.dtype))
    product = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(matrix, matrix), return_type=product)
    def start(_: Any, a: Any, b: Any) -> Any:
        nvvm.wgmma_fence_aligned()
        result = mgpu.wgmma(_nothing(shape), a, mgpu.memref_transpose(b, (1, 0, 3, 2)), swizzle=columns * itemsize)
        _overwrite(registers=shape[0] * shape[1] // WARPGROUP)
        nvvm.wgmma_commit_group_sync_aligned()
        return result.value

    return start(a, b)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


def landed(product: jax.Array, *, pending: int) -> jax.Array:
    """The product, once at most `pending` later ones are in flight."""
    typed = plgpu.ShapeDtypeStruct(product.shape, product.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=typed)
    def wait(_: Any, product: Any) -> Any:
        nvvm.wgmma_wait_group_sync_aligned(pending)
        return fa.optimization_barrier(product)  # no read may move before the wait

    return wait(product)  # pyright: ignore[reportCallIssue]


def _nothing(shape: tuple[int, int]) -> Any:
    """An accumulator with registers that hold nothing."""
    f32 = ir.F32Type.get()
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
    like = fa.FragmentedArray.splat(zero, shape, fa.WGMMA_LAYOUT_ACC_32BIT)
    undefined = llvm.mlir_undef(like.registers.flat[0].type)
    registers = np.full(like.registers.shape, undefined, dtype=object)
    value = fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT_ACC_32BIT, _is_signed=None)
    return mgpu.WGMMAAccumulator(_value=value, _original_layout=fa.WGMMA_LAYOUT, _sync=False)


def _overwrite(*, registers: int) -> None:
    """Make the first product among the operations emitted so far overwrite its accumulator of so many registers."""
    i32 = ir.IntegerType.get_signless(32)
    operations = ir.InsertionPoint.current.block.operations
    product = next(op for op in operations if "wgmma.mma_async" in str(op.attributes.get("asm_string", "")))
    with ir.InsertionPoint(product):
        scale_d = llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, _OVERWRITE)).result
    # Before it come the accumulator and the addresses of a and b.
    product.operation.operands[registers + 2] = scale_d
