"""All gradients by CTAs of two warpgroups that share their keys: for head dims whose sums fill the registers of one.

Each makes S^T and dP^T for half of a block's queries, and half the columns of dV += P^T dO, dK += dS^T Q and of what
dS K adds to dQ. Its own P^T and dS^T are left operands as they are, in registers; those of the other one come through
shared memory. So each warp has 32 keys, and a fragment of Q or dO that it reads is multiplied twice.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import backward_schedule as schedule
from pallas_flash.kernels import memory
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.backward_schedule import WorkItem
from pallas_flash.kernels.backward_weights import dlogits, times, weights_of
from pallas_flash.kernels.barriers import Meeting, NamedMeeting
from pallas_flash.kernels.sm80 import backward_plan
from pallas_flash.kernels.sm80.backward_plan import Block, Inputs, KeysPlan, Ref, Sums, Work
from pallas_flash.kernels.tile_scores import TileScores
from pallas_flash.kernels.tma import Rows as CopiedRows

WGS = 2


class Buffers(NamedTuple):
    """Halves are of columns, and parts of queries: one for each warpgroup."""

    k: Ref  # [halves, block_kv, H / 2]; at the end dK
    v: Ref  # [halves, block_kv, Hv / 2]; at the end dV
    q: Ref  # [stages, parts, halves, block_q / 2, H / 2]
    dout: Ref  # [stages, parts, halves, block_q / 2, Hv / 2]
    rows: Rows  # [stages, parts, block_q / 2]
    p: Ref  # P^T of a block: [parts, block_kv, block_q / 2]
    ds: Ref  # likewise
    meeting: Meeting | NamedMeeting


class Worker(NamedTuple):
    plan: KeysPlan
    inputs: Inputs
    buffers: Buffers
    work: Work
    wg: jax.Array


def buffers(plan: KeysPlan, *, interpreted: bool) -> Buffers:
    config, matrix = plan.config, functools.partial(memory.matrix, dtype=plan.dtype)
    keys, queries = (WGS, config.block_kv), (config.num_stages, WGS, WGS, config.columns)
    halves = plan.shapes.head_dim // WGS, plan.shapes.value_head_dim // WGS
    k, v, q, dout = (matrix((*n, dim)) for n in (keys, queries) for dim in halves)
    rows, tile = memory.rows((config.num_stages, WGS, config.columns)), matrix((*keys, config.columns))
    meeting = Meeting(plgpu.Barrier(num_arrivals=WGS)) if interpreted else NamedMeeting(WGS, fenced=False)
    return Buffers(k, v, q, dout, Rows(rows, rows, rows if plan.any_logits else None), tile, tile, meeting)


def kernel(plan: KeysPlan, inputs: Inputs, targets: Sums, buffers: Buffers) -> None:
    instructions, wg = plan.instructions, lax.axis_index("wg")
    item = schedule.load_item(inputs.work, lax.axis_index("cta"), 0)
    item = WorkItem(*map(instructions.uniform, item))
    keys = CopiedRows(item.batch, item.ki * plan.config.block_kv, item.kv_head, plan.config.block_kv)
    for source, buffer in ((inputs.k, buffers.k), (inputs.v, buffers.v)):
        instructions.load(_half(source, wg), keys, buffer.at[wg])
    worker = Worker(plan, inputs, buffers, backward_plan.work_of(plan, inputs, item), wg)
    sums = Sums(*(backward_plan.zeros(plan, buffer.shape[-1]) for buffer in (buffers.k, buffers.v)))
    steps = backward_plan.Steps(
        functools.partial(_copy, worker), functools.partial(_step, worker), buffers.meeting.hold
    )
    scaled = backward_plan.scaled(plan, worker.work, backward_plan.walk(plan, item, steps, sums))
    instructions.wait_for_copies(0)  # keys that no query reads have not been waited for
    buffers.meeting.hold()  # keys and values have been read
    for buffer, value in zip((buffers.k, buffers.v), scaled, strict=True):
        instructions.keep(value.astype(plan.dtype), buffer.at[wg])
    instructions.commit()
    for buffer, target in zip((buffers.k, buffers.v), targets, strict=True):
        instructions.store(buffer.at[wg], _half(target, wg), keys)


def _half(array: Ref, wg: jax.Array) -> Ref:
    """A warpgroup's columns of an array in device memory."""
    columns = array.shape[-1] // WGS
    return array.at[:, :, :, pl.ds(wg * columns, columns)]


