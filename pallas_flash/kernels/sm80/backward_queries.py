"""dQ for every GPU since Ampere, without a sum over CTAs: bit-equal on repeats.

A CTA is one warpgroup. It holds 64 or 128 queries with their dO and walks over the keys in blocks. P and dS stay in
registers, where dS is the left operand of dQ += dS K.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import memory, schedule, softmax
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.backward_weights import dlogits, row_products, times, weights_of
from pallas_flash.kernels.elements import Span
from pallas_flash.kernels.schedule import WorkItem
from pallas_flash.kernels.sizes import ROW_UNIT, padded_head_dims
from pallas_flash.kernels.sm80 import backward_plan
from pallas_flash.kernels.sm80.backward_plan import Arrays, Inputs, Plan, Ref, Work
from pallas_flash.kernels.sm80.config import COLUMN_UNIT, QueriesConfig
from pallas_flash.kernels.sm80.instructions import Compiled, Interpreted
from pallas_flash.kernels.tile_scores import TileScores
from pallas_flash.kernels.tma import Rows as CopiedRows
from pallas_flash.kernels.tma import padded
from pallas_flash.spec import AttentionSpec, Operands


class Buffers(NamedTuple):
    q: Ref  # [block_q, H]; at the end dQ
    dout: Ref  # [block_q, Hv]
    k: Ref  # [stages, block_kv, H]
    v: Ref  # [stages, block_kv, Hv]


class Worker(NamedTuple):
    """A CTA with its work, and everything that it works with."""

    plan: Plan
    inputs: Inputs
    buffers: Buffers
    work: Work
    rows: Rows  # of its queries, in registers


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
    units, columns = ((1, 1), ROW_UNIT) if interpret is None else ((config.block_q, config.block_kv), COLUMN_UNIT)
    q, dout = (padded(x, units[0], columns) for x in (operands.q, dout))
    k, v = (padded(x, units[1], columns) for x in (operands.k, operands.v))
    head_dim, value_head_dim = padded_head_dims(shapes, COLUMN_UNIT)
    held = shapes._replace(head_dim=head_dim, value_head_dim=value_head_dim)
    instructions = Compiled() if interpret is None else Interpreted()
    plan = Plan(spec, held, q.dtype, config, instructions, rows.m is not None)
    work = jnp.asarray(schedule.work_items(spec, operands, config))
    dscale = None if operands.scale is None else jax.new_ref(jnp.zeros(rows.delta.shape, jnp.float32))
    matrix = functools.partial(memory.matrix, dtype=plan.dtype)
    queries, keys = (config.block_q,), (config.num_stages, config.block_kv)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=(Buffers(*(matrix((*n, dim)) for n in (queries, keys) for dim in (head_dim, value_head_dim))),),
        grid=(work.shape[0],),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="flash_attention_backward_queries_sm80",
    )
    dq = kernel(backward_plan.inputs(spec, operands, Arrays(work, q, k, v, dout, rows), dscale=dscale, dbias=dbias))
    dq = dq[:, : shapes.q_len, :, : shapes.head_dim]
    return dq, None if dscale is None else jnp.sum(jax.freeze(dscale))


def _kernel(plan: Plan, inputs: Inputs, target: Ref, buffers: Buffers) -> None:
    instructions, config = plan.instructions, plan.config
    item = schedule.load_item(inputs.work, lax.axis_index("cta"), jnp.int32(0))
    item = WorkItem(*map(instructions.uniform, item))
    q_base = item.qi * config.block_q
    queries = CopiedRows(item.batch, q_base, item.head, config.block_q)
    instructions.load(inputs.q, queries, buffers.q)
    instructions.load(inputs.dout, queries, buffers.dout)
    span = Span(0, config.block_q, q_base, clip=False)
    rows = jax.tree.map(lambda x: instructions.take(x.at[item.batch, item.head], (span,)), inputs.rows)
    worker = Worker(plan, inputs, buffers, backward_plan.work_of(plan, inputs, item, q_base), rows)
    dq = _walk(worker)
    instructions.wait_for_copies(0)  # queries that read no key have not been waited for
    if inputs.dscale is not None:  # the sum of ds * s over all pairs, with s = q.k
        instructions.commit()
        instructions.add(inputs.dscale.at[item.batch, item.head], (q_base,), row_products(buffers.q, dq))
    instructions.commit()  # the queries have been read
    buffers.q[...] = (dq * worker.work.scores.scale).astype(plan.dtype)
    instructions.commit()
    instructions.store(buffers.q, target, queries)


def _walk(worker: Worker) -> jax.Array:
    """Over the item's key blocks: the masked ones, then the unmasked ones. Returns dQ, without the scale."""
    plan, item = worker.plan, worker.work.item
    shape = plan.config.block_q, plan.shapes.head_dim
    step = functools.partial(_step, worker)
    dq = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    _copy(worker, jnp.int32(0))
    first_unmasked = jnp.int32(0)
    if plan.some_masked:
        first_unmasked = schedule.first_unmasked(item)
        dq = lax.fori_loop(0, first_unmasked, functools.partial(step, masked=True), dq)
    return lax.fori_loop(first_unmasked, item.kv_end - item.kv_start, functools.partial(step, masked=False), dq)


def _copy(worker: Worker, step: jax.Array) -> None:
    plan, inputs, buffers, item = worker.plan, worker.inputs, worker.buffers, worker.work.item

    @pl.when(step < item.kv_end - item.kv_start)
    def _() -> None:
        block_kv = plan.config.block_kv
        kv_head = lax.div(item.head, jnp.int32(plan.shapes.q_heads_per_kv_head))
        rows = CopiedRows(item.batch, schedule.selected_key_block(item, step) * block_kv, kv_head, block_kv)
        for source, buffer in ((inputs.k, buffers.k), (inputs.v, buffers.v)):
            plan.instructions.load(source, rows, buffer.at[_slot(plan, step)])

    plan.instructions.commit_copies()


def _slot(plan: Plan, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(plan.config.num_stages))


def _step(worker: Worker, step: jax.Array, dq: jax.Array, *, masked: bool) -> jax.Array:
    copy = functools.partial(_copy, worker)
    return backward_plan.with_next(worker.plan, copy, step, lambda: _add(worker, step, dq, masked=masked))


def _add(worker: Worker, step: jax.Array, dq: jax.Array, *, masked: bool) -> jax.Array:
    """dQ with the part of one block of keys: the gradient by q * scale."""
    plan, inputs, buffers, work, rows = worker
    instructions, slot = plan.instructions, _slot(plan, step)
    index = schedule.tile_index(plan.config, work, schedule.selected_key_block(work.item, step), masked=masked)
    tile = TileScores(plan.spec, work.scores, index, instructions)
    scores = instructions.product(buffers.q, buffers.k.at[slot], transposed=True)
    spread = lambda row: None if row is None else softmax.rows_like(row, scores)  # noqa: E731
    p, derivative = weights_of(plan, tile, scores, Rows(spread(rows.lse_log2), None, spread(rows.m)), masked=masked)
    dp = instructions.product(buffers.dout, buffers.v.at[slot], transposed=True)
    ds = dlogits(plan, tile, p, dp, softmax.rows_like(rows.delta, p), masked=masked)
    tile.add_bias_gradient(inputs.dbias, ds)
    if derivative is not None:
        ds = times(ds, derivative)
    return instructions.product(ds.astype(plan.dtype), buffers.k.at[slot], dq)
