"""FlashAttention forward for Hopper: warp-specialised, persistent, softmax overlapped with the tensor cores.

A CTA is one warpgroup that copies (TMA) and `compute_wgs` that compute. Each of these holds 64 queries and walks over
the keys in blocks (FlashAttention-2's order). Beside S(j) = Q K(j)^T runs O += P(j-1) V(j-1), both issued back to back;
the softmax of S(j) overlaps with the rest of the second (FlashAttention-3, section 3.2) and with the products of the
other warpgroups, which take turns (section 3.1).

ptxas serialises wgmma where its operands could move while it runs. Hence: P becomes 16-bit only when nothing is in
flight, nothing is in flight across the end of a loop's body, and an accumulator's scope opens just before its product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import barriers as bar
from pallas_flash.kernels import junk, matmul, memory, schedule, softmax, tile_scores, tma
from pallas_flash.kernels.schedule import WorkItem
from pallas_flash.kernels.sizes import COLUMNS, ROW_UNIT, ROWS, padded_head_dims, round_up
from pallas_flash.kernels.sm90 import forward_copies
from pallas_flash.kernels.sm90 import plan as plan_
from pallas_flash.kernels.sm90.config import ForwardConfig
from pallas_flash.kernels.sm90.plan import Barriers, Buffers, Inputs, Plan, Ref, State, Work, Worker
from pallas_flash.kernels.tile_scores import TileScores
from pallas_flash.spec import AttentionSpec, Forward, Operands, Residuals


def run(spec: AttentionSpec, operands: Operands, config: ForwardConfig, *, interpret: Any = None) -> Forward:
    """interpret: `plgpu.InterpretGPUParams` to run the kernel in Pallas' interpreter."""
    shapes = operands.shapes
    # TMA wants rows of 16 bytes; the interpreter knows nothing of how it clips.
    units = (1, ROW_UNIT) if interpret is None else (ROWS, COLUMNS)
    q, k, v = (tma.padded(x, *units) for x in (operands.q, operands.k, operands.v))
    tensor_cores = matmul.Wgmma() if interpret is None else matmul.Interpreted()
    head_dim, value_head_dim = padded_head_dims(shapes)
    held = shapes._replace(q_len=round_up(shapes.q_len, ROWS), head_dim=head_dim, value_head_dim=value_head_dim)
    plan = Plan(spec, held, q.dtype, config, tensor_cores, operands.bias is not None)
    work = jnp.asarray(schedule.work_items(spec, operands, config))
    sinks = None if operands.sinks is None else operands.sinks.astype(jnp.float32)
    scores = tile_scores.score_arrays(spec, operands)
    inputs = Inputs(work, q, k, v, sinks, scores)
    row_type = jax.ShapeDtypeStruct((held.batch, held.num_q_heads, held.q_len), jnp.float32)
    out_type = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=(Residuals(out_type, row_type, row_type),),
        scratch_types=(plan_.buffers(plan), plan_.barriers(plan)),
        grid=(work.shape[0],),
        grid_names=("cta",),
        num_threads=config.compute_wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="flash_attention_forward_sm90",
    )
    ((out, m, row_sum),) = kernel(inputs)
    rows = slice(shapes.q_len)
    m = m[..., rows]
    max_logit = None
    if spec.return_max_logit:  # of the keys, without the sink, which joins here
        max_logit = m.max(-1)
        m = m if sinks is None else jnp.maximum(m, sinks[:, None])
    return Forward(Residuals(out[:, rows, :, : shapes.value_head_dim], m, row_sum[..., rows]), max_logit)


def _kernel(plan: Plan, inputs: Inputs, outputs: Residuals, buffers: Buffers, barriers: Barriers) -> None:
    config = plan.config
    wg = lax.axis_index("wg")

    def compute(wg: Any) -> None:
        plgpu.set_max_registers(config.compute_registers, action="increase")
        one_pass = lambda plan: _compute_warpgroup(plan, inputs, outputs, buffers, barriers, wg)  # noqa: E731
        if buffers.junk is not None:
            junk.trust(buffers.junk, wg, plan.tensor_cores)
        one_pass(plan)
        if barriers.inspected is not None:
            plgpu.barrier_arrive(barriers.inspected)
        _once_more_if_suspected(plan, buffers, barriers, one_pass)

    if config.own_bodies:
        for index in range(config.compute_wgs):
            pl.when(wg == index)(functools.partial(compute, jnp.int32(index)))
    else:
        pl.when(wg < config.compute_wgs)(lambda: compute(wg))

    @pl.when(wg == config.compute_wgs)
    def _copy() -> None:
        plgpu.set_max_registers(config.copy_registers, action="decrease")
        copy = lambda plan: forward_copies.copy_warpgroup(plan, inputs, buffers, barriers)  # noqa: E731
        copy(plan)
        _once_more_if_suspected(plan, buffers, barriers, copy)