def _copy(worker: Worker, head: jax.Array, step: jax.Array) -> None:
    plan, inputs, buffers, work, wg = worker
    item, instructions, columns = work.item, plan.instructions, plan.config.columns

    @pl.when(step < item.q_end - item.q_start)
    def _() -> None:
        slot = lax.rem(step, jnp.int32(plan.config.num_stages))
        start = schedule.query_block(item, step) * plan.config.block_q
        for part in range(WGS):
            rows = CopiedRows(item.batch, start + part * columns, head, columns)
            for source, buffer in ((inputs.q, buffers.q), (inputs.dout, buffers.dout)):
                instructions.load(_half(source, wg), rows, buffer.at[slot, part, wg])
        for source, buffer in zip(inputs.rows, buffers.rows, strict=True):
            if source is not None:
                instructions.load_rows(source.at[item.batch, head], start + wg * columns, buffer.at[slot, wg])

    instructions.commit_copies()


def _step(worker: Worker, block: Block, sums: Sums) -> Sums:
    copy = functools.partial(_copy, worker, block.head)
    body = lambda: _add(worker, block, sums)  # noqa: E731
    return backward_plan.with_next(worker.plan, copy, block.step, body, worker.buffers.meeting.hold)


def _add(worker: Worker, block: Block, sums: Sums) -> Sums:
    """dK and dV with the part of one block of queries, without the scale and the dropout's factor; dQ is added to."""
    plan, inputs, buffers, work, wg = worker
    product, slot = plan.instructions.product, lax.rem(block.step, jnp.int32(plan.config.num_stages))
    columns_of = lambda buffer, part: buffer.at[slot, part, wg]  # noqa: E731
    sums = _add_own(worker, block, slot, sums)
    buffers.meeting.hold()
    other = 1 - wg
    dv = product(buffers.p.at[other], columns_of(buffers.dout, other), sums.dv)
    dk = product(buffers.ds.at[other], columns_of(buffers.q, other), sums.dk)
    dq = plan.instructions.product_by_columns(buffers.ds, buffers.k.at[wg])
    backward_plan.add_dq(plan, inputs, work, block, dq, wg * dq.shape[1])
    return Sums(dk, dv)


def _add_own(worker: Worker, block: Block, slot: jax.Array, sums: Sums) -> Sums:
    """Of the queries that are this warpgroup's; the other one gets to see their P and dS."""
    plan, _, buffers, work, wg = worker
    instructions = plan.instructions
    here = lambda ref: ref.at[slot, wg]  # noqa: E731
    scores = _over_halves(plan, buffers.k, here(buffers.q))
    of_columns = lambda ref: backward_plan.spread(here(ref), scores)  # noqa: E731
    m = None if buffers.rows.m is None else of_columns(buffers.rows.m)
    tile = TileScores(plan.spec, work.scores, backward_plan.tile_index(plan, work, block, wg), instructions)
    rows = Rows(of_columns(buffers.rows.lse_log2), None, m)
    p, derivative = weights_of(plan, tile, scores, rows, masked=block.masked)
    weights = tile.kept(p).astype(plan.dtype)
    instructions.keep(weights, buffers.p.at[wg])
    dv = instructions.product(weights, here(buffers.dout).at[wg], sums.dv)
    dp = _over_halves(plan, buffers.v, here(buffers.dout))
    ds = dlogits(plan, tile, p, dp, of_columns(buffers.rows.delta), masked=block.masked)
    ds = (ds if derivative is None else times(ds, derivative)).astype(plan.dtype)
    instructions.keep(ds, buffers.ds.at[wg])
    return Sums(instructions.product(ds, here(buffers.q).at[wg], sums.dk), dv)


def _over_halves(plan: KeysPlan, keys: Ref, queries: Ref) -> Any:
    """keys @ queries.T, of matrices whose columns stand in halves."""
    total = None
    for half in range(WGS):
        total = plan.instructions.product(keys.at[half], queries.at[half], total, transposed=True)
    return total
