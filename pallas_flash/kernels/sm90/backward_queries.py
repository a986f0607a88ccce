"""dQ alone for Hopper, without a sum over CTAs: bit-equal on repeats.

A CTA is one warpgroup that copies (TMA) and `compute_wgs` that compute. Each of these holds 64 queries with their dO,
and walks over the keys in blocks. S(j) = Q K(j)^T, dP(j) = dO V(j)^T and dQ += dS(j-1) K(j-1) are issued back to back,
so that P is made beside the other two products. dQ stays in registers throughout. The rules for ptxas are those of
forward_kernel.py.

With dK and dV by backward_kernel.py these are 7 products for each pair of tiles, where that kernel with dQ makes 5.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import barriers as bar
from pallas_flash.kernels import matmul, schedule, softmax, tile_scores, tma
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.backward_weights import Weights, dlogits, row_products, weights_of
from pallas_flash.kernels.elements import Span
from pallas_flash.kernels.schedule import WorkItem
from pallas_flash.kernels.sizes import COLUMNS, ROW_UNIT, ROWS, padded_head_dims
from pallas_flash.kernels.sm90 import backward_queries_plan as plan_
from pallas_flash.kernels.sm90.backward_queries_config import QueriesConfig
from pallas_flash.kernels.sm90.backward_queries_plan import Barriers, Buffers, Inputs, Plan, Ref, Refs, Work, Worker
from pallas_flash.kernels.tile_scores import TileScores
from pallas_flash.spec import AttentionSpec, Operands


def run(
    spec: AttentionSpec,
    operands: Operands,
    dout: jax.Array,
    rows: Rows,
    config: QueriesConfig,
    *,
    dbias: Any = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """dQ, and the gradient of the scale if that is an operand. `rows` go on to the end of the last tile.

    dbias: a reference to float32 zeros, `backward_bias.Totals`, which receives the gradient of the bias. interpret:
    `plgpu.InterpretGPUParams`, to interpret it.
    """
    shapes = operands.shapes
    units = (1, ROW_UNIT) if interpret is None else (ROWS, COLUMNS)  # as in the forward kernel
    q, k, v, dout = (tma.padded(x, *units) for x in (operands.q, operands.k, operands.v, dout))
    tensor_cores = matmul.Wgmma() if interpret is None else matmul.Interpreted()
    head_dim, value_head_dim = padded_head_dims(shapes)
    held = shapes._replace(head_dim=head_dim, value_head_dim=value_head_dim)
    plan = Plan(spec, held, q.dtype, config, tensor_cores, rows.m is not None)
    work = jnp.asarray(schedule.work_items(spec, operands, config))
    dscale = None if operands.scale is None else jax.new_ref(jnp.zeros(rows.delta.shape, jnp.float32))
    scores = tile_scores.score_arrays(spec, operands)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=(plan_.buffers(plan), plan_.barriers(plan)),
        grid=(work.shape[0],),
        grid_names=("cta",),
        num_threads=config.compute_wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="flash_attention_backward_queries_sm90",
    )
    dq = kernel(Inputs(work, q, k, v, dout, rows, scores, dscale, dbias))
    dq = dq[:, : shapes.q_len, :, : shapes.head_dim]
    return dq, None if dscale is None else jnp.sum(jax.freeze(dscale))


def _kernel(plan: Plan, inputs: Inputs, dq: Ref, buffers: Buffers, barriers: Barriers) -> None:
    refs, config = Refs(inputs, dq, buffers, barriers), plan.config
    wg = lax.axis_index("wg")

    for compute_wg in range(config.compute_wgs):

        @pl.when(wg == compute_wg)
        def _compute(compute_wg: int = compute_wg) -> None:
            plgpu.set_max_registers(config.compute_registers, action="increase")
            _compute_warpgroup(plan, refs, compute_wg)

    @pl.when(wg == config.compute_wgs)
    def _copy() -> None:
        plgpu.set_max_registers(config.copy_registers, action="decrease")
        _copy_warpgroup(plan, refs)


def _slot(count: jax.Array, stages: int) -> jax.Array:
    return lax.rem(count, jnp.int32(stages))


# The warpgroup that copies.


def _copy_warpgroup(plan: Plan, refs: Refs) -> None:
    inputs, _, buffers, barriers = refs
    config = plan.config
    cta = lax.axis_index("cta")
    items = schedule.load_count(inputs.work, cta)

    def copy_item(index: jax.Array, count: jax.Array) -> jax.Array:
        item = schedule.load_item(inputs.work, cta, index)
        kv_head = lax.div(item.head, jnp.int32(plan.shapes.q_heads_per_kv_head))

        def copy_block(source: Ref, buffer: Ref, handshake: bar.Handshake, step: Any) -> None:
            slot = _slot(count + step, buffer.shape[0])
            rows = tma.Rows(item.batch, schedule.key_block(item, step) * config.block_kv, kv_head, config.block_kv)
            plgpu.barrier_wait(handshake.consumed.at[slot])
            tma.load(source, rows, buffer, handshake.produced, slot)

        copy_k = functools.partial(copy_block, inputs.k, buffers.k, barriers.k)
        copy_v = functools.partial(copy_block, inputs.v, buffers.v, barriers.v)
        copy_k(jnp.int32(0))  # the first keys do not wait for the last tile's queries to be done with
        for source, buffer, handshake in (
            (inputs.q, buffers.q, barriers.q),
            (inputs.dout, buffers.dout, barriers.dout),
        ):
            for wg in range(config.compute_wgs):
                start = item.qi * config.tile_q + wg * config.block_q
                plgpu.barrier_wait(handshake.consumed.at[wg])
                rows = tma.Rows(item.batch, start, item.head, config.block_q)
                tma.load(source, rows, buffer, handshake.produced, wg)
        copy_v(jnp.int32(0))
        steps = item.kv_end - item.kv_start

        @pl.loop(1, steps)
        def _(step: jax.Array) -> None:
            copy_k(step)
            copy_v(step)

        return count + steps

    lax.fori_loop(0, items, copy_item, jnp.int32(0))
    for handshake, slots in _handshakes(plan, barriers):
        bar.await_all(handshake, slots)


def _handshakes(plan: Plan, barriers: Barriers) -> tuple[tuple[bar.Handshake, int], ...]:
    config = plan.config
    of_queries = (barriers.q, config.compute_wgs), (barriers.dout, config.compute_wgs)
    return (*of_queries, (barriers.k, config.key_stages), (barriers.v, config.value_stages))


# The warpgroups that compute.


def _compute_warpgroup(plan: Plan, refs: Refs, wg: int) -> None:
    inputs, _, buffers, barriers = refs
    config = plan.config
    cta = lax.axis_index("cta")
    plgpu.barrier_arrive(barriers.q.consumed.at[wg])
    plgpu.barrier_arrive(barriers.dout.consumed.at[wg])
    bar.release_all(barriers.k, config.key_stages)
    bar.release_all(barriers.v, config.value_stages)
    items = schedule.load_count(inputs.work, cta)
    first = schedule.load_item(inputs.work, cta, jnp.int32(0))

    def compute_item(index: jax.Array, carry: tuple[WorkItem, jax.Array]) -> tuple[WorkItem, jax.Array]:
        item, count = carry
        work = _work(plan, inputs, wg, item, count)
        scratch = None if buffers.acc is None else buffers.acc.at[wg]
        walk = lambda acc: _walk(Worker(plan, refs, work, acc))  # noqa: E731
        dq = plan.tensor_cores.accumulator(walk, (config.block_q, plan.shapes.head_dim), scratch)
        # Loaded here, the next item arrives while this one is stored.
        following = schedule.load_item(inputs.work, cta, jnp.minimum(index + 1, items - 1))
        _store_tile(plan, refs, work, dq)
        return following, count + item.kv_end - item.kv_start

    lax.fori_loop(0, items, compute_item, (first, jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)


def _work(plan: Plan, inputs: Inputs, wg: int, item: WorkItem, count: jax.Array) -> Work:
    config, spec = plan.config, plan.spec
    q_base = item.qi * config.tile_q + wg * config.block_q
    span = Span(0, config.block_q, q_base, clip=False)
    return Work(
        wg=wg,
        item=item,
        q_base=q_base,
        count=count,
        rows=jax.tree.map(lambda x: plan.tensor_cores.take(x.at[item.batch, item.head], (span,)), inputs.rows),
        q_offset=inputs.scores.q_offset_of(spec, item.batch),
        scores=inputs.scores.of(spec, item.batch),
    )


def _walk(worker: Worker) -> jax.Array:
    """Over the item's key blocks: the masked ones, then the unmasked ones. Returns dQ."""
    plan, refs, work, acc = worker
    barriers, item = refs.barriers, work.item
    steps = item.kv_end - item.kv_start
    step = functools.partial(_step, worker)
    plgpu.barrier_wait(barriers.q.produced.at[work.wg])
    plgpu.barrier_wait(barriers.dout.produced.at[work.wg])
    ds = step(jnp.int32(0), None, masked=plan.some_masked)
    first_unmasked: Any = 1
    if plan.some_masked:
        first_unmasked = schedule.first_unmasked(item)
        ds = lax.fori_loop(1, first_unmasked, functools.partial(step, masked=True), ds)
    ds = lax.fori_loop(first_unmasked, steps, functools.partial(step, masked=False), ds)
    plgpu.barrier_arrive(barriers.dout.consumed.at[work.wg])
    if ds is not None:
        _add_dq(worker, steps - 1, ds)
    return plan.tensor_cores.load(acc, pending=0)


