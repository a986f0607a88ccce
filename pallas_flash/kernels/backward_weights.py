"""P and what else the backward pass makes of a tile of scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import memory
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.tile_scores import TileScores
from pallas_flash.spec import LOG2E

Ref = Any


class Weights(NamedTuple):
    p: jax.Array  # P^T before dropout
    derivative: jax.Array | None  # of the logits by scale * q.k; None: 1


def weights_of(plan: Any, tile: TileScores, scores: jax.Array, rows: Rows, *, masked: bool) -> Weights:
    """From q.k, whichever of the two has the rows. rows: a query's numbers at each of its scores."""
    derivative = None
    if plan.scaled_only:
        logits, to_log2 = scores * (tile.operands.scale * LOG2E), 1.0
    else:
        logits, to_log2 = tile.unbiased(scores), LOG2E
        derivative = tile.derivative(scores, logits) if plan.derivative else None
        logits = tile.biased(logits)
    # A score_mod or a bias may give anything to rows that are not there, or that no key is for.
    hidden = (logits == -jnp.inf) | (rows.lse_log2 == jnp.inf) if plan.any_logits else None
    if rows.m is not None:
        logits = logits - rows.m
    if to_log2 != 1:
        logits = logits * to_log2
    # What is hidden is hidden last: NaN in a row's log-sum-exp is not for the keys that the row does not read.
    logits = logits - rows.lse_log2
    if masked:
        logits = tile.masked(logits, plan.kv_len_if_cut)
    if hidden is not None:
        logits = jnp.where(hidden, -jnp.inf, logits)
    return Weights(jnp.exp2(logits), derivative)


def times(tile: jax.Array, derivative: jax.Array) -> jax.Array:
    """0 where the tile is, whatever the derivative of a masked pair may be."""
    return jnp.where(tile == 0, 0.0, tile * derivative)


def row_products(q_smem: Ref, dq: jax.Array) -> jax.Array:
    """The sum of q * dq along each row."""
    rows, columns = dq.shape
    total = plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    size = memory.tile_columns(dq.shape, q_smem.dtype)  # at a time: registers are short
    for first in range(0, columns, size):
        q = plgpu.load(q_smem.at[:, pl.ds(first, size)], layout=plgpu.Layout.WGMMA)
        total += (q.astype(jnp.float32) * dq[:, first : first + size]).sum(axis=1)
    return total


def dlogits(plan: Any, tile: TileScores, p: jax.Array, dp: jax.Array, delta: jax.Array, *, masked: bool) -> jax.Array:
    """The gradient of the logits, if p is P; of scale * q.k, if p is P times the derivative of the logits by it.
    delta: a query's number at each of its scores."""
    if plan.spec.dropout_rate > 0:
        dp = tile.kept(dp) * (1 / (1 - plan.spec.dropout_rate))
    ds = p * (dp - delta)
    if masked or plan.any_logits:  # where v or dout holds NaN or Inf, dP does
        ds = jnp.where(p == 0, 0.0, ds)
    return ds
