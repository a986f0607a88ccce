"""FlashAttention backward for Hopper: one kernel, five products for each pair of tiles, dQ summed in device memory.

A CTA holds a tile of keys and walks over the queries, of all the query heads that share the keys, in blocks. One
warpgroup copies (TMA), two compute; backward_keys.py and backward_columns.py are two ways to share the work. dV and dK
stay in registers throughout; each block of dQ is added to a float32 buffer in device memory (TMA reduce-add; the order
of the sum, and so its rounding, may differ from run to run).

ptxas serialises wgmma where its operands could move while it runs. Hence: P and dS become 16-bit only when nothing is
in flight, nothing is in flight across the end of a loop's body, and an accumulator's scope opens just before its
product. Bodies are specialised on the warpgroup, as an index that is data costs registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import backward_schedule as schedule
from pallas_flash.kernels import barriers as bar
from pallas_flash.kernels import matmul, tile_scores
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.backward_schedule import WorkItem
from pallas_flash.kernels.sizes import ROWS
from pallas_flash.kernels.sm90 import backward_columns, backward_keys
from pallas_flash.kernels.sm90 import backward_plan as plan_
from pallas_flash.kernels.sm90.backward_config import BLOCK, COMPUTE_WGS, BackwardConfig
from pallas_flash.kernels.sm90.backward_plan import (
    Barriers,
    Block,
    Buffers,
    Inputs,
    Outputs,
    Plan,
    Ref,
    Refs,
    Work,
    Worker,
)
from pallas_flash.spec import AttentionSpec, Operands

REGISTERS, COPY_REGISTERS = 240, 24  # of a thread of a warpgroup that computes, that copies


def run(
    spec: AttentionSpec,
    operands: Operands,
    dout: jax.Array,
    rows: Rows,
    config: BackwardConfig,
    *,
    sums_dq: bool = True,
    dbias: Any = None,
    interpret: Any = None,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """dQ in float32, still without the scale (None unless sums_dq), dK and dV.

    dbias: a reference to float32 zeros [B, N, S rounded up], which receives the gradient of a bias [.., 1, S].
    interpret: `plgpu.InterpretGPUParams`, to interpret it.
    """
    shapes = operands.shapes
    head_dim, value_head_dim = config.padded(shapes.head_dim, shapes.value_head_dim)
    q, k = padded(operands.q, head_dim), padded(operands.k, head_dim)
    v, dout = padded(operands.v, value_head_dim), padded(dout, value_head_dim)
    tensor_cores = matmul.Wgmma() if interpret is None else matmul.Interpreted()
    held = shapes._replace(q_len=q.shape[1], head_dim=head_dim, value_head_dim=value_head_dim)
    plan = Plan(spec, held, q.dtype, config, tensor_cores, interpret is not None, rows.m is not None, sums_dq)
    work = jnp.asarray(schedule.work_items(spec, operands, config))
    scores = tile_scores.score_arrays(spec, operands)
    dq_ref = jax.new_ref(jnp.zeros((plan.dq_slices * q.shape[0], *q.shape[1:]), jnp.float32)) if sums_dq else None
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
    ((dk, dv),) = kernel(Inputs(work, q, k, v, dout, rows, scores, dq_ref, dbias))
    dq = None
    if dq_ref is not None:
        dq = jax.freeze(dq_ref).reshape(plan.dq_slices, *q.shape)
        dq = (dq.sum(0) if plan.dq_slices > 1 else dq[0])[:, : shapes.q_len, :, : shapes.head_dim]
    keys = slice(shapes.kv_len)
    return (
        dq,
        dk[:, keys, :, : shapes.head_dim],
        dv[:, keys, :, : shapes.value_head_dim],
    )


def padded(array: jax.Array, columns: int) -> jax.Array:
    """To whole tiles of TMA in the rows, and to this many columns."""
    missing = (0, -array.shape[1] % ROWS), (0, 0), (0, columns - array.shape[-1])
    return jnp.pad(array, ((0, 0), *missing)) if missing != ((0, 0),) * 3 else array


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


def _for_each_item(plan: Plan, inputs: Inputs, body: Callable[[WorkItem], None]) -> None:
    """`body(item)` for all work items of this CTA."""
    cta = lax.axis_index("cta")
    if plan.config.num_ctas is None:
        body(schedule.load_item(inputs.work, cta, 0))
    else:
        pl.loop(0, schedule.load_count(inputs.work, cta))(lambda i: body(schedule.load_item(inputs.work, cta, i)))


def _for_each_head(plan: Plan, item: WorkItem, body: Callable[[jax.Array], None]) -> None:
    """`body(head)` for the query heads that share the item's keys."""
    heads = plan.shapes.q_heads_per_kv_head
    if heads == 1:
        body(item.kv_head)
        return

    def step(head: jax.Array) -> jax.Array:
        body(head)
        return head + 1

    # Not a fori_loop: with a known number of steps it becomes a scan, which may use one accumulator only.
    first = item.kv_head * heads
    lax.while_loop(lambda head: head < first + heads, step, first)