def _add_dq(worker: Worker, step: jax.Array, ds: jax.Array) -> None:
    """dQ += dS K of a step, with nothing beside it."""
    plan, (_, _, buffers, barriers), work, acc = worker
    slot = _slot(work.count + step, plan.config.key_stages)
    plan.tensor_cores.start(acc, ds, buffers.k.at[slot])
    plan.tensor_cores.wait(0)
    plgpu.barrier_arrive(barriers.k.consumed.at[slot])


def _step(worker: Worker, step: jax.Array, ds_before: jax.Array | None, *, masked: bool) -> jax.Array | None:
    """dS of a block of keys, 16-bit: the gradient of scale * q.k, as the scale comes at the end. Beside it,
    dQ += dS K of the step before (none before the first). Without overlap, that of this step, and nothing is left."""
    plan, (inputs, _, buffers, barriers), work, acc = worker
    tensor_cores, config = plan.tensor_cores, plan.config
    pending = 0 if ds_before is None else 1
    # 0, which the compiler does not know: what it knows to be the same in every step has its many addresses held in
    # registers throughout the loop.
    zero = lax.shift_right_logical(work.item.kv_start + step, jnp.int32(31))
    k_slot, k_before = (_slot(work.count + i, config.key_stages) for i in (step, step - 1))
    v_slot = _slot(work.count + step, config.value_stages) + zero
    own = work.wg + zero
    plgpu.barrier_wait(barriers.k.produced.at[k_slot])
    s = tensor_cores.issue(buffers.q.at[own], buffers.k.at[k_slot])
    plgpu.barrier_wait(barriers.v.produced.at[v_slot])
    dp = tensor_cores.issue(buffers.dout.at[own], buffers.v.at[v_slot])
    if ds_before is not None:
        tensor_cores.start(acc, ds_before, buffers.k.at[k_before])
    scores = tensor_cores.landed(s, pending=pending + 1)
    index = schedule.tile_index(plan.config, work, schedule.key_block(work.item, step), masked=masked)
    tile = TileScores(plan.spec, work.scores, index, tensor_cores)
    p, derivative = _weights(worker, tile, scores, masked=masked)
    dp = tensor_cores.landed(dp, pending=pending)
    plgpu.barrier_arrive(barriers.v.consumed.at[v_slot])
    ds = dlogits(plan, tile, p, dp, softmax.rows_like(work.rows.delta, p), masked=masked)
    tile.add_bias_gradient(inputs.dbias, ds)
    if derivative is not None:  # 0 where ds is, whatever the derivative of a masked pair may be
        ds = jnp.where(ds == 0, 0.0, ds * derivative)
    if ds_before is not None:
        tensor_cores.wait(0)
        plgpu.barrier_arrive(barriers.k.consumed.at[k_before])
    ds = lax.optimization_barrier(ds.astype(plan.dtype))
    if config.overlap:
        return ds
    _add_dq(worker, step, ds)
    return None


def _weights(worker: Worker, tile: TileScores, scores: jax.Array, *, masked: bool) -> Weights:
    lse_log2, _, m = worker.work.rows
    spread = functools.partial(softmax.rows_like, tile=scores)
    rows = Rows(spread(lse_log2), None, None if m is None else spread(m))
    return weights_of(worker.plan, tile, scores, rows, masked=masked)


def _store_tile(plan: Plan, refs: Refs, work: Work, dq: jax.Array) -> None:
    """dQ takes the place of Q in shared memory."""
    inputs, target, buffers, barriers = refs
    item, q_smem = work.item, buffers.q.at[work.wg]
    if inputs.dscale is not None:  # the sum of ds * s over all pairs, with s = q.k
        products = row_products(q_smem, dq)
        plan.tensor_cores.add(inputs.dscale.at[item.batch, item.head], (work.q_base,), products)
    q_smem[...] = (dq * work.scores.scale).astype(plan.dtype)
    plgpu.commit_smem()
    tma.store(q_smem, target, tma.Rows(item.batch, work.q_base, item.head, plan.config.block_q))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(barriers.q.consumed.at[work.wg])
