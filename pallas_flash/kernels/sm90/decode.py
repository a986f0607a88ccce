"""Decoding on Hopper: a few new tokens against a cache, or pages of one. How: decode_kernel.py.

Importing this module does not import Pallas; `decode` does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.combine import Partial
from pallas_flash.decode_spec import DecodeOperands, DecodeSpec
from pallas_flash.kernels import support
from pallas_flash.kernels.sm90.config import MAX_SHARED_BYTES
from pallas_flash.kernels.sm90.decode_config import ROWS, WARP_ROWS, DecodeConfig, padded_head_dims
from pallas_flash.spec import Shapes
from pallas_flash.tuning import cache

NAME = "sm90"
MAX_HEAD_DIM = 256
MAX_ROWS = 2**31  # of the output, which are counted in int32
TMA_BYTES = 16  # a row of the cache must be a multiple: another one could only be read after copying the whole cache
PAGE_UNIT = 8  # rows of shared memory's tiles


def unsupported(spec: DecodeSpec, operands: DecodeOperands) -> str | None:
    shapes, stored = operands.shapes, operands.k.dtype
    if operands.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16, not {operands.q.dtype}"
    if 0 in (*shapes, *operands.k.shape):
        return f"an empty operand: {shapes}"
    for head_dim in (shapes.head_dim, shapes.value_head_dim):
        if head_dim > MAX_HEAD_DIM:
            return f"a head dim of {head_dim}: it holds up to {MAX_HEAD_DIM}"
        if head_dim * stored.itemsize % TMA_BYTES:
            return f"a cache of {stored} with a head dim of {head_dim}, no multiple of {TMA_BYTES // stored.itemsize}"
    if operands.page_table is not None and operands.k.shape[1] % PAGE_UNIT:
        return f"pages of {operands.k.shape[1]} tokens, no multiple of {PAGE_UNIT}"
    if math.prod(operands.q.shape[:3]) >= MAX_ROWS:
        return f"batch * heads * tokens must stay below {MAX_ROWS}: {shapes}"
    obstacles = (
        support.function_obstacle([("score_mod", spec.score_mod)]),
        support.array_obstacle("score_mod", operands.score_mod),
    )
    if (obstacle := next(filter(None, obstacles), None)) is not None:
        return obstacle
    if decode_config(operands) is None:
        return f"no tiles for a cache of {stored} with head dims {shapes.head_dim} and {shapes.value_head_dim}"
    return None


def decode(
    spec: DecodeSpec,
    operands: DecodeOperands,
    *,
    config: DecodeConfig | None = None,
    splits: int | None = None,
    interpret: Any = None,
) -> Partial:
    """config, splits: others than the tuned ones. interpret: `plgpu.InterpretGPUParams`, to run on a CPU."""
    from pallas_flash.kernels.sm90.decode_kernel import run  # Pallas loads when it is needed

    config = config or decode_config(operands)
    assert config is not None, "unsupported() refuses what has no tiles"
    splits = splits or num_splits(spec, operands, config)
    call: Callable[..., Partial] = functools.partial(run, spec, config=config, splits=splits, interpret=interpret)
    # One instance of a vmap after the other: TMA takes no part of an array.
    return support.varying(jax.custom_batching.sequential_vmap(call)(operands), operands)


def num_splits(spec: DecodeSpec, operands: DecodeOperands, config: DecodeConfig) -> int:
    shapes = operands.shapes
    keys = shapes.kv_len if spec.window is None else min(shapes.kv_len, spec.window + shapes.q_len)
    rows = _rows(shapes)
    tiles = shapes.batch * shapes.num_kv_heads * -(-rows // ROWS)
    return config.splits(keys, tiles, rows, config.ctas_per_sm(_shared_bytes(operands, config)))


def decode_config(operands: DecodeOperands) -> DecodeConfig | None:
    """The tuned entry of the nearest case that fits. Tables name what the cache holds, bfloat16 for float16 too."""
    shapes = operands.shapes
    eight_bits = operands.k.dtype.itemsize == 1
    dtype = operands.k.dtype.name if eight_bits else "bfloat16"
    queries = "decode of many queries" if eight_bits and _rows(shapes) > WARP_ROWS else "decode"
    case = cache.Case(shapes.head_dim, shapes.value_head_dim, dtype, queries)
    configs = (DecodeConfig(**entry) for entry in cache.nearest("sm90_decode", case))
    return next((config for config in configs if _shared_bytes(operands, config) <= MAX_SHARED_BYTES), None)


def _shared_bytes(operands: DecodeOperands, config: DecodeConfig) -> int:
    stored = operands.k.dtype
    shapes = operands.shapes
    return config.shared_bytes(padded_head_dims(shapes, stored), operands.q.dtype, stored, _rows(shapes))


def _rows(shapes: Shapes) -> int:
    """Queries of a key head."""
    return shapes.q_len * shapes.q_heads_per_kv_head
