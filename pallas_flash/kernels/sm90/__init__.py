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
import jax.numpy as jnp

from pallas_flash import xla
from pallas_flash.kernels.sm90 import backward_pass, calls
from pallas_flash.kernels.sm90.config import (
    COLUMNS,
    MAX_SHARED_BYTES,
    MIN_MASKED_BLOCK,
    ROWS,
    ForwardConfig,
    padded_head_dims,
)
from pallas_flash.masks import Dense, Predicate, Segments
from pallas_flash.spec import AttentionSpec, Cotangents, Forward, Gradients, Operands, Residuals
from pallas_flash.tuning import cache

NAME = "sm90"
MAX_HEAD_DIM = 256
MAX_ROWS = 2**31  # of all batch elements and heads: row statistics with larger offsets have not been proven right


def unsupported(spec: AttentionSpec, operands: Operands) -> str | None:
    shapes = operands.shapes
    if operands.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16, not {operands.q.dtype}"
    if max(shapes.head_dim, shapes.value_head_dim) > MAX_HEAD_DIM:
        return f"head dims {shapes.head_dim} and {shapes.value_head_dim}: it holds up to {MAX_HEAD_DIM}"
    if 0 in shapes:
        return f"an empty operand: {shapes}"
    if shapes.batch * shapes.num_q_heads * shapes.q_len >= MAX_ROWS:
        return f"batch * heads * queries must stay below {MAX_ROWS}: {shapes}"
    if (obstacle := calls.mesh_obstacle(operands.q)) is not None:
        return obstacle
    if spec.precision not in (None, jax.lax.Precision.DEFAULT, "default", "fastest"):
        return f"precision={spec.precision}: it rounds the softmax weights to {operands.q.dtype}"
    predicates = [("masks.predicate", part.function) for part in spec.mask if isinstance(part, Predicate)]
    if (obstacle := calls.function_obstacle([("score_mod", spec.score_mod), *predicates])) is not None:
        return obstacle
    for name in ("bias", "score_mod", "mask"):
        if (obstacle := calls.array_obstacle(name, getattr(operands, name))) is not None:
            return obstacle
    if not forward_config(spec, operands):
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
    return calls.varying(_mapped(call, operands)(_differentiated_once(operands)), operands)


def backward(spec: AttentionSpec, operands: Operands, residuals: Residuals, cotangents: Cotangents) -> Gradients:
    """By the kernels; what they cannot compute, as `xla` does."""
    operands, residuals, cotangents = _differentiated_once((operands, residuals, cotangents))
    kind = mask_class(spec, operands)
    if backward_pass.obstacle(spec, operands, kind) is not None:
        return xla.backward(spec, operands, residuals, cotangents)
    config = backward_pass.tuned_config(spec, operands, kind)
    assert config is not None, "obstacle() names what has no tiles"
    queries = backward_pass.tuned_queries_config(operands, kind) if backward_pass.two_kernels(spec, operands) else None
    call = functools.partial(backward_pass.backward, spec, config=config, queries_config=queries)
    return calls.varying(_mapped(call, operands)(operands, residuals, cotangents), operands)


def _mapped(call: Callable[..., Any], operands: Operands) -> Callable[..., Any]:
    """vmap of a call whose arrays `kernels/tma.py` copies: one instance after the other, as it takes no part of an
    array. All others Pallas maps itself."""
    shapes = operands.shapes
    rows, columns = (shapes.q_len, shapes.kv_len), (shapes.head_dim, shapes.value_head_dim)
    tiled = not any(size % ROWS for size in rows) and not any(size % COLUMNS for size in columns)
    return call if tiled else jax.custom_batching.sequential_vmap(call)


@jax.custom_jvp
def _differentiated_once(arrays: Any) -> Any:
    return arrays


@_differentiated_once.defjvp
def _no_second_derivative(*_: Any) -> Any:
    raise NotImplementedError("implementation='sm90' has no second derivatives: take implementation='xla'")


def forward_config(spec: AttentionSpec, operands: Operands) -> ForwardConfig | None:
    """The tuned entry of the nearest case that fits."""
    shapes = operands.shapes
    case = cache.Case(shapes.head_dim, shapes.value_head_dim, operands.q.dtype.name, mask_class(spec, operands))
    configs = (ForwardConfig(**entry) for entry in cache.nearest("sm90_forward", case))
    return next((config for config in configs if forward_fits(config, spec, operands)), None)


def forward_fits(config: ForwardConfig, spec: AttentionSpec, operands: Operands) -> bool:
    """Whether the kernel can run a call with these tiles."""
    shapes = operands.shapes
    same_buffer = config.out_has_own_buffer or shapes.head_dim == shapes.value_head_dim
    hides = bool(spec.mask) or operands.bias is not None
    cleanable = not hides or config.block_kv >= MIN_MASKED_BLOCK
    needed = config.shared_bytes(*padded_head_dims(shapes), operands.q.dtype.itemsize, hides_values=hides)
    return same_buffer and cleanable and needed <= MAX_SHARED_BYTES


def mask_class(spec: AttentionSpec, operands: Operands) -> str:
    """general: several features each need registers for every element of a tile beside its score. Smaller tiles then
    keep the loop over keys free of spills; one such feature fits the tiles of the other classes."""
    demanding = [part for part in spec.mask if isinstance(part, Dense | Predicate | Segments)]
    demanding += [x for x in (operands.bias, spec.score_mod, operands.dropout_key) if x is not None]
    if len(demanding) > 1:
        return "general"
    return "causal" if spec.mask else "full"
