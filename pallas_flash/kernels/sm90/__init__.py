"""Hopper (compute capability 9.0): TMA, wgmma, warp-specialised. The backward pass is that of `xla`.

Tiles that a mask hides as a whole are never read. NaN and Inf in values that are hidden within a tile reach no query:
see kernels/junk.py.

Importing this module does not import Pallas; `forward` does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import xla
from pallas_flash.kernels.sm90.config import MAX_SHARED_BYTES, MIN_MASKED_BLOCK, ForwardConfig, padded_head_dims
from pallas_flash.masks import Band, Chunked, PrefixLM, QueryLengths
from pallas_flash.spec import AttentionSpec, Forward, Operands
from pallas_flash.tuning import cache

NAME = "sm90"
MAX_HEAD_DIM = 256
MAX_ROWS = 2**31  # of all batch elements and heads: row statistics with larger offsets have not been proven right

backward = xla.backward


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
    if spec.precision not in (None, jax.lax.Precision.DEFAULT, "default", "fastest"):
        return f"precision={spec.precision}: it rounds the softmax weights to {operands.q.dtype}"
    refused = {
        "bias": operands.bias is not None,
        "score_mod": spec.score_mod is not None,
        "dropout": spec.dropout_rate > 0,
        "the maximum logit beside sinks": spec.return_max_logit and operands.sinks is not None,
    }
    for feature, present in refused.items():
        if present:
            return f"it has no {feature} yet"
    for part in spec.mask:
        if not isinstance(part, Band | Chunked | PrefixLM | QueryLengths):
            return f"it has no mask of the kind {type(part).__name__} yet"
    if not _config(spec, operands):
        return f"no tiles for head dims {shapes.head_dim} and {shapes.value_head_dim}"
    return None


def forward(
    spec: AttentionSpec, operands: Operands, *, config: ForwardConfig | None = None, interpret: Any = None
) -> Forward:
    """config: other tiles than the tuned ones. interpret: `plgpu.InterpretGPUParams`, to run on a CPU, interpreted."""
    from pallas_flash.kernels.sm90.forward_kernel import run  # Pallas loads when it is needed

    config = config or _config(spec, operands)
    assert config is not None, "unsupported() refuses what has no tiles"
    residuals = run(spec, operands, config, interpret=interpret)
    return Forward(residuals, residuals.m.max(-1) if spec.return_max_logit else None)


def _config(spec: AttentionSpec, operands: Operands) -> ForwardConfig | None:
    """The tuned entry of the nearest case whose buffers fit."""
    shapes = operands.shapes
    case = cache.Case(shapes.head_dim, shapes.value_head_dim, operands.q.dtype.name, mask_class(spec))
    for entry in cache.nearest("sm90_forward", case):
        config = ForwardConfig(**entry)
        same_buffer = config.out_has_own_buffer or shapes.head_dim == shapes.value_head_dim
        needed = config.shared_bytes(*padded_head_dims(shapes), operands.q.dtype.itemsize)
        cleanable = not spec.mask or config.block_kv >= MIN_MASKED_BLOCK
        if same_buffer and cleanable and needed <= MAX_SHARED_BYTES:
            return config
    return None


def mask_class(spec: AttentionSpec) -> str:
    return "causal" if spec.mask else "full"
