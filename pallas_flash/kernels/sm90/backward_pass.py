"""The Hopper backward pass: which calls its kernel takes, with which tiles, and what stands around the kernel.

Importing this module does not import Pallas.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.kernels.sm90.backward_config import BackwardConfig
from pallas_flash.spec import LOG2E, AttentionSpec, Cotangents, Gradients, Operands, Residuals


def backward(
    spec: AttentionSpec,
    operands: Operands,
    residuals: Residuals,
    cotangents: Cotangents,
    *,
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> Gradients:
    """config: other tiles than the tuned ones. interpret: `plgpu.InterpretGPUParams`, to run on a CPU, interpreted."""
    from pallas_flash.kernels.sm90 import backward_kernel  # Pallas loads when it is needed
    from pallas_flash.kernels.sm90.backward_plan import Rows

    config = config or BackwardConfig()
    any_logits = spec.score_mod is not None or operands.bias is not None
    lse_log2, delta, m = prepare_rows(residuals, cotangents, config.block_q, any_logits=any_logits)
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
    residuals: Residuals, cotangents: Cotangents, block_q: int, *, any_logits: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`backward_plan.Rows`. Usually m and l become one number; not where logits may be so large that it would lose
    what log2(l) adds to it."""
    out, m, l = residuals  # noqa: E741
    dead = l == 0
    product = out.astype(jnp.float32) * cotangents.out.astype(jnp.float32)
    delta = jnp.where(dead, 0, jnp.swapaxes(product.sum(-1), 1, 2) - cotangents.lse)
    m = jnp.where(dead, 0, m)
    lse_log2 = jnp.where(dead, jnp.inf, jnp.log2(jnp.where(dead, 1, l)) + (0 if any_logits else m * LOG2E))
    missing = ((0, 0), (0, 0), (0, -m.shape[-1] % block_q))
    return (
        jnp.pad(lse_log2, missing, constant_values=jnp.inf),
        jnp.pad(delta, missing),
        jnp.pad(m, missing) if any_logits else None,
    )
