"""Decoding on Hopper: see decode_kernel.py.

Importing this module does not import Pallas; `decode` does.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.combine import Partial
from pallas_flash.decode_spec import DecodeOperands, DecodeSpec
from pallas_flash.kernels import tile_function
from pallas_flash.kernels.sm90.config import COLUMNS, MAX_SHARED_BYTES, round_up
from pallas_flash.kernels.sm90.decode_config import ROWS, DecodeConfig
from pallas_flash.spec import vary, varying_axes
from pallas_flash.tuning import cache

NAME = "sm90"
MAX_HEAD_DIM = 256
QUANTISED = (jnp.int8, jnp.float8_e4m3fn)


def unsupported(spec: DecodeSpec, operands: DecodeOperands) -> str | None:
    return None


def decode(
    spec: DecodeSpec, operands: DecodeOperands, *, config: DecodeConfig | None = None, splits: int | None = None,
    interpret: Any = None,
) -> Partial:  # fmt: skip
    """config, splits: others than the tuned ones. interpret: `plgpu.InterpretGPUParams`, to run on a CPU."""
    from pallas_flash.kernels.sm90.decode_kernel import run  # Pallas loads when it is needed

    config = config or decode_config(operands)
    assert config is not None, "unsupported() refuses what has no tiles"
    splits = splits or num_splits(operands, config)
    return run(spec, operands, config, splits, interpret=interpret)


def padded_head_dims(operands: DecodeOperands) -> tuple[int, int]:
    """As buffers hold them: whole swizzled rows of 32 bytes."""
    unit = COLUMNS * (2 if operands.k.dtype.itemsize == 1 else 1)
    shapes = operands.shapes
    return round_up(shapes.head_dim, unit), round_up(shapes.value_head_dim, unit)


def num_splits(operands: DecodeOperands, config: DecodeConfig) -> int:
    shapes = operands.shapes
    needed = config.shared_bytes(padded_head_dims(operands), operands.q.dtype, operands.k.dtype)
    tiles = shapes.batch * shapes.num_kv_heads * -(-shapes.q_len * shapes.q_heads_per_kv_head // ROWS)
    return config.splits(shapes.kv_len, tiles, config.ctas_per_sm(needed))


def decode_config(operands: DecodeOperands) -> DecodeConfig | None:
    return DecodeConfig()