def _parity(step: jax.Array) -> jax.Array:
    """Which of two buffers a step takes; step 0 is the first unmasked one, so that its parity is known statically."""
    return lax.bitwise_and(step, jnp.int32(1))


# The warpgroup that copies.


def _copy_warpgroup(plan: Plan, refs: Refs) -> None:
    inputs, _, buffers, barriers = refs
    config = plan.config
    rows, rows_smem = inputs.rows, buffers.rows
    to_q, to_dout = barriers.q.produced, barriers.dout.produced
    with_q = (inputs.q, buffers.q, to_q), (rows.lse_log2, rows_smem.lse_log2, to_q), (rows.m, rows_smem.m, to_q)
    with_dout = (inputs.dout, buffers.dout, to_dout), (rows.delta, rows_smem.delta, to_dout)

    def copy_item(item: WorkItem) -> None:
        keys = pl.ds(item.ki * config.block_kv, config.block_kv)
        for source, buffer, handshake in ((inputs.k, buffers.k, barriers.k), (inputs.v, buffers.v, barriers.v)):
            plgpu.barrier_wait(handshake.consumed.at[0])
            plgpu.copy_gmem_to_smem(source.at[item.batch, keys, item.kv_head], buffer.at[0], handshake.produced.at[0])

        def copy_head(head: jax.Array) -> None:
            @pl.loop(0, item.q_end - item.q_start)
            def _step(step: jax.Array) -> None:
                qs = pl.ds(schedule.query_block(item, step) * config.block_q, config.block_q)
                parity = _parity(step - schedule.masked_steps(item))
                for copies, consumed, stages in (
                    (with_q, barriers.q.consumed, config.num_stages),
                    (with_dout, barriers.dout.consumed, config.dout_stages),
                ):
                    slot = parity if stages == 2 else 0
                    plgpu.barrier_wait(consumed.at[slot])
                    for source, buffer, produced in copies:
                        if source is not None:
                            place = (item.batch, qs, head) if len(source.shape) == 4 else (item.batch, head, qs)
                            plgpu.copy_gmem_to_smem(source.at[place], buffer.at[slot], produced.at[slot])

        _for_each_head(plan, item, copy_head)

    _for_each_item(plan, inputs, copy_item)
    for handshake, slots in _handshakes(plan, barriers):
        bar.await_all(handshake, slots)


def _handshakes(plan: Plan, barriers: Barriers) -> tuple[tuple[bar.Handshake, int], ...]:
    stages = plan.config.num_stages, plan.config.dout_stages
    return (barriers.k, 1), (barriers.v, 1), (barriers.q, stages[0]), (barriers.dout, stages[1])


# The warpgroups that compute.


