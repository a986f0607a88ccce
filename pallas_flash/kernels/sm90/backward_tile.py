"""What the compute warpgroups of the Hopper backward kernel do with one tile, however they share the work.

Tiles have keys as rows: what belongs to a query is one value a column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import memory
from pallas_flash.kernels.sm90.backward_config import BLOCK
from pallas_flash.kernels.sm90.backward_plan import Block, Ref, Refs, Rows, Worker
from pallas_flash.kernels.tile_mask import TileIndex
from pallas_flash.kernels.tile_scores import TileScores
from pallas_flash.spec import LOG2E


def meet(refs: Refs) -> None:
    """Wait until both warpgroups are here; then each sees what the other wrote to shared memory."""
    refs.barriers.meeting.hold()


def load_columns(ref: Ref) -> jax.Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def columns_like(columns: jax.Array, tile: jax.Array) -> jax.Array:
    """One value a column, for every row of the tile."""
    return lax.broadcast_in_dim(columns, tile.shape, (1,))


def tile_scores(worker: Worker, block: Block) -> TileScores:
    plan, work = worker.plan, worker.work
    own_keys = 0 if plan.config.shares_keys else worker.wg * BLOCK
    index = TileIndex(
        shape=(BLOCK, plan.config.block_q),
        batch=work.item.batch,
        head=block.head,
        q_base=block.q_base,
        kv_base=work.item.ki * plan.config.block_kv + own_keys,
        q_offset=work.q_offset,
        transposed=True,
    )
    return TileScores(plan.spec, work.scores, index, plan.tensor_cores)


class Weights(NamedTuple):
    p: jax.Array  # P^T before dropout
    derivative: jax.Array | None  # of the logits by scale * q.k; None: 1


def weights(worker: Worker, block: Block, tile: TileScores, scores: jax.Array) -> Weights:
    """From K Q^T."""
    plan, rows = worker.plan, worker.refs.buffers.rows
    spread = lambda ref: columns_like(load_columns(ref.at[block.q_slot]), scores)  # noqa: E731
    m = None if rows.m is None else spread(rows.m)
    return weights_of(plan, tile, scores, Rows(spread(rows.lse_log2), None, m), masked=block.masked)


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


def dlogits(worker: Worker, block: Block, tile: TileScores, p: jax.Array, dp: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of the logits, if p is P; of scale * q.k, if p is P times the derivative of the logits by it."""
    spec = worker.plan.spec
    if spec.dropout_rate > 0:
        dp = tile.kept(dp) * (1 / (1 - spec.dropout_rate))
    ds = p * (dp - columns_like(delta, p))
    if block.masked or worker.plan.any_logits:  # where v or dout holds NaN or Inf, dP does
        ds = jnp.where(p == 0, 0.0, ds)
    tile.add_bias_gradient(worker.refs.inputs.dbias, ds)
    return ds


def times(tile: jax.Array, derivative: jax.Array) -> jax.Array:
    """0 where the tile is, whatever the derivative of a masked pair may be."""
    return jnp.where(tile == 0, 0.0, tile * derivative)


def add_dq(worker: Worker, block: Block, chunk: tuple[int, int, int], dq: jax.Array) -> None:
    """Add one of this warpgroup's parts of a block of dQ to the sum in device memory."""
    plan, refs, wg, work, *_ = worker
    row, column, columns = chunk
    item = work.item
    batch = item.batch if plan.dq_slices == 1 else item.batch + item.ki * plan.shapes.batch
    staged = refs.buffers.dq.at[wg]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last part's
    staged[...] = dq
    plgpu.commit_smem()
    target = refs.inputs.dq.at[batch, pl.ds(block.q_base + row, BLOCK), block.head, pl.ds(column, columns)]
    memory.add_matrix(staged, target, interpreted=plan.interpreted)


def add_dk(worker: Worker, block: Block, ds: Any, columns: Any = slice(None)) -> None:
    """dK += dS^T Q where there is no dQ to add up: the end of a step, while dV's product is in flight."""
    tensor_cores, (_, _, buffers, barriers) = worker.plan.tensor_cores, worker.refs
    tensor_cores.start(worker.dk, ds, block.at(buffers.q, block.q_slot, slice(None), columns))
    tensor_cores.wait(1)
    plgpu.barrier_arrive(barriers.dout.consumed.at[block.dout_slot])
    tensor_cores.wait(0)
    plgpu.barrier_arrive(barriers.q.consumed.at[block.q_slot])
