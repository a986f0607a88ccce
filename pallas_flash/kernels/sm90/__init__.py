"""Hopper (compute capability 9.0): TMA, wgmma, warp-specialised.

Gradients come from one kernel; from two, bit-equal on repeats, with deterministic=True or a bias; and from `xla` where
`backward_pass.obstacle` says why: mainly with a score_mod that captures floating arrays.

Every feature of a call is in the kernel and they compose freely. Refused are dtypes other than bfloat16 and float16,
head dims beyond 256, a `precision` that 16-bit weights cannot give, arrays of 64 bits, and what a `score_mod` or a
predicate does beyond `tile_function.OPERATIONS`.

Tiles that a mask hides as a whole are never read. NaN and Inf in values that are hidden within a tile reach no query:
see kernels/junk.py.

Importing this module does not import Pallas; `forward` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_flash import xla
from pallas_flash.kernels import support
from pallas_flash.kernels.sizes import COLUMNS, ROWS, padded_head_dims
from pallas_flash.kernels.sm90 import backward_pass
from pallas_flash.kernels.sm90.config import MAX_SHARED_BYTES, MIN_MASKED_BLOCK, ForwardConfig, as_called
from pallas_flash.spec import AttentionSpec, Cotangents, Forward, Gradients, Operands, Residuals
from pallas_flash.tuning import cache

NAME = "sm90"
mask_class = support.mask_class


def unsupported(spec: AttentionSpec, operands: Operands) -> str | None:
    if (reason := support.refused(spec, operands)) is not None:
        return reason
    if not forward_config(spec, operands):
        shapes = operands.shapes
        return f"no tiles for head dims {shapes.head_dim} and {shapes.value_head_dim}"
    return None


def forward(
    spec: AttentionSpec, operands: Operands, *, config: ForwardConfig | None = None, interpret: Any = None
) -> Forward:
    """config: other tiles than the tuned ones. interpret: `plgpu.InterpretGPUParams`, to run on a CPU, interpreted."""
    from pallas_flash.kernels.sm90.forward_kernel import run  # Pallas loads when it is needed

    config = config or forward_config(spec, operands)
    assert config is not None, "unsupported() refuses what has no tiles"
    call = functools.partial(run, spec, config=config, interpret=interpret)
    return support.varying(_mapped(call, operands)(support.differentiated_once(operands, NAME)), operands)


def backward(spec: AttentionSpec, operands: Operands, residuals: Residuals, cotangents: Cotangents) -> Gradients:
    """By the kernels; what they cannot compute, as `xla` does."""
    operands, residuals, cotangents = support.differentiated_once((operands, residuals, cotangents), NAME)
    kind = support.mask_class(spec, operands)
    if backward_pass.obstacle(spec, operands, kind) is not None:
        return xla.backward(spec, operands, residuals, cotangents)
    config = backward_pass.tuned_config(spec, operands, kind)
    assert config is not None, "obstacle() names what has no tiles"
    queries = backward_pass.queries_config(spec, operands, kind)
    call = functools.partial(backward_pass.backward, spec, config=config, queries_config=queries)
    return support.varying(_mapped(call, operands)(operands, residuals, cotangents), operands)


def _mapped(call: Callable[..., Any], operands: Operands) -> Callable[..., Any]:
    """vmap of a call whose arrays `kernels/tma.py` copies: one instance after the other, as it takes no part of an
    array. All others Pallas maps itself."""
    shapes = operands.shapes
    rows, columns = (shapes.q_len, shapes.kv_len), (shapes.head_dim, shapes.value_head_dim)
    tiled = not any(size % ROWS for size in rows) and not any(size % COLUMNS for size in columns)
    return call if tiled else jax.custom_batching.sequential_vmap(call)


def forward_config(spec: AttentionSpec, operands: Operands) -> ForwardConfig | None:
    """The tuned entry of the nearest case that fits."""
    shapes = operands.shapes
    case = cache.Case(shapes.head_dim, shapes.value_head_dim, operands.q.dtype.name, support.mask_class(spec, operands))
    configs = (ForwardConfig(**entry) for entry in cache.nearest("sm90_forward", case))
    return as_called(next((config for config in configs if forward_fits(config, spec, operands)), None), spec)


def forward_fits(config: ForwardConfig, spec: AttentionSpec, operands: Operands) -> bool:
    """Whether the kernel can run a call with these tiles."""
    shapes = operands.shapes
    same_buffer = config.out_has_own_buffer or shapes.head_dim == shapes.value_head_dim
    hides = bool(spec.mask) or operands.bias is not None
    cleanable = not hides or config.block_kv >= MIN_MASKED_BLOCK
    needed = config.shared_bytes(*padded_head_dims(shapes), operands.q.dtype.itemsize, hides_values=hides)
    return same_buffer and cleanable and needed <= MAX_SHARED_BYTES
