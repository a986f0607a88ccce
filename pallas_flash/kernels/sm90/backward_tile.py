"""What the compute warpgroups of the Hopper backward kernel do with one tile, however they share the work.

Tiles have keys as rows: what belongs to a query is one value a column.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import memory
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.backward_weights import Weights, weights_of
from pallas_flash.kernels.backward_weights import dlogits as dlogits_of
from pallas_flash.kernels.sm90.backward_config import BLOCK
from pallas_flash.kernels.sm90.backward_plan import Block, Ref, Refs, Worker
from pallas_flash.kernels.tile_mask import TileIndex
from pallas_flash.kernels.tile_scores import TileScores


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


def weights(worker: Worker, block: Block, tile: TileScores, scores: jax.Array) -> Weights:
    """From K Q^T."""
    plan, rows = worker.plan, worker.refs.buffers.rows
    spread = lambda ref: columns_like(load_columns(ref.at[block.q_slot]), scores)  # noqa: E731
    m = None if rows.m is None else spread(rows.m)
    return weights_of(plan, tile, scores, Rows(spread(rows.lse_log2), None, m), masked=block.masked)


def dlogits(worker: Worker, block: Block, tile: TileScores, p: jax.Array, dp: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of the logits, if p is P; of scale * q.k, if p is P times the derivative of the logits by it."""
    ds = dlogits_of(worker.plan, tile, p, dp, columns_like(delta, p), masked=block.masked)
    tile.add_bias_gradient(worker.refs.inputs.dbias, ds)
    return ds


def add_dq(
    worker: Worker, q_base: Any, head: Any, chunk: tuple[int, int, int], dq: jax.Array, unless: Any = None
) -> None:
    """Add one of this warpgroup's parts of a block of dQ to the sum in device memory, but `unless` it is none."""
    plan, refs, wg, work, *_ = worker
    row, column, columns = chunk
    item = work.item
    batch = item.batch if plan.dq_slices == 1 else item.batch + item.ki * plan.shapes.batch
    staged = refs.buffers.dq.at[wg]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last part's
    staged[...] = dq
    plgpu.commit_smem()

    target = refs.inputs.dq.at[batch, pl.ds(q_base + row, BLOCK), head, pl.ds(column, columns)]
    predicate = None if unless is None else jnp.logical_not(unless)
    memory.add_matrix(staged, target, predicate, interpreted=plan.interpreted)


def add_dk(worker: Worker, block: Block, ds: Any, columns: Any = slice(None)) -> None:
    """dK += dS^T Q where there is no dQ to add up: the end of a step, while dV's product is in flight."""
    tensor_cores, (_, _, buffers, barriers) = worker.plan.tensor_cores, worker.refs
    tensor_cores.start(worker.dk, ds, block.at(buffers.q, block.q_slot, slice(None), columns))
    tensor_cores.wait(1)
    plgpu.barrier_arrive(barriers.dout.consumed.at[block.dout_slot])
    tensor_cores.wait(0)
    plgpu.barrier_arrive(barriers.q.consumed.at[block.q_slot])
