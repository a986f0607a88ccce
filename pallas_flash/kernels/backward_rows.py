"""What the backward kernels need of each query row, and what must not reach them. Importing this module does not
import Pallas."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.masks import Band, Chunked, PrefixLM
from pallas_flash.products import finite_part
from pallas_flash.spec import LOG2E, AttentionSpec, Cotangents, Operands, Residuals


class Rows(NamedTuple):
    """What the backward pass needs of each query row beside q and dout, float32 [B, N, T rounded up]."""

    lse_log2: Any  # what P = exp2(logits_log2 - lse_log2) subtracts; +inf in a row with no key and behind the last one
    delta: Any  # sum(out * dout) - dlse; 0 in those rows
    m: Any  # None, or P = exp2((logits - m) * log2(e) - lse_log2)


def any_logits(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether a bias or a score_mod may make logits as large as float32 goes."""
    return spec.score_mod is not None or operands.bias is not None


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


def prepare(
    spec: AttentionSpec, operands: Operands, residuals: Residuals, cotangents: Cotangents, block_q: int
) -> tuple[Operands, jax.Array, Rows]:
    """The operands, the output's cotangents and `Rows`, up to a multiple of block_q, without what must reach nobody."""
    rows, dout = _rows(residuals, cotangents, block_q, natural=any_logits(spec, operands)), cotangents.out
    if may_hide_rows(spec, operands):
        rows = rows._replace(lse_log2=_without_junk_rows(rows.lse_log2, residuals.out, dout))
        dout = finite_part(dout)
        operands = operands._replace(q=finite_part(operands.q), k=finite_part(operands.k))
    return operands, dout, rows


def sinks_gradient(sinks: jax.Array, rows: Rows) -> jax.Array:
    """A sink is one more logit whose value vector is 0: d sink = p_sink * (0 - delta)."""
    lse_log2, delta, m = rows
    logits = sinks.astype(jnp.float32)[:, None]
    p_sink = jnp.exp2((logits if m is None else logits - m) * LOG2E - lse_log2)
    return -jnp.sum(p_sink * delta, axis=(0, 2)).astype(sinks.dtype)


def _rows(residuals: Residuals, cotangents: Cotangents, block_q: int, *, natural: bool) -> Rows:
    """Usually m and l become one number; not (natural=True) where logits may be so large that the sum would lose
    log2(l)."""
    out, m, l = residuals  # noqa: E741
    dead = l == 0
    product = jnp.where(out == 0, 0, out.astype(jnp.float32) * cotangents.out.astype(jnp.float32))
    delta = jnp.where(dead, 0, jnp.swapaxes(product.sum(-1), 1, 2) - cotangents.lse)
    m = jnp.where(dead, 0, m)
    lse_log2 = jnp.where(dead, jnp.inf, jnp.log2(jnp.where(dead, 1, l)) + (0 if natural else m * LOG2E))
    missing = ((0, 0), (0, 0), (0, -m.shape[-1] % block_q))
    return Rows(
        jnp.pad(lse_log2, missing, constant_values=jnp.inf),
        jnp.pad(delta, missing),
        jnp.pad(m, missing) if natural else None,
    )
