"""FlashAttention backward for Hopper: one kernel, five products for each pair of tiles, dQ summed in device memory.

A CTA holds 128 keys and walks over the queries (of all the query heads that share the keys) in blocks. One warpgroup
copies (TMA), two compute, 64 keys each. With keys as rows, S^T = K Q^T and dP^T = V dO^T come out as P^T and dS^T in
the registers that the products dV += P^T dO and dK += dS^T Q want them in; dV and dK stay in registers throughout. Only
dS^T passes through shared memory: dQ = dS K sums over the keys of both warpgroups, each of which makes half of it and
adds it to a float32 buffer in device memory (TMA reduce-add; the order of the sum, and so its rounding, may differ from
run to run).

ptxas serialises wgmma where its operands could move while it runs. Hence: P and dS become 16-bit only when nothing is
in flight, nothing is in flight across the end of a loop's body, and an accumulator's scope opens just before its
product. Bodies are specialised on the warpgroup, as an index that is data costs registers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks
from pallas_flash.kernels import barriers as bar
from pallas_flash.kernels import matmul, memory, softmax, tile_mask
from pallas_flash.kernels.sm90 import backward_plan as plan_
from pallas_flash.kernels.sm90 import backward_schedule as schedule
from pallas_flash.kernels.sm90.backward_config import BLOCK_KV, COMPUTE_WGS, TILE_KV, BackwardConfig
from pallas_flash.kernels.sm90.backward_plan import (
    Barriers,
    Block,
    Buffers,
    Inputs,
    Outputs,
    Plan,
    Ref,
    Refs,
    Rows,
    Work,
)
from pallas_flash.kernels.sm90.backward_schedule import WorkItem
from pallas_flash.kernels.sm90.config import ROWS, round_up
from pallas_flash.spec import LOG2E, AttentionSpec, Cotangents, Gradients, Operands, Residuals

REGISTERS, COPY_REGISTERS = 240, 24  # of a thread of a warpgroup that computes, that copies


def run(
    spec: AttentionSpec,
    operands: Operands,
    residuals: Residuals,
    cotangents: Cotangents,
    config: BackwardConfig,
    *,
    interpret: Any = None,
) -> Gradients:
    """interpret: `plgpu.InterpretGPUParams` to run the kernel in Pallas' interpreter."""
    shapes = operands.shapes
    rows = prepare_rows(residuals, cotangents, config.block_q)
    q, k, v, dout = (padded(x) for x in (operands.q, operands.k, operands.v, cotangents.out))
    tensor_cores = matmul.Wgmma() if interpret is None else matmul.Interpreted()
    held = shapes._replace(q_len=q.shape[1], head_dim=q.shape[-1], value_head_dim=v.shape[-1])
    plan = Plan(spec, held, q.dtype, config, tensor_cores, interpret is not None)
    work = jnp.asarray(schedule.work_items(spec, operands, config))
    scale = None if operands.scale is None else operands.scale.reshape(1).astype(jnp.float32)
    dq_ref = jax.new_ref(jnp.zeros((plan.dq_slices * q.shape[0], *q.shape[1:]), jnp.float32))
    inputs = Inputs(work, q, k, v, dout, *rows, scale, operands.q_offset, operands.mask, dq_ref)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=(Outputs(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v))),),
        scratch_types=(plan_.buffers(plan), plan_.barriers(plan)),
        grid=(work.shape[0],),
        grid_names=("cta",),
        num_threads=COMPUTE_WGS + 1,
        thread_name="wg",
        # No thread reads what it wrote to shared memory without commit_smem between, nor the other way round.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="flash_attention_backward_sm90",
    )
    ((dk, dv),) = kernel(inputs)
    dq = jax.freeze(dq_ref)
    if plan.dq_slices > 1:
        dq = dq.reshape(plan.dq_slices, *q.shape).sum(0)
    dq = dq[:, : shapes.q_len, :, : shapes.head_dim]
    scaled = dq * (spec.scale if scale is None else scale)
    dscale = None
    if operands.scale is not None:  # sum(ds * s) over all pairs, as s = q.k
        dscale = jnp.sum(operands.q.astype(jnp.float32) * dq).astype(operands.scale.dtype)
    keys = slice(shapes.kv_len)
    return Gradients(
        q=scaled.astype(q.dtype),
        k=dk[:, keys, :, : shapes.head_dim],
        v=dv[:, keys, :, : shapes.value_head_dim],
        sinks=_sink_gradient(operands, rows),
        scale=dscale,
    )


