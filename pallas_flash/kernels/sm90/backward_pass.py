"""The Hopper backward pass: which calls its kernels take, with which tiles, and what stands around the kernels.

Importing this module does not import Pallas.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.kernels import backward_bias, backward_rows, support
from pallas_flash.kernels.sizes import padded_head_dims
from pallas_flash.kernels.sm90.backward_config import BackwardConfig
from pallas_flash.kernels.sm90.backward_queries_config import QueriesConfig
from pallas_flash.kernels.sm90.config import MAX_SHARED_BYTES, as_called
from pallas_flash.spec import AttentionSpec, Cotangents, Gradients, Operands, Residuals
from pallas_flash.tuning import cache


def obstacle(spec: AttentionSpec, operands: Operands, mask_class: str) -> str | None:
    """Why no kernel here computes the gradients of a call that the forward kernel takes, in words; None if one does."""
    if (reason := support.gradient_refused(spec, operands)) is not None:
        return reason
    config = tuned_config(spec, operands, mask_class)
    has_tiles = not two_kernels(spec, operands) or tuned_queries_config(spec, operands, mask_class) is not None
    if config is None or not has_tiles:
        return f"no tiles for head dims {operands.shapes.head_dim} and {operands.shapes.value_head_dim}"
    bends = spec.soft_cap is not None or spec.score_mod is not None
    of_keys = operands.bias is not None and backward_bias.sums_over(operands.bias) == "queries"
    if of_keys and bends and config.shares_keys:
        return "head dims beyond 128, a bias [.., 1, S] and a soft cap or score_mod: no warpgroup has that gradient"
    return None


def two_kernels(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether dQ must come from a kernel of its own: that sums in a fixed order, and meets the rows of a bias whole."""
    return spec.deterministic or operands.bias is not None


def tuned_config(spec: AttentionSpec, operands: Operands, mask_class: str) -> BackwardConfig | None:
    """The tuned entry of the nearest case that fits."""
    shapes = operands.shapes
    case = cache.Case(shapes.head_dim, shapes.value_head_dim, operands.q.dtype.name, mask_class)
    configs = (BackwardConfig(**entry) for entry in cache.nearest("sm90_backward", case))
    return as_called(next((config for config in configs if fits(config, spec, operands)), None), spec)


def fits(config: BackwardConfig, spec: AttentionSpec, operands: Operands) -> bool:
    """Whether a call with these tiles fits into registers and shared memory."""
    dims = operands.shapes.head_dim, operands.shapes.value_head_dim
    derivative, dropout = spec.soft_cap is not None or spec.score_mod is not None, spec.dropout_rate > 0
    slopes = config.needs_slopes(operands.q.dtype, derivative=derivative, dropout=dropout)
    itemsize, maximum = operands.q.dtype.itemsize, backward_rows.any_logits(spec, operands)
    needed = config.shared_bytes(config.padded(*dims), itemsize, slopes=slopes, maximum=maximum)
    return config.fits(*dims) and needed <= MAX_SHARED_BYTES


def tuned_queries_config(spec: AttentionSpec, operands: Operands, mask_class: str) -> QueriesConfig | None:
    """Likewise for the kernel for dQ alone."""
    shapes = operands.shapes
    dims = padded_head_dims(shapes)
    case = cache.Case(shapes.head_dim, shapes.value_head_dim, operands.q.dtype.name, mask_class)
    configs = (QueriesConfig(**entry) for entry in cache.nearest("sm90_backward_queries", case))
    fits = lambda x: x.fits(dims[0]) and x.shared_bytes(dims, operands.q.dtype.itemsize) <= MAX_SHARED_BYTES  # noqa: E731
    return as_called(next(filter(fits, configs), None), spec)


def queries_config(spec: AttentionSpec, operands: Operands, mask_class: str) -> QueriesConfig | None:
    """None where one kernel makes all gradients."""
    return tuned_queries_config(spec, operands, mask_class) if two_kernels(spec, operands) else None


def backward(
    spec: AttentionSpec,
    operands: Operands,
    residuals: Residuals,
    cotangents: Cotangents,
    *,
    config: BackwardConfig,
    queries_config: QueriesConfig | None = None,
    interpret: Any = None,
) -> Gradients:
    """queries_config: tiles of a kernel for dQ alone; None: one kernel makes everything. interpret:
    `plgpu.InterpretGPUParams`, to run on a CPU, interpreted."""
    block_q = config.block_q if queries_config is None else math.lcm(config.block_q, queries_config.tile_q)
    operands, dout, rows = backward_rows.prepare(spec, operands, residuals, cotangents, block_q)
    call = spec, operands, dout, rows, interpret
    gradients = _one_kernel(config, *call) if queries_config is None else _two_kernels((config, queries_config), *call)
    sinks = None if operands.sinks is None else backward_rows.sinks_gradient(operands.sinks, rows)
    return gradients._replace(sinks=sinks, score_mod=(None,) * len(operands.score_mod))


def _one_kernel(
    config: BackwardConfig, spec: AttentionSpec, operands: Operands, dout: jax.Array, rows: Any, interpret: Any
) -> Gradients:
    from pallas_flash.kernels.sm90 import backward_kernel

    dq, dk, dv = backward_kernel.run(spec, operands, dout, rows, config, interpret=interpret)
    assert dq is not None
    scale, dscale = spec.scale, None
    if operands.scale is not None:  # its gradient is the sum of ds * s over all pairs, with s = q.k
        scale = operands.scale.astype(jnp.float32)
        dscale = jnp.sum(operands.q.astype(jnp.float32) * dq).astype(operands.scale.dtype)
    return Gradients(q=(dq * scale).astype(operands.q.dtype), k=dk, v=dv, scale=dscale)


def _two_kernels(
    configs: tuple[BackwardConfig, QueriesConfig],
    spec: AttentionSpec,
    operands: Operands,
    dout: jax.Array,
    rows: Any,
    interpret: Any,
) -> Gradients:
    """dQ by one kernel, dK and dV by another; the gradient of a bias by that whose tiles have the rows it needs."""
    from pallas_flash.kernels.sm90 import backward_kernel, backward_queries

    config, queries_config = configs
    blocks = queries_config.tile_q, math.lcm(config.block_kv, queries_config.block_kv)
    totals = backward_bias.totals(operands, blocks, interpreted=interpret is not None)
    call = spec, operands, dout, rows
    dq, dscale = backward_queries.run(*call, queries_config, dbias=totals.of_queries, interpret=interpret)
    _, dk, dv = backward_kernel.run(*call, config, sums_dq=False, dbias=totals.of_keys, interpret=interpret)
    dbias = backward_bias.gradient(totals, operands)
    if operands.scale is not None and dscale is not None:
        dscale = dscale.astype(operands.scale.dtype)
    return Gradients(q=dq, k=dk, v=dv, bias=dbias, scale=dscale)
