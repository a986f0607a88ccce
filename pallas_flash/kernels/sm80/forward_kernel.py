"""FlashAttention forward for every GPU since Ampere: mma.sync and cp.async.

A warpgroup, which is a CTA unless the configuration says otherwise, holds 64 or 128 queries and walks over the keys in
blocks (FlashAttention-2, sections 3.1 to 3.3). Its four warps have rows of their own: P goes from the registers of S
into those of the second product. Blocks of keys and of values are copied in turn while the other is multiplied; two
CTAs on an SM overlap the softmax of one with products of the other.
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
        grid=(-(-work.shape[0] // config.items),),
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
    """Each warpgroup for itself, but for keys that they share."""
    config, index, wg = plan.config, lax.axis_index("cta"), jnp.int32(0)
    if config.warpgroups > 1:
        wg = lax.axis_index("wg")
        buffers = buffers.of_warpgroup(wg)
    if config.items > 1:
        index = index * config.items + wg
    work_on = lambda: _work_on(Worker(plan, inputs, outputs, buffers, _work(plan, inputs, index, wg)))  # noqa: E731
    work_on() if config.items == 1 else pl.when(index < inputs.work.shape[0])(work_on)


def _work_on(worker: Worker) -> None:
    plan, inputs, _, buffers, work = worker
    instructions = plan.instructions
    if buffers.junk is not None:
        junk.forget(buffers.junk, 0, instructions)
    instructions.load(inputs.q, Rows(work.item.batch, work.q_base, work.item.head, plan.config.block_q), buffers.q)
    for stage in range(plan.config.num_stages - 1):
        _copy_keys(worker, jnp.int32(stage))
        _copy_values(worker, jnp.int32(stage))
    if not plan.config.one_meeting:
        _copy_keys(worker, jnp.int32(plan.config.num_stages - 1))
    state = _attend(worker)
    _store(worker, state.out, softmax.finish_as(plan.spec, _totals(plan, state), plan.units, work.sink))


def _work(plan: Plan, inputs: Inputs, index: jax.Array, wg: jax.Array) -> Work:
    item = schedule.load_item(inputs.work, index, jnp.int32(0))
    item = WorkItem(*map(plan.instructions.uniform, item))
    q_base = item.qi * plan.config.tile_q
    if plan.config.shares_keys:
        q_base += wg * plan.config.block_q
    return Work(
        item=item,
        q_base=q_base,
        sink=None if inputs.sinks is None else inputs.sinks[item.head],
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
    """by: the warpgroup that does so, if several share keys. The groups of the others are empty."""
    plan, item = worker.plan, worker.work.item
    wanted = step < item.kv_end - item.kv_start
    if plan.config.shares_keys:
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
    """Wait for the oldest copy that has not been waited for, with one meeting a block for the oldest two; all warps
    have then read what was copied before."""
    config, instructions, meeting = worker.plan.config, worker.plan.instructions, worker.buffers.meeting
    instructions.wait_for_copies(2 * (config.num_stages - (2 if config.one_meeting else 1)))
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
    if plan.config.loop != "pipelined":
        return lax.fori_loop(first_unmasked, end, functools.partial(step, masked=False), state)
    pipelined = lambda: _attend_pipelined(worker, q, first_unmasked, end, state)  # noqa: E731
    return lax.cond(first_unmasked < end, pipelined, lambda: state) if plan.some_masked else pipelined()


def _initial_state(plan: Plan) -> State:
    """No key so far: the first one's maximum then scales nothing by 0."""
    block_q, tile = plan.config.block_q, plgpu.Layout.WGMMA
    full = lambda shape, value, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)  # noqa: E731
    nothing = full((block_q,), softmax.NO_MAXIMUM, tile.reduce(1))
    out = full((block_q, plan.shapes.value_head_dim), 0.0, tile)
    return State(out, nothing, nothing, full((block_q,), 0.0, tile.reduce(1)))


def _step(worker: Worker, q: jax.Array | None, step: jax.Array, state: State, *, masked: bool) -> State:
    """S = Q K^T of a block of keys, its softmax, and O += P V."""
    plan = worker.plan
    one_meeting, following = plan.config.one_meeting, step + (plan.config.num_stages - 1)
    _land(worker)
    if one_meeting:
        _copy_keys(worker, following)
    _copy_values(worker, following)
    scores = _products(worker, q, step)
    if not one_meeting:
        _land(worker)
        _copy_keys(worker, following + 1)
    scores = _logits(worker, step, scores, masked=masked)
    state = _with_room(plan, _aware_of(plan, state, scores))
    p, state = _exponentials(plan, scores, state)
    return _with_values(worker, step, p, state, masked=masked)