def padded(array: jax.Array) -> jax.Array:
    """To whole tiles of TMA in the rows, and to a head dim that the kernel is made for."""
    _, rows, _, columns = array.shape
    missing = (0, round_up(rows, ROWS) - rows), (0, 0), (0, padded_head_dim(columns) - columns)
    return jnp.pad(array, ((0, 0), *missing)) if missing != ((0, 0),) * 3 else array


def padded_head_dim(head_dim: int) -> int:
    return next(size for size in (64, 128, 256) if head_dim <= size)


def prepare_rows(residuals: Residuals, cotangents: Cotangents, block_q: int) -> Rows:
    """m and l folded into one number, so that P = exp2(logits_log2 - lse_log2), and delta."""
    out, m, l = residuals  # noqa: E741
    dead = l == 0
    delta = jnp.einsum("btnh,btnh->bnt", out, cotangents.out, preferred_element_type=jnp.float32) - cotangents.lse
    lse_log2 = jnp.where(dead, jnp.inf, m * LOG2E + jnp.log2(jnp.where(dead, 1, l)))
    missing = ((0, 0), (0, 0), (0, -m.shape[-1] % block_q))
    return Rows(
        jnp.pad(lse_log2, missing, constant_values=jnp.inf),
        jnp.pad(jnp.where(dead, 0, delta), missing),
    )


def _sink_gradient(operands: Operands, rows: Rows) -> jax.Array | None:
    """The sink is one more logit whose value vector is 0: d sink = p_sink * (0 - delta)."""
    if operands.sinks is None:
        return None
    p_sink = jnp.exp2(operands.sinks.astype(jnp.float32)[:, None] * LOG2E - rows.lse_log2)
    return -jnp.sum(p_sink * rows.delta, axis=(0, 2)).astype(operands.sinks.dtype)


def _kernel(plan: Plan, inputs: Inputs, outputs: Outputs, buffers: Buffers, barriers: Barriers) -> None:
    refs = Refs(inputs, outputs, buffers, barriers)
    wg = lax.axis_index("wg")
    for compute_wg in range(COMPUTE_WGS):

        @pl.when(wg == compute_wg)
        def _compute(compute_wg: int = compute_wg) -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            _compute_warpgroup(plan, refs, compute_wg)

    @pl.when(wg == COMPUTE_WGS)
    def _copy() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        _copy_warpgroup(plan, refs)


def _for_each_item(plan: Plan, inputs: Inputs, body: Any) -> None:
    """`count = body(item, count)` for all work items of this CTA; `count` is how many query blocks came before."""
    cta = lax.axis_index("cta")
    if plan.config.num_ctas is None:
        body(schedule.load_item(inputs.work, cta, 0), jnp.int32(0))
    else:
        step = lambda index, count: body(schedule.load_item(inputs.work, cta, index), count)  # noqa: E731
        lax.fori_loop(0, schedule.load_count(inputs.work, cta), step, jnp.int32(0))


def _for_each_head(plan: Plan, item: WorkItem, body: Any, count: jax.Array) -> jax.Array:
    """`count = body(head, count)` for the query heads that share the item's keys."""
    heads = plan.shapes.q_heads_per_kv_head
    if heads == 1:
        return body(item.kv_head, count)

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return carry[0] + 1, body(carry[0], carry[1])

    # Not a fori_loop: with a known number of steps it becomes a scan, which may use one accumulator only.
    first = item.kv_head * heads
    return lax.while_loop(lambda carry: carry[0] < first + heads, step, (first, count))[1]


def _slot(plan: Plan, count: jax.Array) -> jax.Array:
    return lax.rem(count, jnp.int32(plan.config.num_stages))


def _query_block(item: WorkItem, step: jax.Array) -> jax.Array:
    """The query block of a step. They are rotated so that the masked ones behind the unmasked ones come first, then the
    masked ones before them, then the unmasked ones: the first steps are masked, the last ones are not."""
    block = item.full_end + step
    return block - jnp.where(block >= item.q_end, item.q_end - item.q_start, 0)


# The warpgroup that copies.


