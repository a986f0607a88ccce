"""FlashAttention forward for every GPU since Ampere: mma.sync and cp.async.

A warpgroup holds 64 or 128 queries and walks over the keys in blocks (FlashAttention-2, sections 3.1 to 3.3). Its four
warps have rows of their own: P goes from the registers of S into those of the second product. Blocks of keys and of
values are copied in turn while the other is multiplied. Two warpgroups on an SM overlap the softmax of one with
products of the other: those of two CTAs, or of one, which then have the same blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import junk, memory, schedule, softmax, tile_scores
from pallas_flash.kernels.schedule import WorkItem
from pallas_flash.kernels.sizes import ROW_UNIT, padded_head_dims
from pallas_flash.kernels.sm80 import plan as plan_
from pallas_flash.kernels.sm80.config import COLUMN_UNIT, ForwardConfig
from pallas_flash.kernels.sm80.instructions import Compiled, Interpreted
from pallas_flash.kernels.sm80.plan import Buffers, Inputs, Plan, Ref, State, Work, Worker
from pallas_flash.kernels.tile_scores import TileScores
from pallas_flash.kernels.tma import Rows, padded
from pallas_flash.spec import AttentionSpec, Forward, Operands, Residuals


def run(spec: AttentionSpec, operands: Operands, config: ForwardConfig, *, interpret: Any = None) -> Forward:
    """interpret: `plgpu.InterpretGPUParams` to run the kernel in Pallas' interpreter."""
    shapes = operands.shapes
    # Copies of 16 bytes; the interpreter wants whole tiles.
    rows, columns = ((1, 1), ROW_UNIT) if interpret is None else ((config.tile_q, config.block_kv), COLUMN_UNIT)
    q, k, v = (padded(x, n, columns) for x, n in zip(operands[:3], (*rows, rows[1]), strict=True))
    head_dim, value_head_dim = padded_head_dims(shapes, COLUMN_UNIT)
    held = shapes._replace(head_dim=head_dim, value_head_dim=value_head_dim)
    instructions = Compiled() if interpret is None else Interpreted()
    plan = Plan(spec, held, q.dtype, config, instructions, operands.bias is not None)
    work = jnp.asarray(schedule.work_items(spec, operands, config))
    sinks = None if operands.sinks is None else operands.sinks.astype(jnp.float32)
    scores = tile_scores.score_arrays(spec, operands)
    row_type = jax.ShapeDtypeStruct((shapes.batch, shapes.num_q_heads, q.shape[1]), jnp.float32)
    out_type = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=(Residuals(out_type, row_type, row_type),),
        scratch_types=(plan_.buffers(plan, interpreted=interpret is not None),),
        grid=(work.shape[0],),
        grid_names=("cta",),
        num_threads=config.warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="flash_attention_forward_sm80",
    )
    ((out, m, row_sum),) = kernel(Inputs(work, q, k, v, sinks, scores))
    queries = slice(shapes.q_len)
    m = m[..., queries]
    max_logit = None
    if spec.return_max_logit:  # of the keys, without the sink, which joins here
        max_logit = m.max(-1)
        m = m if sinks is None else jnp.maximum(m, sinks[:, None])
    out = out[:, queries, :, : shapes.value_head_dim]
    return Forward(Residuals(out, m, row_sum[..., queries]), max_logit)


def _kernel(plan: Plan, inputs: Inputs, outputs: Residuals, buffers: Buffers) -> None:
    wg = lax.axis_index("wg") if plan.config.warpgroups > 1 else 0
    buffers, work = buffers.of_warpgroup(wg), _work(plan, inputs, wg)
    worker = Worker(plan, inputs, outputs, buffers, work)
    if buffers.junk is not None:
        junk.forget(buffers.junk, 0, plan.instructions)
    rows = Rows(work.item.batch, work.q_base, work.item.head, plan.config.block_q)
    plan.instructions.load(inputs.q, rows, buffers.q)
    for stage in range(plan.config.num_stages - 1):
        _copy_keys(worker, jnp.int32(stage))
        _copy_values(worker, jnp.int32(stage))
    _copy_keys(worker, jnp.int32(plan.config.num_stages - 1))
    state = _attend(worker)
    sink = None if inputs.sinks is None else inputs.sinks[work.item.head]  # not before: it takes a register
    _store(worker, state.out, softmax.finish_as(plan.spec, _totals(plan, state), plan.units, sink))


