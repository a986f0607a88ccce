"""The Hopper backward pass: which calls its kernels take, with which tiles, and what stands around the kernels.

Importing this module does not import Pallas.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.kernels import tile_function
from pallas_flash.kernels.sm90 import backward_bias
from pallas_flash.kernels.sm90.backward_config import BackwardConfig
from pallas_flash.kernels.sm90.backward_queries_config import QueriesConfig
from pallas_flash.kernels.sm90.config import MAX_SHARED_BYTES, padded_head_dims
from pallas_flash.masks import Band, Chunked, PrefixLM
from pallas_flash.products import finite_part
from pallas_flash.spec import LOG2E, AttentionSpec, Cotangents, Gradients, Operands, Residuals
from pallas_flash.tuning import cache


def obstacle(spec: AttentionSpec, operands: Operands, mask_class: str) -> str | None:
    """Why no kernel here computes the gradients of a call that the forward kernel takes, in words; None if one does."""
    if spec.deterministic and operands.bias is not None and backward_bias.adds_up_heads(operands.bias, operands.shapes):
        return "deterministic=True and a bias that heads or batch elements share: the order of its sums is not fixed"
    if any(jnp.issubdtype(array.dtype, jnp.floating) for array in operands.score_mod):
        return "floating arrays that score_mod captures: it does not compute their gradients"
    if spec.score_mod is not None:
        problem = tile_function.derivative_obstacle(spec.score_mod)
        if problem is not None:
            return f"the derivative of score_mod uses {problem}, which it cannot compute"
    config = tuned_config(spec, operands, mask_class)
    has_tiles = not two_kernels(spec, operands) or tuned_queries_config(operands, mask_class) is not None
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
    return next((config for config in configs if fits(config, spec, operands)), None)


def fits(config: BackwardConfig, spec: AttentionSpec, operands: Operands) -> bool:
    """Whether a call with these tiles fits into registers and shared memory."""
    dims = operands.shapes.head_dim, operands.shapes.value_head_dim
    derivative, dropout = spec.soft_cap is not None or spec.score_mod is not None, spec.dropout_rate > 0
    slopes = config.needs_slopes(operands.q.dtype, derivative=derivative, dropout=dropout)
    itemsize, maximum = operands.q.dtype.itemsize, any_logits(spec, operands)
    needed = config.shared_bytes(config.padded(*dims), itemsize, slopes=slopes, maximum=maximum)
    return config.fits(*dims) and needed <= MAX_SHARED_BYTES


def tuned_queries_config(operands: Operands, mask_class: str) -> QueriesConfig | None:
    """Likewise for the kernel for dQ alone."""
    shapes = operands.shapes
    dims = padded_head_dims(shapes)
    case = cache.Case(shapes.head_dim, shapes.value_head_dim, operands.q.dtype.name, mask_class)
    configs = (QueriesConfig(**entry) for entry in cache.nearest("sm90_backward_queries", case))
    fits = lambda x: x.fits(dims[0]) and x.shared_bytes(dims, operands.q.dtype.itemsize) <= MAX_SHARED_BYTES  # noqa: E731
    return next(filter(fits, configs), None)


def any_logits(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether a bias or a score_mod may make logits as large as float32 goes."""
    return spec.score_mod is not None or operands.bias is not None


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
    from pallas_flash.kernels.sm90.backward_plan import Rows  # Pallas loads when it is needed

    block_q = config.block_q if queries_config is None else math.lcm(config.block_q, queries_config.tile_q)
    rows = Rows(*prepare_rows(residuals, cotangents, block_q, natural=any_logits(spec, operands)))
    dout = cotangents.out
    if may_hide_rows(spec, operands):
        rows = rows._replace(lse_log2=_without_junk_rows(rows.lse_log2, residuals.out, dout))
        dout = finite_part(dout)
        operands = operands._replace(q=finite_part(operands.q), k=finite_part(operands.k))
    call = spec, operands, dout, rows, interpret
    gradients = _one_kernel(config, *call) if queries_config is None else _two_kernels((config, queries_config), *call)
    if operands.sinks is not None:  # one more logit whose value vector is 0: d sink = p_sink * (0 - delta)
        lse_log2, delta, m = rows
        sinks = operands.sinks.astype(jnp.float32)[:, None]
        p_sink = jnp.exp2((sinks if m is None else sinks - m) * LOG2E - lse_log2)
        dsinks = -jnp.sum(p_sink * delta, axis=(0, 2)).astype(operands.sinks.dtype)
        gradients = gradients._replace(sinks=dsinks)
    return gradients._replace(score_mod=(None,) * len(operands.score_mod))


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
    bias, shapes, total, of_keys = operands.bias, operands.shapes, None, False
    if bias is not None:
        of_keys = backward_bias.sums_over(bias) == "queries"
        blocks = queries_config.tile_q, math.lcm(config.block_kv, queries_config.block_kv)
        total = jax.new_ref(backward_bias.zeros(bias, shapes, blocks, interpreted=interpret is not None))
    dq, dscale = backward_queries.run(
        spec, operands, dout, rows, queries_config, dbias=None if of_keys else total, interpret=interpret
    )
    _, dk, dv = backward_kernel.run(
        spec, operands, dout, rows, config, sums_dq=False, dbias=total if of_keys else None, interpret=interpret
    )
    dbias = None if total is None or bias is None else backward_bias.gradient(jax.freeze(total), bias, shapes)
    if operands.scale is not None and dscale is not None:
        dscale = dscale.astype(operands.scale.dtype)
    return Gradients(q=dq, k=dk, v=dv, bias=dbias, scale=dscale)