def _copy_warpgroup(plan: Plan, refs: Refs) -> None:
    inputs, _, buffers, barriers = refs
    block_q = plan.config.block_q

    def copy_item(item: WorkItem, count: jax.Array) -> jax.Array:
        keys = pl.ds(item.ki * TILE_KV, TILE_KV)
        for source, buffer, handshake in ((inputs.k, buffers.k, barriers.k), (inputs.v, buffers.v, barriers.v)):
            plgpu.barrier_wait(handshake.consumed.at[0])
            plgpu.copy_gmem_to_smem(source.at[item.batch, keys, item.kv_head], buffer.at[0], handshake.produced.at[0])

        def copy_head(head: jax.Array, count: jax.Array) -> jax.Array:
            def copy_step(step: jax.Array, _: None) -> None:
                slot = _slot(plan, count + step)
                rows = pl.ds(_query_block(item, step) * block_q, block_q)
                for matrix, matrix_smem, row, row_smem, handshake in (
                    (inputs.q, buffers.q, inputs.lse_log2, buffers.lse_log2, barriers.q),
                    (inputs.dout, buffers.dout, inputs.delta, buffers.delta, barriers.dout),
                ):
                    produced = handshake.produced.at[slot]
                    plgpu.barrier_wait(handshake.consumed.at[slot])
                    plgpu.copy_gmem_to_smem(matrix.at[item.batch, rows, head], matrix_smem.at[slot], produced)
                    plgpu.copy_gmem_to_smem(row.at[item.batch, head, rows], row_smem.at[slot], produced)

            steps = item.q_end - item.q_start
            lax.fori_loop(0, steps, copy_step, None)
            return count + steps

        return _for_each_head(plan, item, copy_head, count)

    _for_each_item(plan, inputs, copy_item)
    for handshake, slots in _handshakes(plan, barriers):
        bar.await_all(handshake, slots)


def _handshakes(plan: Plan, barriers: Barriers) -> tuple[tuple[bar.Handshake, int], ...]:
    stages = plan.config.num_stages
    return (barriers.k, 1), (barriers.v, 1), (barriers.q, stages), (barriers.dout, stages)


# The warpgroups that compute.


def _compute_warpgroup(plan: Plan, refs: Refs, wg: int) -> None:
    tensor_cores, shapes = plan.tensor_cores, plan.shapes
    accumulators = refs.buffers.accumulators.of(wg)
    for handshake, slots in _handshakes(plan, refs.barriers):
        bar.release_all(handshake, slots)

    def compute_item(item: WorkItem, count: jax.Array) -> jax.Array:
        work = _work(plan, refs.inputs, wg, item)

        def with_dk(dk: Ref) -> Any:
            def with_dv(dv: Ref) -> Any:
                end = _walk(plan, refs, work, (dk, dv), count)
                return end, tensor_cores.load(dk, pending=0), tensor_cores.load(dv, pending=0)

            return tensor_cores.accumulator(with_dv, (BLOCK_KV, shapes.value_head_dim), accumulators.dv)

        end, dk, dv = tensor_cores.accumulator(with_dk, (BLOCK_KV, shapes.head_dim), accumulators.dk)
        _store_tile(plan, refs, work, dk, dv)
        return end

    _for_each_item(plan, refs.inputs, compute_item)
    plgpu.wait_smem_to_gmem(0)


def _work(plan: Plan, inputs: Inputs, wg: int, item: WorkItem) -> Work:
    spec = plan.spec
    return Work(
        wg=wg,
        item=item,
        scale=spec.scale if inputs.scale is None else inputs.scale[0],
        q_offset=spec.q_offset if inputs.q_offset is None else inputs.q_offset[item.batch],
        mask=tuple(tuple(array[item.batch] for array in arrays) for arrays in inputs.mask),
    )


def _own_keys(wg: int) -> Any:
    return pl.ds(wg * BLOCK_KV, BLOCK_KV)


