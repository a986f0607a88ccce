"""The portable backward pass: which calls its kernels take, with which tiles, and what stands around the kernels.

Importing this module does not import Pallas.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from pallas_flash.kernels import backward_bias, backward_rows, support
from pallas_flash.kernels.sizes import padded_head_dims
from pallas_flash.kernels.sm80.config import (
    COLUMN_UNIT,
    MAX_REGISTERS,
    OTHER_REGISTERS,
    KeysConfig,
    QueriesConfig,
    max_shared_bytes,
)
from pallas_flash.spec import AttentionSpec, Cotangents, Gradients, Operands, Residuals
from pallas_flash.tuning import cache


class Configs(NamedTuple):
    queries: QueriesConfig
    keys: KeysConfig


def obstacle(spec: AttentionSpec, operands: Operands) -> str | None:
    """Why no kernel here computes the gradients of a call that the forward kernel takes, in words; None if one does."""
    if (reason := support.gradient_refused(spec, operands)) is not None:
        return reason
    if tuned_configs(spec, operands) is None:
        return f"no tiles for head dims {operands.shapes.head_dim} and {operands.shapes.value_head_dim}"
    return None


def tuned_configs(spec: AttentionSpec, operands: Operands) -> Configs | None:
    """The tuned entries of the nearest cases that fit."""
    shapes = operands.shapes
    kind = support.mask_class(spec, operands)
    case = cache.Case(shapes.head_dim, shapes.value_head_dim, operands.q.dtype.name, kind)
    queries = (QueriesConfig(**entry) for entry in cache.nearest("sm80_backward_queries", case))
    keys = (KeysConfig(**entry) for entry in cache.nearest("sm80_backward_keys", case))
    found = [next((config for config in configs if fits(config, operands)), None) for configs in (queries, keys)]
    return None if None in found else Configs(*found)


def fits(config: QueriesConfig | KeysConfig, operands: Operands) -> bool:
    """Whether a call with these tiles fits into registers and shared memory, whatever its features."""
    dims = padded_head_dims(operands.shapes, COLUMN_UNIT)
    limit = max_shared_bytes(support.compute_capability())
    shared = config.shared_bytes(dims, operands.q.dtype.itemsize)
    return shared <= limit and config.registers(dims) <= MAX_REGISTERS - OTHER_REGISTERS


def backward(
    spec: AttentionSpec,
    operands: Operands,
    residuals: Residuals,
    cotangents: Cotangents,
    *,
    configs: Configs,
    interpret: Any = None,
) -> Gradients:
    """dQ by one kernel, dK and dV by another; the gradient of a bias by that whose tiles have the rows it needs.
    interpret: `plgpu.InterpretGPUParams`, to run on a CPU, interpreted."""
    from pallas_flash.kernels.sm80 import backward_keys, backward_queries  # Pallas loads when it is needed

    queries, keys = configs
    block_q = math.lcm(queries.block_q, keys.block_q)
    operands, dout, rows = backward_rows.prepare(spec, operands, residuals, cotangents, block_q)
    blocks = block_q, math.lcm(queries.block_kv, keys.block_kv)
    totals = backward_bias.totals(operands, blocks, interpreted=interpret is not None)
    call = spec, operands, dout, rows
    dq, dscale = backward_queries.run(*call, queries, dbias=totals.of_queries, interpret=interpret)
    dk, dv = backward_keys.run(*call, keys, dbias=totals.of_keys, interpret=interpret)
    return Gradients(
        q=dq,
        k=dk,
        v=dv,
        bias=backward_bias.gradient(totals, operands),
        sinks=None if operands.sinks is None else backward_rows.sinks_gradient(operands.sinks, rows),
        scale=None if dscale is None else _as(dscale, operands.scale),
        score_mod=(None,) * len(operands.score_mod),
    )


def _as(gradient: jax.Array, operand: Any) -> jax.Array:
    return gradient.astype(operand.dtype)