def _work(plan: Plan, inputs: Inputs, wg: Any) -> Work:
    item = schedule.load_item(inputs.work, lax.axis_index("cta"), jnp.int32(0))
    item = WorkItem(*map(plan.instructions.uniform, item))
    return Work(
        item=item,
        q_base=item.qi * plan.config.tile_q + wg * plan.config.block_q,
        q_offset=inputs.scores.q_offset_of(plan.spec, item.batch),
        scores=inputs.scores.of(plan.spec, item.batch),
    )


# Copies: those of keys and of values take turns, each is a group, and those behind the last step are empty. So it is
# known statically how many were started after the one that is waited for.


def _copy_keys(worker: Worker, step: jax.Array) -> None:
    _copy(worker, worker.inputs.k, worker.buffers.k, step, by=0)


def _copy_values(worker: Worker, step: jax.Array) -> None:
    _copy(worker, worker.inputs.v, worker.buffers.v, step, by=1)


def _copy(worker: Worker, source: Ref, buffer: Ref, step: jax.Array, *, by: int) -> None:
    """by: the warpgroup that does so, of two. The other's group is empty."""
    plan, item = worker.plan, worker.work.item
    wanted = step < item.kv_end - item.kv_start
    if plan.config.warpgroups > 1:
        # Asked in each step: a register for it throughout the loop would be one too many at head size 128.
        wanted = jnp.logical_and(wanted, lax.axis_index("wg") == by)

    @pl.when(wanted)
    def _() -> None:
        block_kv = plan.config.block_kv
        kv_head = lax.div(item.head, jnp.int32(plan.shapes.q_heads_per_kv_head))
        rows = Rows(item.batch, schedule.selected_key_block(item, step) * block_kv, kv_head, block_kv)
        plan.instructions.load(source, rows, buffer.at[_slot(plan, step)])

    plan.instructions.commit_copies()


def _land(worker: Worker) -> None:
    """Wait for the oldest copy that has not been waited for; all warps have then read what was copied before."""
    instructions, meeting = worker.plan.instructions, worker.buffers.meeting
    instructions.wait_for_copies(2 * (worker.plan.config.num_stages - 1))
    instructions.commit() if meeting is None else meeting.hold()


def _slot(plan: Plan, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(plan.config.num_stages))


def _attend(worker: Worker) -> State:
    """Over the item's key blocks: the masked ones, then the unmasked ones."""
    plan, item = worker.plan, worker.work.item
    q = None
    if plan.config.q_in_registers:
        _land(worker)  # the queries came with the first keys
        q = plgpu.load(worker.buffers.q, layout=plgpu.Layout.WGMMA)
    step = functools.partial(_step, worker, q)
    state, first_unmasked, end = _initial_state(plan), jnp.int32(0), item.kv_end - item.kv_start
    if plan.some_masked:
        first_unmasked = schedule.first_unmasked(item)
        state = lax.fori_loop(0, first_unmasked, functools.partial(step, masked=True), state)
    return lax.fori_loop(first_unmasked, end, functools.partial(step, masked=False), state)


def _initial_state(plan: Plan) -> State:
    """No key so far: the first one's maximum then scales nothing by 0."""
    block_q, tile = plan.config.block_q, plgpu.Layout.WGMMA
    full = lambda shape, value, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)  # noqa: E731
    nothing = full((block_q,), softmax.NO_MAXIMUM, tile.reduce(1))
    out = full((block_q, plan.shapes.value_head_dim), 0.0, tile)
    return State(out, nothing, nothing, full((block_q,), 0.0, tile.reduce(1)))