def _meet(refs: Refs) -> None:
    """Wait until both warpgroups are here; then each sees what the other wrote to shared memory."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.barriers.meeting)
    plgpu.barrier_wait(refs.barriers.meeting)


def _walk(plan: Plan, refs: Refs, work: Work, sums: tuple[Ref, Ref], count: jax.Array) -> jax.Array:
    """Over all query blocks of the item: the masked ones, then the unmasked ones. `sums` are dK and dV."""
    item = work.item
    plgpu.barrier_wait(refs.barriers.k.produced.at[0])
    plgpu.barrier_wait(refs.barriers.v.produced.at[0])

    def walk_head(head: jax.Array, count: jax.Array) -> jax.Array:
        block = functools.partial(_block, plan, head)
        step = functools.partial(_step, plan, refs, work, sums)
        masked_steps = item.q_end - item.q_start - (item.full_end - item.full_start)
        if plan.some_masked:

            @pl.loop(0, masked_steps)
            def _masked(i: jax.Array) -> None:
                step(block(_query_block(item, i), count + i, masked=True))

        # The loops' index is the block: registers are short.
        before = count + masked_steps - item.full_start
        rest = item.full_start
        if plan.config.unroll == 2:
            rest = item.full_end - lax.rem(item.full_end - item.full_start, jnp.int32(2))

            @pl.loop(item.full_start, rest, step=2)
            def _pair(i: jax.Array) -> None:
                first = block(i, before + i, drain=False)
                step(first)
                step(block(i + 1, before + i + 1), first)

        @pl.loop(rest, item.full_end)
        def _unmasked(i: jax.Array) -> None:
            step(block(i, before + i))

        return count + item.q_end - item.q_start

    return _for_each_head(plan, item, walk_head, count)


def _block(
    plan: Plan, head: jax.Array, qi: jax.Array, count: jax.Array, *, masked: bool = False, drain: bool = True
) -> Block:
    """The query block `qi`, the `count`th of this CTA."""
    return Block(
        head=head,
        q_base=qi * plan.config.block_q,
        slot=_slot(plan, count),
        ds_slot=lax.rem(count, jnp.int32(2)),
        zero=lax.shift_right_logical(count, jnp.int32(31)),
        masked=masked,
        drain=drain,
    )


def _step(
    plan: Plan, refs: Refs, work: Work, sums: tuple[Ref, Ref], block: Block, undrained: Block | None = None
) -> None:
    """One block of queries. The last product of `undrained`, the block before, is still in flight."""
    tensor_cores, buffers, barriers, wg = plan.tensor_cores, refs.buffers, refs.barriers, work.wg
    dk, dv = sums
    slot = block.slot
    p, ds = _weights(plan, refs, work, block, undrained)
    tensor_cores.start(dv, p, buffers.dout.at[slot])
    buffers.ds[block.ds_slot, _own_keys(wg)] = ds
    _meet(refs)

    def dq_product(acc: Ref) -> jax.Array:
        tensor_cores.start(acc, *_dq_operands(plan, buffers, wg, block))
        tensor_cores.start(dk, ds, buffers.q.at[slot])
        return tensor_cores.load(acc, pending=1)

    dq_part = plan.config.dq_part(plan.shapes.head_dim)
    dq = tensor_cores.accumulator(dq_product, dq_part, buffers.accumulators.of(wg).dq)
    plgpu.barrier_arrive(barriers.dout.consumed.at[slot])
    _add_dq(plan, refs, work, block, dq)
    if block.drain:
        tensor_cores.wait(0)
        plgpu.barrier_arrive(barriers.q.consumed.at[slot])


def _weights(plan: Plan, refs: Refs, work: Work, block: Block, undrained: Block | None) -> tuple[jax.Array, jax.Array]:
    """P^T and dS^T, 16-bit. dS is the gradient of scale * q.k: the scale of dQ and dK comes at the end."""
    tensor_cores, own, shape = plan.tensor_cores, _own_keys(work.wg), (BLOCK_KV, plan.config.block_q)
    _, _, buffers, barriers = refs
    slot, zero = block.slot, block.zero
    accumulators = buffers.accumulators.of(work.wg)

    def with_scores(s: Ref) -> Any:
        # K and V at an index that the compiler does not know to be 0: else it would hold their many addresses in
        # registers throughout the loop.
        tensor_cores.start(s, buffers.k.at[zero, own], buffers.q.at[slot].transpose((1, 0)))
        plgpu.barrier_wait(barriers.dout.produced.at[slot])
        return tensor_cores.accumulator(functools.partial(with_dp, s), shape, accumulators.dp)

    def with_dp(s: Ref, dp: Ref) -> Any:
        tensor_cores.start(dp, buffers.v.at[zero, own], buffers.dout.at[slot].transpose((1, 0)))
        scores = tensor_cores.load(s, pending=1)
        if undrained is not None:
            plgpu.barrier_arrive(barriers.q.consumed.at[undrained.slot])
        p, derivative = _probabilities(plan, buffers, work, block, scores)
        # Only now, as registers are short.
        p, delta_slot = lax.optimization_barrier((p, slot))
        delta = _load_columns(buffers.delta.at[delta_slot])
        ds = p * (tensor_cores.load(dp, pending=0) - _columns_like(delta, p))
        if derivative is not None:
            ds = ds * derivative
        if block.masked:  # where v or dout holds NaN or Inf, dP does
            ds = jnp.where(p == 0, 0.0, ds)
        return lax.optimization_barrier((p.astype(plan.dtype), ds.astype(plan.dtype)))

    # Waits come before an accumulator's scope: where the product follows at once, its zeros need no instructions.
    plgpu.barrier_wait(barriers.q.produced.at[slot])
    return tensor_cores.accumulator(with_scores, shape, accumulators.scores)


def _probabilities(
    plan: Plan, buffers: Buffers, work: Work, block: Block, scores: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """P^T, and the derivative of the logits by scale * q.k; None: 1."""
    soft_cap, derivative = plan.spec.soft_cap, None
    lse_log2 = _load_columns(buffers.lse_log2.at[block.slot])
    if soft_cap is None:
        logits_log2 = scores * (work.scale * LOG2E)
    else:
        logits = softmax.soft_cap(scores * work.scale, soft_cap)
        logits_log2 = logits * LOG2E
        derivative = 1 - (logits * (1 / soft_cap)) * (logits * (1 / soft_cap))
    if block.masked:
        logits_log2 = _mask(plan, logits_log2, work, block)
    return jnp.exp2(logits_log2 - _columns_like(lse_log2, scores)), derivative


def _load_columns(ref: Ref) -> jax.Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def _columns_like(columns: jax.Array, tile: jax.Array) -> jax.Array:
    """One value a column, for every row of the tile."""
    return lax.broadcast_in_dim(columns, tile.shape, (1,))


def _mask(plan: Plan, logits: jax.Array, work: Work, block: Block) -> jax.Array:
    item = work.item
    index = tile_mask.TileIndex(
        shape=logits.shape,
        batch=item.batch,
        head=block.head,
        q_base=block.q_base,
        kv_base=item.ki * TILE_KV + work.wg * BLOCK_KV,
        q_offset=work.q_offset,
        transposed=True,
    )
    live = masks.allowed(plan.spec.mask, work.mask, index)
    if plan.shapes.kv_len % TILE_KV:
        inside = index.kv_pos < plan.shapes.kv_len
        live = inside if live is None else live & inside
    return jnp.where(live, logits, -jnp.inf)


def _dq_operands(plan: Plan, buffers: Buffers, wg: int, block: Block) -> tuple[Ref, Ref]:
    """dS and K of this warpgroup's part of dQ: of half the rows, or of half the columns."""
    rows, columns = plan.config.dq_part(plan.shapes.head_dim)
    if columns == plan.shapes.head_dim:
        own_rows = buffers.ds.at[block.ds_slot, :, pl.ds(wg * rows, rows)]
        return own_rows.transpose((1, 0)), buffers.k.at[block.zero]
    own_columns = buffers.k.at[block.zero, :, pl.ds(wg * columns, columns)]
    return buffers.ds.at[block.ds_slot].transpose((1, 0)), own_columns


