"""The backward step where the compute warpgroups share the keys: for head dims up to 256.

dK and dV of 64 keys would fill the registers of one warpgroup, so each has half of their columns, and of dQ's. The
first makes P^T, the second dS^T of all 64 keys; both pass through shared memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.backward_weights import times
from pallas_flash.kernels.sm90 import backward_tile as tile_
from pallas_flash.kernels.sm90.backward_config import BLOCK
from pallas_flash.kernels.sm90.backward_plan import Block, Ref, Worker


def _own_columns(worker: Worker, columns: int) -> Any:
    own = worker.plan.config.sum_columns(columns)
    return pl.ds(worker.wg * own, own)


def step(worker: Worker, block: Block) -> None:
    """One block of queries."""
    plan, (_, _, buffers, barriers) = worker.plan, worker.refs
    tensor_cores, shapes = plan.tensor_cores, plan.shapes
    if worker.wg == 0:
        _make_weights(worker, block)
    else:
        _make_ds(worker, block)
    if not plan.sums_dq:
        tile_.add_dk(worker, block, block.at(buffers.ds, 0), _own_columns(worker, shapes.head_dim))
        return
    chunks = plan.config.dq_chunks(worker.wg, shapes.head_dim)

    def dq_products(accs: tuple[Ref, ...]) -> None:
        for (_, column, columns), acc in zip(chunks, accs, strict=True):
            own_k = block.at(buffers.k, 0, slice(None), pl.ds(column, columns))
            tensor_cores.start(acc, block.at(buffers.ds, 0).transpose((1, 0)), own_k)
        own_q = block.at(buffers.q, block.q_slot, slice(None), _own_columns(worker, shapes.head_dim))
        tensor_cores.start(worker.dk, block.at(buffers.ds, 0), own_q)
        for i, (chunk, acc) in enumerate(zip(chunks, accs, strict=True)):
            dq = tensor_cores.load(acc, pending=len(chunks) - i)
            if i == 0:
                plgpu.barrier_arrive(barriers.dout.consumed.at[block.dout_slot])
            tile_.add_dq(worker, block.q_base, block.head, chunk, dq)

    _accumulators(worker, dq_products, [(BLOCK, columns) for _, _, columns in chunks], ())
    tensor_cores.wait(0)
    plgpu.barrier_arrive(barriers.q.consumed.at[block.q_slot])


def _accumulators(worker: Worker, body: Any, shapes: list[tuple[int, int]], accs: tuple[Ref, ...]) -> Any:
    """Run `body` on accumulators of these shapes."""
    if len(accs) == len(shapes):
        return body(accs)
    more = lambda acc: _accumulators(worker, body, shapes, (*accs, acc))  # noqa: E731
    scratch = worker.accumulators.dq[len(accs)]
    return worker.plan.tensor_cores.accumulator(more, shapes[len(accs)], scratch)


def _make_weights(worker: Worker, block: Block) -> None:
    """The first warpgroup: P^T to shared memory, and dV."""
    plan, (_, _, buffers, barriers) = worker.plan, worker.refs
    tensor_cores, tile = plan.tensor_cores, tile_.tile_scores(worker, block)

    def product(s: Ref) -> jax.Array:
        tensor_cores.start(s, block.at(buffers.k, 0), block.at(buffers.q, block.q_slot).transpose((1, 0)))
        return tensor_cores.load(s, pending=0)

    plgpu.barrier_wait(barriers.q.produced.at[block.q_slot])
    scores = tensor_cores.accumulator(product, (BLOCK, BLOCK), worker.accumulators.scores)
    p, derivative = tile_.weights(worker, block, tile, scores)
    kept = lax.optimization_barrier(tile.kept(p).astype(plan.dtype))
    buffers.p[block.parity] = kept
    if buffers.slopes is not None:
        slopes = p if derivative is None else times(p, derivative)
        buffers.slopes[...] = slopes.astype(plan.slopes_dtype)
    tile_.meet(worker.refs)
    plgpu.barrier_wait(barriers.dout.produced.at[block.dout_slot])
    own_dout = block.at(buffers.dout, block.dout_slot, slice(None), _own_columns(worker, plan.shapes.value_head_dim))
    tensor_cores.start(worker.dv, kept, own_dout)
    tile_.meet(worker.refs)


def _make_ds(worker: Worker, block: Block) -> None:
    """The second warpgroup: dS^T to shared memory, and dV."""
    plan, (_, _, buffers, barriers) = worker.plan, worker.refs
    tensor_cores, tile = plan.tensor_cores, tile_.tile_scores(worker, block)
    dout = block.at(buffers.dout, block.dout_slot)

    def product(acc: Ref) -> jax.Array:
        tensor_cores.start(acc, block.at(buffers.v, 0), dout.transpose((1, 0)))
        return tensor_cores.load(acc, pending=0)

    plgpu.barrier_wait(barriers.dout.produced.at[block.dout_slot])
    dp = tensor_cores.accumulator(product, (BLOCK, BLOCK), worker.accumulators.dp)
    tile_.meet(worker.refs)
    own_dout = block.at(buffers.dout, block.dout_slot, slice(None), _own_columns(worker, plan.shapes.value_head_dim))
    tensor_cores.start(worker.dv, buffers.p.at[block.parity], own_dout)
    source = buffers.p.at[block.parity] if buffers.slopes is None else buffers.slopes
    p = plgpu.load(source, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    delta = tile_.load_columns(buffers.rows.delta.at[block.dout_slot])
    buffers.ds[0] = tile_.dlogits(worker, block, tile, p, dp, delta).astype(plan.dtype)
    plgpu.barrier_wait(barriers.q.produced.at[block.q_slot])
    tile_.meet(worker.refs)


def store_tile(worker: Worker, dk: jax.Array, dv: jax.Array) -> None:
    """dK and dV take the place of K and V in shared memory, once no warpgroup multiplies with these any more."""
    plan, (_, outputs, buffers, _), item = worker.plan, worker.refs, worker.work.item
    keys = pl.ds(item.ki * plan.config.block_kv, plan.config.block_kv)
    tile_.meet(worker.refs)
    buffers.v[0, :, _own_columns(worker, plan.shapes.value_head_dim)] = dv.astype(plan.dtype)
    buffers.k[0, :, _own_columns(worker, plan.shapes.head_dim)] = dk.astype(plan.dtype)
    tile_.meet(worker.refs)
    # A copy wants whole buffers: one warpgroup copies dK, the other dV.
    buffer, output = (buffers.k, outputs.dk) if worker.wg == 0 else (buffers.v, outputs.dv)
    plgpu.copy_smem_to_gmem(buffer.at[0], output.at[item.batch, keys, item.kv_head])