def _attend_pipelined(worker: Worker, q: jax.Array | None, first: jax.Array, end: jax.Array, state: State) -> State:
    """Over the blocks [first, end), none of them masked and one at least: a block's scores are there before its step,
    so that in each basic block exponentials, which wait for nothing but these, stand beside products."""
    plan = worker.plan
    following = plan.config.num_stages - 1

    def land(step: jax.Array) -> None:
        """A step's values, and the keys after it."""
        _land(worker)
        _copy_values(worker, step + following)
        _copy_keys(worker, step + following + 1)

    def body(step: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state, scores = carry
        land(step)
        state = _with_room(plan, state)
        ahead = _products(worker, q, step + 1)
        p, state = _exponentials(plan, scores, state)
        ahead = _logits(worker, step + 1, ahead, masked=False)
        state = _aware_of(plan, state, ahead)
        return _with_values(worker, step, p, state, masked=False), ahead

    _land(worker)
    _copy_keys(worker, first + following)
    scores = _logits(worker, first, _products(worker, q, first), masked=False)
    state, scores = lax.fori_loop(first, end - 1, body, (_aware_of(plan, state, scores), scores))
    land(end - 1)
    p, state = _exponentials(plan, scores, _with_room(plan, state))
    return _with_values(worker, end - 1, p, state, masked=False)


def _products(worker: Worker, q: jax.Array | None, step: jax.Array) -> jax.Array:
    """Q K^T."""
    plan, _, _, buffers, _ = worker
    keys = buffers.k.at[_slot(plan, step)]
    return plan.instructions.product(buffers.q if q is None else q, keys, transposed=True)


def _tile(worker: Worker, step: jax.Array, *, masked: bool) -> TileScores:
    plan, work = worker.plan, worker.work
    index = schedule.tile_index(plan.config, work, schedule.selected_key_block(work.item, step), masked=masked)
    return TileScores(plan.spec, work.scores, index, plan.instructions)


def _logits(worker: Worker, step: jax.Array, scores: jax.Array, *, masked: bool) -> jax.Array:
    """Of Q K^T, or that itself, if its softmax is taken with the scale."""
    plan, tile = worker.plan, _tile(worker, step, masked=masked)
    if not plan.raw_scores:
        scores = tile.logits(scores)
    return tile.masked(scores, plan.kv_len_if_cut) if masked else scores


def _aware_of(plan: Plan, state: State, scores: jax.Array) -> State:
    """With the maxima of these scores, too."""
    if plan.config.thread_statistics:
        found = plan.units.of_scores(plan.instructions.thread_maxima(scores))
    else:
        found = softmax.maxima(scores, plan.units).max(axis=1)
    return state._replace(m=jnp.maximum(state.m, found))


def _with_room(plan: Plan, state: State) -> State:
    """With another shift, if the maxima are too far ahead of it for exponentials."""
    instructions, units = plan.instructions, plan.units
    out, m, shift, sums = state
    rescale = instructions.any(units.log2(m - shift) > plan.config.rescale_threshold)
    maxima = (lambda: instructions.row_maxima(m)) if plan.config.thread_statistics else (lambda: m)
    new_shift = lax.cond(rescale, maxima, lambda: shift)
    out, sums = softmax.rescaled(rescale, units.log2(shift - new_shift), out, sums)
    return State(out, m, new_shift, sums)


def _exponentials(plan: Plan, scores: jax.Array, state: State) -> tuple[jax.Array, State]:
    """And the state with their sums."""
    p = softmax.probabilities(scores, state.shift, plan.units)
    own = plan.config.thread_statistics
    sums = plan.instructions.thread_sums(p) if own else softmax.fold(jnp.add, p).sum(axis=1)
    return p, state._replace(l=state.l + sums)


def _with_values(worker: Worker, step: jax.Array, p: jax.Array, state: State, *, masked: bool) -> State:
    """O += P V."""
    plan, buffers, instructions = worker.plan, worker.buffers, worker.plan.instructions
    slot, tile = _slot(plan, step), _tile(worker, step, masked=masked)
    weights = tile.kept(p).astype(plan.dtype)
    if plan.hides_values(masked=masked):
        columns = memory.tile_columns(buffers.v.shape, plan.dtype)
        junk.clean(buffers.v.at[slot], columns, buffers.junk, slot, instructions)
    out = instructions.product(weights, buffers.v.at[slot], state.out)
    if plan.hides_values(masked=masked):
        junk.note_readers(lambda: tile, buffers.junk, slot, 0)
    return state._replace(out=out)


def _totals(plan: Plan, state: State) -> softmax.RowTotals:
    if not plan.config.thread_statistics:
        return softmax.RowTotals(state.m, state.shift, state.l)
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