def _add_dq(plan: Plan, refs: Refs, work: Work, block: Block, dq: jax.Array) -> None:
    """Add this warpgroup's part of a block of dQ to the sum in device memory."""
    wg, item = work.wg, work.item
    rows, columns = plan.config.dq_part(plan.shapes.head_dim)
    by_rows = columns == plan.shapes.head_dim
    own_rows = pl.ds(block.q_base + wg * rows, rows) if by_rows else pl.ds(block.q_base, rows)
    own_columns = pl.ds(0, columns) if by_rows else pl.ds(wg * columns, columns)
    batch = item.batch if plan.dq_slices == 1 else item.batch + item.ki * plan.shapes.batch
    staged = refs.buffers.dq.at[wg]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last block's
    staged[...] = dq
    plgpu.commit_smem()
    target = refs.inputs.dq.at[batch, own_rows, block.head, own_columns]
    memory.add_matrix(staged, target, interpreted=plan.interpreted)


def _store_tile(plan: Plan, refs: Refs, work: Work, dk: jax.Array, dv: jax.Array) -> None:
    """dK and dV take the place of K and V in shared memory, once no warpgroup multiplies with K any more."""
    _, outputs, buffers, barriers = refs
    wg, item = work.wg, work.item
    own = _own_keys(wg)
    keys = pl.ds(item.ki * TILE_KV + wg * BLOCK_KV, BLOCK_KV)
    _meet(refs)
    buffers.v[0, own] = dv.astype(plan.dtype)
    buffers.k[0, own] = (dk * work.scale).astype(plan.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers.v.at[0, own], outputs.dv.at[item.batch, keys, item.kv_head])
    plgpu.copy_smem_to_gmem(buffers.k.at[0, own], outputs.dk.at[item.batch, keys, item.kv_head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(barriers.k.consumed.at[0])
    plgpu.barrier_arrive(barriers.v.consumed.at[0])
