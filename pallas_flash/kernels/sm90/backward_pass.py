"""The Hopper backward pass: which calls its kernel takes, with which tiles, and what stands around the kernel.

Importing this module does not import Pallas.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.kernels import tile_function
from pallas_flash.kernels.sm90.backward_config import BackwardConfig
from pallas_flash.kernels.sm90.config import MAX_SHARED_BYTES
from pallas_flash.spec import LOG2E, AttentionSpec, Cotangents, Gradients, Operands, Residuals
from pallas_flash.tuning import cache


def obstacle(spec: AttentionSpec, operands: Operands, mask_class: str) -> str | None:
    """Why the kernel cannot compute the gradients of a call that the forward kernel takes, in words; None if it can."""
    if spec.deterministic:
        return "deterministic=True: the order in which it sums dQ is not fixed"
    if operands.bias is not None:
        return "a bias: it does not compute its gradient"
    if any(jnp.issubdtype(array.dtype, jnp.floating) for array in operands.score_mod):
        return "floating arrays that score_mod captures: it does not compute their gradients"
    if spec.score_mod is not None:
        problem = tile_function.derivative_obstacle(spec.score_mod)
        if problem is not None:
            return f"the derivative of score_mod uses {problem}, which it cannot compute"
    if tuned_config(spec, operands, mask_class) is None:
        return f"no tiles for head dims {operands.shapes.head_dim} and {operands.shapes.value_head_dim}"
    return None


def tuned_config(spec: AttentionSpec, operands: Operands, mask_class: str) -> BackwardConfig | None:
    """The tuned entry of the nearest case that fits into registers and shared memory."""
    dims = operands.shapes.head_dim, operands.shapes.value_head_dim
    slopes = spec.soft_cap is not None or spec.score_mod is not None or spec.dropout_rate > 0
    for entry in cache.nearest("sm90_backward", cache.Case(*dims, operands.q.dtype.name, mask_class)):
        config = BackwardConfig(**entry)
        padded, itemsize = config.padded(*dims), operands.q.dtype.itemsize
        needed = config.shared_bytes(padded, itemsize, slopes=slopes, maximum=any_logits(spec, operands))
        if config.fits(*dims) and needed <= MAX_SHARED_BYTES:
            return config
    return None


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
    interpret: Any = None,
) -> Gradients:
    """interpret: `plgpu.InterpretGPUParams`, to run on a CPU, interpreted."""
    from pallas_flash.kernels.sm90 import backward_kernel  # Pallas loads when it is needed
    from pallas_flash.kernels.sm90.backward_plan import Rows

    block_q = config.block_q
    lse_log2, delta, m = prepare_rows(residuals, cotangents, block_q, natural=any_logits(spec, operands))
    rows = Rows(lse_log2, delta, m)
    dq, dk, dv = backward_kernel.run(spec, operands, cotangents.out, rows, config, interpret=interpret)
    scale, dscale = spec.scale, None
    if operands.scale is not None:  # its gradient is the sum of ds * s over all pairs, with s = q.k
        scale = operands.scale.astype(jnp.float32)
        dscale = jnp.sum(operands.q.astype(jnp.float32) * dq).astype(operands.scale.dtype)
    dsinks = None
    if operands.sinks is not None:  # one more logit whose value vector is 0: d sink = p_sink * (0 - delta)
        sinks = operands.sinks.astype(jnp.float32)[:, None]
        p_sink = jnp.exp2((sinks if m is None else sinks - m) * LOG2E - lse_log2)
        dsinks = -jnp.sum(p_sink * delta, axis=(0, 2)).astype(operands.sinks.dtype)
    return Gradients(q=(dq * scale).astype(operands.q.dtype), k=dk, v=dv, sinks=dsinks, scale=dscale)


def prepare_rows(
    residuals: Residuals, cotangents: Cotangents, block_q: int, *, natural: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`backward_plan.Rows`. Usually m and l become one number; not (natural=True) where logits may be so large that the
    sum would lose log2(l)."""
    out, m, l = residuals  # noqa: E741
    dead = l == 0
    product = out.astype(jnp.float32) * cotangents.out.astype(jnp.float32)
    delta = jnp.where(dead, 0, jnp.swapaxes(product.sum(-1), 1, 2) - cotangents.lse)
    m = jnp.where(dead, 0, m)
    lse_log2 = jnp.where(dead, jnp.inf, jnp.log2(jnp.where(dead, 1, l)) + (0 if natural else m * LOG2E))
    missing = ((0, 0), (0, 0), (0, -m.shape[-1] % block_q))
    return (
        jnp.pad(lse_log2, missing, constant_values=jnp.inf),
        jnp.pad(delta, missing),
        jnp.pad(m, missing) if natural else None,
    )