def _once_more_if_suspected(plan: Plan, buffers: Buffers, barriers: Barriers, one_pass: Callable[[Plan], None]) -> None:
    """All warpgroups of a CTA decide alike: its tiles again, now with the values cleaned."""
    if barriers.inspected is None or buffers.junk is None:
        return
    plgpu.barrier_wait(barriers.inspected)
    again = functools.partial(one_pass, dataclasses.replace(plan, cleans=True))
    pl.when(junk.is_suspected(buffers.junk))(again)


def _compute_warpgroup(
    plan: Plan, inputs: Inputs, outputs: Residuals, buffers: Buffers, barriers: Barriers, wg: jax.Array
) -> None:
    config = plan.config
    cta = lax.axis_index("cta")
    plgpu.barrier_arrive(barriers.q.consumed.at[wg])
    bar.release_all(barriers.k, config.num_stages)
    bar.release_all(barriers.v, config.num_stages)
    if barriers.turns is not None:
        barriers.turns.open(wg)
    items = schedule.load_count(inputs.work, cta)
    first = schedule.load_item(inputs.work, cta, jnp.int32(0))

    def compute_tile(index: jax.Array, carry: tuple[WorkItem, jax.Array]) -> tuple[WorkItem, jax.Array]:
        item, count = carry
        work = _work(plan, inputs, wg, item, count)
        acc_shape = (config.block_q, plan.shapes.value_head_dim)
        attend = lambda acc: _attend(Worker(plan, buffers, barriers, work, acc))  # noqa: E731
        out, stats = plan.tensor_cores.accumulator(attend, acc_shape, _at(buffers.acc, wg))
        # Loaded here, the next item arrives while this one is stored.
        following = schedule.load_item(inputs.work, cta, jnp.minimum(index + 1, items - 1))
        final = softmax.finish_as(plan.spec, softmax.totals(stats), plan.units, work.sink)
        _store_tile(plan, outputs, buffers, barriers, work, out, final)
        return following, count + item.kv_end - item.kv_start

    lax.fori_loop(0, items, compute_tile, (first, jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)
    if barriers.turns is not None:
        barriers.turns.close(wg)


def _at(buffer: Ref | None, wg: jax.Array) -> Ref | None:
    return None if buffer is None else buffer.at[wg]


def _work(plan: Plan, inputs: Inputs, wg: jax.Array, item: WorkItem, count: jax.Array) -> Work:
    config, spec = plan.config, plan.spec
    return Work(
        wg=wg,
        item=item,
        q_base=item.qi * config.tile_q + wg * config.block_q,
        count=count,
        sink=None if inputs.sinks is None else inputs.sinks[item.head],
        q_offset=inputs.scores.q_offset_of(spec, item.batch),
        scores=inputs.scores.of(spec, item.batch),
    )


def _attend(worker: Worker) -> tuple[jax.Array, softmax.RowStatistics]:
    """One query tile: O, not yet normalised, and its row statistics."""
    plan, buffers, barriers, work, acc = worker
    item = work.item
    steps = item.kv_end - item.kv_start
    step = functools.partial(_step, worker)

    if plan.cleans:
        junk.forget(buffers.junk, work.wg, plan.tensor_cores)
    plgpu.barrier_wait(barriers.q.produced.at[work.wg])
    state = step(jnp.int32(0), None, masked=plan.some_masked)
    first_unmasked: Any = 1
    if plan.some_masked:  # in the second pass all are done as if they were: it is rare, and programs stay smaller
        first_unmasked = steps if plan.cleans else schedule.first_unmasked(item)
        state = lax.fori_loop(1, first_unmasked, functools.partial(step, masked=True), state)
    if not (plan.some_masked and plan.cleans):
        state = lax.fori_loop(first_unmasked, steps, functools.partial(step, masked=False), state)

    last = plan.slot(work.count + steps - 1)
    plgpu.barrier_wait(barriers.v.produced.at[last])
    plan.tensor_cores.start(acc, state.p, buffers.v.at[last])
    out = plan.tensor_cores.load(acc, pending=0)
    _note_readers_of_junk(worker, steps - 1, last)
    plgpu.barrier_arrive(barriers.v.consumed.at[last])
    return out, state.stats


def _step(worker: Worker, step: jax.Array, state: State | None, *, masked: bool) -> State:
    """S(step), and O += P V of the step before (none before the first), then the softmax of S."""
    plan, _, barriers, work, acc = worker
    tensor_cores, units = plan.tensor_cores, plan.units
    last = plan.slot(work.count + step - 1)
    scores = _products(worker, step, state)
    tile = _tile_scores(worker, step, masked=masked)
    if not plan.raw_scores:
        scores = tile.logits(scores)
    if masked:
        scores = tile.masked(scores, plan.kv_len_if_cut)

    m = softmax.maxima(scores, units)
    if state is None:
        shift = m.max(axis=1)
    else:
        m = jnp.maximum(m, state.stats.m)
        rescale = tensor_cores.any(softmax.ahead(m, state.stats.shift, units) > plan.config.rescale_threshold)
        shift = lax.cond(rescale, lambda: m.max(axis=1), lambda: state.stats.shift)
        tensor_cores.wait(0)
        _note_readers_of_junk(worker, step - 1, last)
        plgpu.barrier_arrive(barriers.v.consumed.at[last])
        log2_alpha = units.log2(state.stats.shift - shift)
        out, sums = softmax.rescaled(rescale, log2_alpha, tensor_cores.load(acc, pending=0), state.stats.l)
        tensor_cores.store(acc, out)
    p = softmax.probabilities(scores, shift, units)
    added = softmax.fold(jnp.add, p)
    stats = softmax.RowStatistics(m, shift, added if state is None else sums + added)
    return State(stats, lax.optimization_barrier(tile.kept(p).astype(plan.dtype)))


def _tile_scores(worker: Worker, step: jax.Array, *, masked: bool) -> TileScores:
    plan, work = worker.plan, worker.work
    index = schedule.tile_index(plan.config, work, schedule.key_block(work.item, step), masked=masked)
    return TileScores(plan.spec, work.scores, index, plan.tensor_cores)


def _note_readers_of_junk(worker: Worker, step: jax.Array, slot: jax.Array) -> None:
    """Queries that take part with a key of this step whose values are not finite, before its slot is free again."""
    plan, buffers, _, work, _ = worker
    if not plan.cleans:
        return

    def note() -> None:
        junk.note_readers(lambda: _tile_scores(worker, step, masked=True), buffers.junk, slot, work.wg)

    if plan.hides_values_anywhere:
        note()
    else:
        pl.when(step < schedule.first_unmasked(work.item))(note)


def _products(worker: Worker, step: jax.Array, state: State | None) -> jax.Array:
    """Issue S = Q K^T and O += P V back to back, wait for S only."""
    plan, buffers, barriers, work, acc = worker
    wg, item, tensor_cores = work.wg, work.item, plan.tensor_cores
    slot, last = plan.slot(work.count + step), plan.slot(work.count + step - 1)
    plgpu.barrier_wait(barriers.k.produced.at[slot])
    if barriers.turns is not None:
        barriers.turns.wait(wg)
    s = tensor_cores.issue(buffers.q.at[wg], buffers.k.at[slot])
    if state is not None:
        plgpu.barrier_wait(barriers.v.produced.at[last])
        tensor_cores.start(acc, state.p, buffers.v.at[last])
    if barriers.turns is not None:
        barriers.turns.pass_on(wg)
    scores = tensor_cores.landed(s, pending=0 if state is None else 1)
    plgpu.barrier_arrive(barriers.k.consumed.at[slot])
    if plan.config.out_has_own_buffer:  # after the last product with these queries, the next ones may load
        is_last = step == item.kv_end - item.kv_start - 1
        pl.when(is_last)(lambda: plgpu.barrier_arrive(barriers.q.consumed.at[wg]))
    return scores


def _store_tile(
    plan: Plan,
    outputs: Residuals,
    buffers: Buffers,
    barriers: Barriers,
    work: Work,
    out: jax.Array,
    stats: softmax.FinalStatistics,
) -> None:
    wg, item = work.wg, work.item
    rows = pl.ds(work.q_base, plan.config.block_q)
    out_smem = (buffers.q if buffers.out is None else buffers.out).at[wg]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's
    normalizer = stats.normalizer
    if plan.cleans:
        normalizer += junk.of_readers(buffers.junk, wg)
    elif buffers.junk is not None:
        junk.inspect(out, buffers.junk, wg, plan.tensor_cores)
    out_smem[...] = (out * softmax.rows_like(normalizer, out)).astype(plan.dtype)
    buffers.m[wg] = stats.m
    buffers.l[wg] = stats.l
    plgpu.commit_smem()
    tma.store(out_smem, outputs.out, tma.Rows(item.batch, work.q_base, item.head, plan.config.block_q))
    memory.store_rows(buffers.m.at[wg], outputs.m.at[item.batch, item.head], rows)
    memory.store_rows(buffers.l.at[wg], outputs.l.at[item.batch, item.head], rows)
    if buffers.out is None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(barriers.q.consumed.at[wg])