def may_hide_rows(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether rows of q, k or dout may be hidden from all others, as padding is, whose memory may hold anything: in a
    tile that is hidden in part it is multiplied with 0, and 0 * NaN is NaN. Between as many queries as keys, masks by
    position alone hide no whole rows without an offset; they do without copies of q, k and dout."""
    by_position = all(isinstance(part, Band | Chunked | PrefixLM) for part in spec.mask)
    square = operands.shapes.q_len == operands.shapes.kv_len and spec.q_offset == spec.kv_offset == 0
    return not by_position or operands.bias is not None or (bool(spec.mask) and not square)


def _without_junk_rows(lse_log2: jax.Array, out: jax.Array, dout: jax.Array) -> jax.Array:
    """NaN for a row with keys whose cotangents are not finite: so are then the weights that multiply them. NaN in q or
    k is in the log-sum-exp already."""
    junk = jnp.swapaxes(~jnp.isfinite(dout).all(-1) & (out != 0).any(-1), 1, 2)  # out is 0 where no key is read
    junk = jnp.pad(junk, ((0, 0), (0, 0), (0, lse_log2.shape[-1] - junk.shape[-1])))
    return jnp.where(junk & (lse_log2 != jnp.inf), jnp.nan, lse_log2)


def prepare_rows(
    residuals: Residuals, cotangents: Cotangents, block_q: int, *, natural: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`backward_plan.Rows`. Usually m and l become one number; not (natural=True) where logits may be so large that the
    sum would lose log2(l)."""
    out, m, l = residuals  # noqa: E741
    dead = l == 0
    product = jnp.where(out == 0, 0, out.astype(jnp.float32) * cotangents.out.astype(jnp.float32))
    delta = jnp.where(dead, 0, jnp.swapaxes(product.sum(-1), 1, 2) - cotangents.lse)
    m = jnp.where(dead, 0, m)
    lse_log2 = jnp.where(dead, jnp.inf, jnp.log2(jnp.where(dead, 1, l)) + (0 if natural else m * LOG2E))
    missing = ((0, 0), (0, 0), (0, -m.shape[-1] % block_q))
    return (
        jnp.pad(lse_log2, missing, constant_values=jnp.inf),
        jnp.pad(delta, missing),
        jnp.pad(m, missing) if natural else None,
    )