def _compute_warpgroup(plan: Plan, refs: Refs, wg: int) -> None:
    tensor_cores, shapes, config, barriers = plan.tensor_cores, plan.shapes, plan.config, refs.barriers
    accumulators = refs.buffers.accumulators.of(wg)
    sums = [(BLOCK, config.sum_columns(columns)) for columns in (shapes.head_dim, shapes.value_head_dim)]
    for handshake, slots in _handshakes(plan, barriers):
        bar.release_all(handshake, slots)
    barriers.turns.open(wg)

    def compute_item(item: WorkItem) -> None:
        work = _work(plan, refs.inputs, item)
        if config.dk_in_ds:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's dK

        def with_dk(dk: Ref) -> Any:
            with_dv = lambda dv: _walk(Worker(plan, refs, wg, work, dk, dv))  # noqa: E731
            return tensor_cores.accumulator(with_dv, sums[1], accumulators.dv)

        dk, dv = tensor_cores.accumulator(with_dk, sums[0], accumulators.dk)
        if plan.spec.dropout_rate > 0:
            dv = dv * (1 / (1 - plan.spec.dropout_rate))
        way = backward_columns if config.shares_keys else backward_keys
        if config.own_outputs:
            release_keys()
        way.store_tile(Worker(plan, refs, wg, work, None, None), dk * work.scores.scale, dv)
        if not config.own_outputs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            release_keys()

    def release_keys() -> None:
        plgpu.barrier_arrive(barriers.k.consumed.at[0])
        plgpu.barrier_arrive(barriers.v.consumed.at[0])

    _for_each_item(plan, refs.inputs, compute_item)
    barriers.turns.close(wg)
    plgpu.wait_smem_to_gmem(0)


def _work(plan: Plan, inputs: Inputs, item: WorkItem) -> Work:
    spec = plan.spec
    return Work(
        item=item,
        q_offset=inputs.scores.q_offset_of(spec, item.batch),
        scores=inputs.scores.of(spec, item.batch),
    )


def _walk(worker: Worker) -> tuple[jax.Array, jax.Array]:
    """Over the item's query blocks: the masked ones, then the unmasked ones. Returns dK and dV."""
    plan, barriers, item = worker.plan, worker.refs.barriers, worker.work.item
    way = backward_columns if plan.config.shares_keys else backward_keys
    step = functools.partial(way.step, worker)
    plgpu.barrier_wait(barriers.k.produced.at[0])
    plgpu.barrier_wait(barriers.v.produced.at[0])

    def walk_head(head: jax.Array) -> None:
        block = functools.partial(_block, plan, head)
        late = functools.partial(_with_before, plan, item)
        if plan.late_dq:
            backward_keys.before_first(worker)
        if plan.some_masked:

            @pl.loop(0, schedule.masked_steps(item))
            def _masked(i: jax.Array) -> None:
                each = block(schedule.query_block(item, i), _parity(i - schedule.masked_steps(item)), masked=True)
                step(late(each, i))

        # The loops' index is the block: registers are short.
        @pl.loop(item.full_start, item.full_end)
        def _unmasked(i: jax.Array) -> None:
            step(late(block(i, _parity(i - item.full_start)), i - item.full_start + schedule.masked_steps(item)))

        if plan.late_dq:
            backward_keys.last_dq(worker, _last(plan, item, head))

    _for_each_head(plan, item, walk_head)
    return plan.tensor_cores.load(worker.dk, pending=0), plan.tensor_cores.load(worker.dv, pending=0)


def _last(plan: Plan, item: WorkItem, head: jax.Array) -> Block:
    steps = item.q_end - item.q_start
    step = jnp.maximum(steps, 1) - 1  # block -1, of no steps, would be at an address behind the buffers
    last = _block(plan, head, schedule.query_block(item, step), _parity(step - schedule.masked_steps(item)))
    return last._replace(first=steps == 0)


def _with_before(plan: Plan, item: WorkItem, block: Block, step: jax.Array) -> Block:
    """The block of a step, with where the one before was, if that matters."""
    if not plan.late_dq:
        return block
    before = schedule.query_block(item, step - 1) * plan.config.block_q
    return block._replace(before=before, first=step == 0)


def _block(plan: Plan, head: jax.Array, qi: jax.Array, parity: Any, *, masked: bool = False) -> Block:
    return Block(
        head=head,
        q_base=qi * plan.config.block_q,
        parity=parity,
        q_slot=parity if plan.config.num_stages == 2 else 0,
        dout_slot=parity if plan.config.dout_stages == 2 else 0,
        zero=lax.shift_right_logical(qi, jnp.int32(31)),
        masked=masked,
    )
