"""The portable backward pass: which calls its kernels take, with which tiles, and what stands around the kernels.

Importing this module does not import Pallas.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
    entries = cache.nearest("sm80_backward_keys", case)
    keys = (keys_config(KeysConfig(**entry), spec, operands) for entry in entries)
    found = [next((config for config in configs if fits(config, operands)), None) for configs in (queries, keys)]
    return None if None in found else Configs(*found)


def fits(config: QueriesConfig | KeysConfig, operands: Operands) -> bool:
    """Whether a call with these tiles fits into registers and shared memory, whatever its features."""
    warpgroups = config.warpgroups if isinstance(config, KeysConfig) else 1
    dims = padded_head_dims(operands.shapes, COLUMN_UNIT * warpgroups)
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
    """By one kernel if configs.keys.fused and nothing forbids it, or else by two, as if it were not. interpret:
    `plgpu.InterpretGPUParams`, to run on a CPU, interpreted."""
    queries, keys = configs
    keys = keys_config(keys, spec, operands)
    block_q = keys.block_q if keys.fused else math.lcm(queries.block_q, keys.block_q)
    operands, dout, rows = backward_rows.prepare(spec, operands, residuals, cotangents, block_q)
    call = spec, operands, dout, rows
    if keys.fused:
        gradients = _one_kernel(keys, *call, interpret=interpret)
    else:
        gradients = _two_kernels(Configs(queries, keys), *call, interpret=interpret)
    sinks = None if operands.sinks is None else backward_rows.sinks_gradient(operands.sinks, rows)
    return gradients._replace(sinks=sinks, score_mod=(None,) * len(operands.score_mod))


def two_kernels(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether dQ must come from a kernel of its own: that sums in a fixed order, and meets the rows of a bias whole."""
    return spec.deterministic or operands.bias is not None


def keys_config(config: KeysConfig, spec: AttentionSpec, operands: Operands) -> KeysConfig:
    """As this call uses it."""
    return dataclasses.replace(config, fused=False, warpgroups=1) if two_kernels(spec, operands) else config


def _one_kernel(
    config: KeysConfig, spec: AttentionSpec, operands: Operands, dout: jax.Array, rows: Any, *, interpret: Any
) -> Gradients:
    from pallas_flash.kernels.sm80 import backward_keys  # Pallas loads when it is needed

    dq, dk, dv = backward_keys.run(spec, operands, dout, rows, config, interpret=interpret)
    assert dq is not None, "config.fused"
    scale, dscale = spec.scale, None
    if operands.scale is not None:  # its gradient is the sum of ds * s over all pairs, with s = q.k
        scale = operands.scale.astype(jnp.float32)
        dscale = _as(jnp.sum(operands.q.astype(jnp.float32) * dq), operands.scale)
    return Gradients(q=(dq * scale).astype(operands.q.dtype), k=dk, v=dv, scale=dscale)


def _two_kernels(
    configs: Configs, spec: AttentionSpec, operands: Operands, dout: jax.Array, rows: Any, *, interpret: Any
) -> Gradients:
    """dQ by one kernel, dK and dV by another; the gradient of a bias by that whose tiles have the rows it needs."""
    from pallas_flash.kernels.sm80 import backward_keys, backward_queries

    queries, keys = configs
    blocks = (math.lcm(x, y) for x, y in ((queries.block_q, keys.block_q), (queries.block_kv, keys.block_kv)))
    totals = backward_bias.totals(operands, (*blocks,), interpreted=interpret is not None)
    call = spec, operands, dout, rows
    dq, dscale = backward_queries.run(*call, queries, dbias=totals.of_queries, interpret=interpret)
    _, dk, dv = backward_keys.run(*call, keys, dbias=totals.of_keys, interpret=interpret)
    bias = backward_bias.gradient(totals, operands)
    return Gradients(q=dq, k=dk, v=dv, bias=bias, scale=None if dscale is None else _as(dscale, operands.scale))


def _as(gradient: jax.Array, operand: Any) -> jax.Array:
    return gradient.astype(operand.dtype)
