"""Standard attention: the whole score matrix, plain JAX, plain autodiff. The baseline, and the meaning of every
argument; forward-mode and higher derivatives work."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout, products
from pallas_flash.masks import Slice
from pallas_flash.scores import logits, score_inputs, tile_of
from pallas_flash.spec import AttentionSpec, Forward, Operands, Residuals

NAME = "reference"


def unsupported(spec: AttentionSpec, operands: Operands) -> str | None:
    return None


def forward(spec: AttentionSpec, operands: Operands) -> Forward:
    shapes = operands.shapes
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (operands.q, operands.k, operands.v))
    rows, keys = Slice(0, shapes.q_len), Slice(0, shapes.kv_len)
    tile = tile_of(spec, operands, rows, keys)

    raw = products.differentiable_scores(q, k, spec.precision)
    s = logits(spec, raw, score_inputs(operands, rows, keys), tile)
    # The result does not depend on m, only its rounding does: no gradient needs to pass through it.
    max_logit = lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
    m = max_logit
    if operands.sinks is not None:
        sinks = operands.sinks.astype(s.dtype)[None, :, None]
        m = jnp.maximum(m, lax.stop_gradient(sinks))
    shift = jnp.where(m == -jnp.inf, 0, m)
    p = jnp.exp(s - shift[..., None])
    l = jnp.sum(p, axis=-1)  # noqa: E741
    if operands.sinks is not None:
        l = l + jnp.exp(sinks - shift)  # noqa: E741
    p = p / jnp.where(l == 0, 1, l)[..., None]
    if tile.live is not None:  # not 0 but NaN where a live pair made the row's sum NaN
        p = jnp.where(tile.live, p, 0)
    p = dropout.scale_kept(spec, operands.dropout_key, tile.index, p)
    out = products.sum_over_keys(p, v, tile.live, spec.precision, products.has_junk(v))
    if tile.live is not None:  # a row with no key: its junk cotangent reaches nothing
        out = jnp.where(jnp.any(tile.live, axis=-1, keepdims=True), out, 0)

    residuals = Residuals(jnp.swapaxes(out, 1, 2).astype(operands.q.dtype), m, l)
    return Forward(residuals, jnp.max(max_logit, axis=-1, initial=-jnp.inf) if spec.return_max_logit else None)