def _step(worker: Worker, q: jax.Array | None, step: jax.Array, state: State, *, masked: bool) -> State:
    """S = Q K^T of a block of keys, its softmax, and O += P V."""
    plan, work, buffers, instructions = worker.plan, worker.work, worker.buffers, worker.plan.instructions
    slot, following = _slot(plan, step), step + (plan.config.num_stages - 1)
    _land(worker)
    _copy_values(worker, following)
    scores = instructions.product(buffers.q if q is None else q, buffers.k.at[slot], transposed=True)
    _land(worker)
    _copy_keys(worker, following + 1)
    index = schedule.tile_index(plan.config, work, schedule.selected_key_block(work.item, step), masked=masked)
    tile = TileScores(plan.spec, work.scores, index, instructions)
    if not plan.raw_scores:
        scores = tile.logits(scores)
    if masked:
        scores = tile.masked(scores, plan.kv_len_if_cut)
    p, state = _advance(plan, state, scores)
    weights = tile.kept(p).astype(plan.dtype)
    if plan.hides_values(masked=masked):
        columns = memory.tile_columns(buffers.v.shape, plan.dtype)
        junk.clean(buffers.v.at[slot], columns, buffers.junk, slot, instructions)
    out = instructions.product(weights, buffers.v.at[slot], state.out)
    if plan.hides_values(masked=masked):
        junk.note_readers(lambda: tile, buffers.junk, slot, 0)
    return state._replace(out=out)


def _advance(plan: Plan, state: State, scores: jax.Array) -> tuple[jax.Array, State]:
    """exp(logits - shift), unnormalised, and the state with them; O is that so far, under the new shift.

    Threads that share a row ask each other for its maximum only where some maximum is too far ahead of the shift."""
    instructions, units = plan.instructions, plan.units
    out, m, shift, sums = state
    m = jnp.maximum(m, units.of_scores(instructions.thread_maxima(scores)))
    rescale = instructions.any(units.log2(m - shift) > plan.config.rescale_threshold)
    new_shift = lax.cond(rescale, lambda: instructions.row_maxima(m), lambda: shift)
    out, sums = softmax.rescaled(rescale, units.log2(shift - new_shift), out, sums)
    p = softmax.probabilities(scores, new_shift, units)
    return p, State(out, m, new_shift, sums + instructions.thread_sums(p))


def _totals(plan: Plan, state: State) -> softmax.RowTotals:
    instructions = plan.instructions
    return softmax.RowTotals(instructions.row_maxima(state.m), state.shift, instructions.row_sums(state.l))


def _store(worker: Worker, out: jax.Array, stats: softmax.FinalStatistics) -> None:
    plan, _, outputs, buffers, work = worker
    item, instructions = work.item, plan.instructions
    normalizer = stats.normalizer
    if buffers.junk is not None:
        normalizer += junk.of_readers(buffers.junk, 0)
    instructions.wait_for_copies(0)  # queries that read no key have not been waited for
    instructions.commit()  # queries, keys and values have been read
    staged = _out_buffer(plan, buffers)
    staged[...] = (out * softmax.rows_like(normalizer, out)).astype(plan.dtype)
    instructions.commit()
    instructions.store(staged, outputs.out, Rows(item.batch, work.q_base, item.head, plan.config.block_q))
    for target, value in ((outputs.m, stats.m), (outputs.l, stats.l)):
        instructions.store_rows(target.at[item.batch, item.head], work.q_base, value)


def _out_buffer(plan: Plan, buffers: Buffers) -> Ref:
    if buffers.out is not None:
        return buffers.out
    if plan.shapes.head_dim == plan.shapes.value_head_dim:
        return buffers.q
    return buffers.v.at[0, pl.ds(0, plan.config.block_q)]
