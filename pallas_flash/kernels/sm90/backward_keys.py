"""The backward step where each compute warpgroup has keys of its own, and dK and dV of those keys in registers.

S^T = K Q^T and dP^T = V dO^T come out as the P^T and dS^T in registers that dV += P^T dO and dK += dS^T Q want. Only
dS^T passes through shared memory: dQ = dS K sums over the keys of both warpgroups, each of which makes half of it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.backward_weights import times
from pallas_flash.kernels.sm90 import backward_tile as tile_
from pallas_flash.kernels.sm90.backward_config import BLOCK
from pallas_flash.kernels.sm90.backward_plan import Block, Ref, Worker


def _own_keys(wg: int) -> Any:
    return pl.ds(wg * BLOCK, BLOCK)


def step(worker: Worker, block: Block) -> None:
    """One block of queries."""
    plan, refs, wg = worker.plan, worker.refs, worker.wg
    tensor_cores, (_, _, buffers, barriers) = plan.tensor_cores, refs
    p, ds = _weights(worker, block)
    if plan.late_dq:
        _late_products(worker, block, p, ds)
        return
    tensor_cores.start(worker.dv, p, block.at(buffers.dout, block.dout_slot))
    if not plan.sums_dq:
        tile_.add_dk(worker, block, ds)
        return
    block.at(buffers.ds, block.parity, _own_keys(wg))[...] = ds
    tile_.meet(refs)
    (chunk,) = plan.config.dq_chunks(wg, plan.shapes.head_dim)

    def dq_product(acc: Ref) -> jax.Array:
        _start_dq(worker, acc, block, block.parity)
        tensor_cores.start(worker.dk, ds, block.at(buffers.q, block.q_slot))
        return tensor_cores.load(acc, pending=1)

    dq = tensor_cores.accumulator(dq_product, (BLOCK, chunk[2]), worker.accumulators.dq[0])
    plgpu.barrier_arrive(barriers.dout.consumed.at[block.dout_slot])
    tile_.add_dq(worker, block.q_base, block.head, chunk, dq)
    tensor_cores.wait(0)
    plgpu.barrier_arrive(barriers.q.consumed.at[block.q_slot])


def _late_products(worker: Worker, block: Block, p: jax.Array, ds: jax.Array) -> None:
    """dV and dK of this block, dQ of the one before: its dS has long come from both warpgroups."""
    plan, (_, _, buffers, barriers), wg = worker.plan, worker.refs, worker.wg
    tensor_cores = plan.tensor_cores
    (chunk,) = plan.config.dq_chunks(wg, plan.shapes.head_dim)
    barriers.ds.wait()
    # What stood there both read for the last time before they showed their dS of the step before. It is stored before
    # the turn, as the compiler would else leave the arithmetic for afterwards.
    block.at(buffers.ds, block.parity, _own_keys(wg))[...] = ds
    barriers.turns.wait(wg)

    def products(acc: Ref) -> jax.Array:
        _start_dq(worker, acc, block, 1 - block.parity)
        tensor_cores.start(worker.dv, p, block.at(buffers.dout, block.dout_slot))
        tensor_cores.start(worker.dk, ds, block.at(buffers.q, block.q_slot))
        return tensor_cores.load(acc, pending=2)

    dq = tensor_cores.accumulator(products, (BLOCK, chunk[2]), worker.accumulators.dq[0])
    barriers.ds.show(tensor_cores.publish)
    tile_.add_dq(worker, block.before, block.head, chunk, dq, block.first)
    tensor_cores.wait(1)
    plgpu.barrier_arrive(barriers.dout.consumed.at[block.dout_slot])
    tensor_cores.wait(0)
    plgpu.barrier_arrive(barriers.q.consumed.at[block.q_slot])


def before_first(worker: Worker) -> None:
    """Whatever stands where the first step looks for dS of the step before, both may read it."""
    barriers = worker.refs.barriers
    barriers.ds.show(worker.plan.tensor_cores.publish)
    barriers.turns.wait(worker.wg)


def last_dq(worker: Worker, last: Block) -> None:
    """What `_late_products` leaves after the last block; last.first: there was none."""
    tensor_cores, barriers = worker.plan.tensor_cores, worker.refs.barriers
    (chunk,) = worker.plan.config.dq_chunks(worker.wg, worker.plan.shapes.head_dim)
    barriers.turns.pass_on(worker.wg)
    barriers.ds.wait()

    def product(acc: Ref) -> jax.Array:
        _start_dq(worker, acc, last, last.parity)
        return tensor_cores.load(acc, pending=0)

    dq = tensor_cores.accumulator(product, (BLOCK, chunk[2]), worker.accumulators.dq[0])
    tile_.add_dq(worker, last.q_base, last.head, chunk, dq, last.first)


def _start_dq(worker: Worker, acc: Ref, block: Block, parity: Any) -> None:
    plan, buffers = worker.plan, worker.refs.buffers
    ((row, column, columns),) = plan.config.dq_chunks(worker.wg, plan.shapes.head_dim)
    ds = block.at(buffers.ds, parity, slice(None), pl.ds(row, BLOCK)).transpose((1, 0))
    plan.tensor_cores.start(acc, ds, block.at(buffers.k, 0, slice(None), pl.ds(column, columns)))


def _weights(worker: Worker, block: Block) -> tuple[jax.Array, jax.Array]:
    """P^T as dropout leaves it and dS^T, 16-bit. dS is the gradient of scale * q.k: the scale comes at the end."""
    plan, (_, _, buffers, barriers), own = worker.plan, worker.refs, _own_keys(worker.wg)
    tensor_cores, shape = plan.tensor_cores, (BLOCK, plan.config.block_q)
    tile = tile_.tile_scores(worker, block)

    def with_scores(s: Ref) -> Any:
        tensor_cores.start(s, block.at(buffers.k, 0, own), block.at(buffers.q, block.q_slot).transpose((1, 0)))
        plgpu.barrier_wait(barriers.dout.produced.at[block.dout_slot])
        return tensor_cores.accumulator(functools.partial(with_dp, s), shape, worker.accumulators.dp)

    def with_dp(s: Ref, dp: Ref) -> Any:
        dout = block.at(buffers.dout, block.dout_slot)
        tensor_cores.start(dp, block.at(buffers.v, 0, own), dout.transpose((1, 0)))
        barriers.turns.pass_on(worker.wg)
        p, derivative = tile_.weights(worker, block, tile, tensor_cores.load(s, pending=1))
        # Only now, as registers are short.
        p, delta_slot = lax.optimization_barrier((p, block.dout_slot))
        delta = tile_.load_columns(block.at(buffers.rows.delta, delta_slot))
        ds = tile_.dlogits(worker, block, tile, p, tensor_cores.load(dp, pending=0), delta)
        if derivative is not None:
            ds = times(ds, derivative)
        return lax.optimization_barrier((tile.kept(p).astype(plan.dtype), ds.astype(plan.dtype)))

    # Waits come before an accumulator's scope: where the product follows at once, its zeros need no instructions.
    plgpu.barrier_wait(barriers.q.produced.at[block.q_slot])
    return tensor_cores.accumulator(with_scores, shape, worker.accumulators.scores)


def store_tile(worker: Worker, dk: jax.Array, dv: jax.Array) -> None:
    """From buffers of their own; else dK and dV take the place of K and V in shared memory, or of dS, once no
    warpgroup multiplies with K or dS any more."""
    plan, (_, outputs, buffers, _), item = worker.plan, worker.refs, worker.work.item
    config, own = plan.config, _own_keys(worker.wg)
    keys = pl.ds(item.ki * config.block_kv + worker.wg * BLOCK, BLOCK)
    if config.own_outputs:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if config.dk_in_ds or not config.own_outputs:
        tile_.meet(worker.refs)
    dv_smem = (buffers.dv if config.own_outputs else buffers.v).at[0, own]
    if config.dk_in_ds:
        dk_smem, columns = [buffers.ds.at[part, own] for part in range(2)], config.block_q
    else:
        dk_smem, columns = [(buffers.dk if config.own_outputs else buffers.k).at[0, own]], plan.shapes.head_dim
    dv_smem[...] = dv.astype(plan.dtype)
    dk = dk.astype(plan.dtype)
    for part, smem in enumerate(dk_smem):
        smem[...] = dk[:, part * columns : (part + 1) * columns]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(dv_smem, outputs.dv.at[item.batch, keys, item.kv_head])
    for part, smem in enumerate(dk_smem):
        target = outputs.dk.at[item.batch, keys, item.kv_head, pl.ds(part * columns, columns)]
        plgpu.copy_smem_to_gmem(smem, target)
