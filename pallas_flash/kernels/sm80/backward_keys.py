"""dK and dV for every GPU since Ampere, without a sum over CTAs: bit-equal on repeats; and if wanted dQ, with one.

A CTA is one warpgroup. It holds 64 or 128 keys with their values and walks over the queries, of all the query heads
that share the keys, in blocks. Tiles have keys as rows: P^T and dS^T stay in registers, where they are the left
operands of dV += P^T dO and dK += dS^T Q. For dQ a block's dS^T goes through shared memory, part by part: dS K of the
whole block is then added to float32 in device memory, in no fixed order, as FlashAttention-2 does.
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
from pallas_flash.kernels.sizes import ROW_UNIT, padded_head_dims, round_up
from pallas_flash.kernels.sm80 import backward_pair, backward_plan
from pallas_flash.kernels.sm80.backward_plan import Arrays, Block, Inputs, KeysPlan, Ref, Sums, Work
from pallas_flash.kernels.sm80.config import COLUMN_UNIT, KeysConfig
from pallas_flash.kernels.sm80.instructions import Compiled, Interpreted
from pallas_flash.kernels.tile_scores import TileScores
from pallas_flash.kernels.tma import Rows as CopiedRows
from pallas_flash.kernels.tma import padded
from pallas_flash.spec import AttentionSpec, Operands, Shapes


class Buffers(NamedTuple):
    k: Ref  # [block_kv, H]; at the end dK
    v: Ref  # [block_kv, Hv]; at the end dV
    q: Ref  # [stages, block_q, H]
    dout: Ref  # [stages, block_q, Hv]
    rows: Rows  # [stages, block_q]
    ds: Ref | None  # dS^T of a block: [parts, block_kv, columns]; None: another kernel makes dQ


class Worker(NamedTuple):
    """A CTA with its work, and everything that it works with."""

    plan: KeysPlan
    inputs: Inputs
    buffers: Buffers
    work: Work


class Gradient(NamedTuple):
    dq: jax.Array | None  # float32, still without the scale; None: another kernel makes it
    dk: jax.Array
    dv: jax.Array


def run(
    spec: AttentionSpec,
    operands: Operands,
    dout: jax.Array,
    rows: Rows,
    config: KeysConfig,
    *,
    dbias: Any = None,
    interpret: Any = None,
) -> Gradient:
    """dK and dV, and dQ if config.fused.

    dbias: a reference to float32 zeros [B, N, S rounded up], which receives the gradient of a bias [.., 1, S].
    interpret: `plgpu.InterpretGPUParams`, to interpret it.
    """
    shapes = operands.shapes
    unit = COLUMN_UNIT * config.warpgroups
    units, columns = ((1, 1), ROW_UNIT) if interpret is None else ((config.block_q, config.block_kv), unit)
    columns = unit if config.warpgroups > 1 else columns  # each has as many of them
    q, dout = (padded(x, units[0], columns) for x in (operands.q, dout))
    k, v = (padded(x, units[1], columns) for x in (operands.k, operands.v))
    head_dim, value_head_dim = padded_head_dims(shapes, unit)
    held = shapes._replace(head_dim=head_dim, value_head_dim=value_head_dim)
    instructions = Compiled() if interpret is None else Interpreted()
    plan = KeysPlan(spec, held, q.dtype, config, instructions, rows.m is not None)
    work = jnp.asarray(schedule.work_items(spec, operands, config))
    dq = _zeros(plan, interpreted=interpret is not None) if config.fused else None
    call = functools.partial(backward_plan.inputs, spec, operands, Arrays(work, q, k, v, dout, rows), dq=dq)
    body, buffers = _kernel, _buffers(plan)
    if config.warpgroups > 1:
        body, buffers = backward_pair.kernel, backward_pair.buffers(plan, interpreted=interpret is not None)
    dk_type, dv_type = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v))

    def kernel(sums: Sums, dbias: Any) -> Sums:
        (found,) = plgpu.kernel(
            functools.partial(body, plan),
            out_type=(sums,),
            scratch_types=(buffers,),
            grid=(work.shape[0],),
            grid_names=("cta",),
            num_threads=config.warpgroups,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
            interpret=interpret,
            kernel_name="flash_attention_backward_keys_sm80",
        )(call(dbias=dbias))
        return found

    if config.apart:
        dk, dv = kernel(Sums(dk_type, None), dbias).dk, kernel(Sums(None, dv_type), None).dv
    else:
        dk, dv = kernel(Sums(dk_type, dv_type), dbias)
    keys = slice(shapes.kv_len)
    dk, dv = dk[:, keys, :, : shapes.head_dim], dv[:, keys, :, : shapes.value_head_dim]
    return Gradient(None if dq is None else _total(jax.freeze(dq), shapes), dk, dv)


def _zeros(plan: KeysPlan, *, interpreted: bool) -> Any:
    """A reference to what dQ is added up in: [slices, B, T rounded up, N, H]. The interpreter has no addition that
    several CTAs could share: each key tile has a slice of its own there."""
    shapes, config = plan.shapes, plan.config
    slices = -(-shapes.kv_len // config.block_kv) if interpreted else 1
    rows = round_up(shapes.q_len, config.block_q)
    return jax.new_ref(jnp.zeros((slices, shapes.batch, rows, shapes.num_q_heads, shapes.head_dim), jnp.float32))


def _total(dq: jax.Array, shapes: Shapes) -> jax.Array:
    dq = dq[:, :, : shapes.q_len, :, : shapes.head_dim]
    return dq.sum(0) if dq.shape[0] > 1 else dq[0]


def _buffers(plan: KeysPlan) -> Buffers:
    matrix = functools.partial(memory.matrix, dtype=plan.dtype)
    keys, queries = (plan.config.block_kv,), (plan.config.num_stages, plan.config.block_q)
    dims = plan.shapes.head_dim, plan.shapes.value_head_dim
    k, v, q, dout = (matrix((*n, dim)) for n in (keys, queries) for dim in dims)
    rows = memory.rows(queries)
    columns = plan.config.columns
    ds = matrix((plan.config.block_q // columns, plan.config.block_kv, columns)) if plan.config.fused else None
    return Buffers(k, v, q, dout, Rows(rows, rows, rows if plan.any_logits else None), ds)


def _kernel(plan: KeysPlan, inputs: Inputs, targets: Sums, buffers: Buffers) -> None:
    instructions, config = plan.instructions, plan.config
    item = schedule.load_item(inputs.work, lax.axis_index("cta"), 0)
    item = WorkItem(*map(instructions.uniform, item))
    keys = CopiedRows(item.batch, item.ki * config.block_kv, item.kv_head, config.block_kv)
    instructions.load(inputs.k, keys, buffers.k)
    instructions.load(inputs.v, keys, buffers.v)
    worker = Worker(plan, inputs, buffers, backward_plan.work_of(plan, inputs, item))
    dims = plan.shapes.head_dim, plan.shapes.value_head_dim
    sums = Sums(*(None if x is None else backward_plan.zeros(plan, dim) for x, dim in zip(targets, dims, strict=True)))
    steps = backward_plan.Steps(functools.partial(_copy, worker), functools.partial(_step, worker), instructions.commit)
    scaled = backward_plan.scaled(plan, worker.work, backward_plan.walk(plan, item, steps, sums))
    instructions.wait_for_copies(0)  # keys that no query reads have not been waited for
    instructions.commit()  # keys and values have been read
    staged = [x for x in zip(targets, (buffers.k, buffers.v), scaled, strict=True) if x[0] is not None]
    for _, buffer, value in staged:
        buffer[...] = value.astype(plan.dtype)
    instructions.commit()
    for target, buffer, _ in staged:
        instructions.store(buffer, target, keys)


def _copy(worker: Worker, head: jax.Array, step: jax.Array) -> None:
    plan, inputs, buffers, work = worker
    item, instructions, block_q = work.item, plan.instructions, plan.config.block_q

    @pl.when(step < item.q_end - item.q_start)
    def _() -> None:
        slot = _slot(plan, step)
        rows = CopiedRows(item.batch, schedule.query_block(item, step) * block_q, head, block_q)
        instructions.load(inputs.q, rows, buffers.q.at[slot])
        instructions.load(inputs.dout, rows, buffers.dout.at[slot])
        for source, buffer in zip(inputs.rows, buffers.rows, strict=True):
            if source is not None:
                instructions.load_rows(source.at[item.batch, head], rows.start, buffer.at[slot])

    instructions.commit_copies()


def _slot(plan: KeysPlan, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(plan.config.num_stages))


def _step(worker: Worker, block: Block, sums: Sums) -> Sums:
    copy = functools.partial(_copy, worker, block.head)
    return backward_plan.with_next(worker.plan, copy, block.step, lambda: _add(worker, block, sums))


def _add(worker: Worker, block: Block, sums: Sums) -> Sums:
    """dK and dV with the part of one block of queries, without the scale and the dropout's factor; dQ is added to."""
    plan, inputs, buffers, work = worker
    for part in range(plan.config.block_q // plan.config.columns):
        sums = _add_part(worker, block, part, sums)
    if buffers.ds is not None:
        plan.instructions.commit()
        dq = plan.instructions.product_by_columns(buffers.ds, buffers.k)
        backward_plan.add_dq(plan, inputs, work, block, dq)
    return sums


def _add_part(worker: Worker, block: Block, part: int, sums: Sums) -> Sums:
    """Of as many queries as have their scores in registers at the same time."""
    plan, inputs, buffers, work = worker
    instructions, slot, columns = plan.instructions, _slot(plan, block.step), plan.config.columns
    dk, dv = sums
    here = lambda ref: ref.at[slot, pl.ds(part * columns, columns)]  # noqa: E731
    tile = TileScores(plan.spec, work.scores, backward_plan.tile_index(plan, work, block, part), instructions)
    scores = instructions.product(buffers.k, here(buffers.q), transposed=True)
    of_columns = lambda ref: backward_plan.spread(here(ref), scores)  # noqa: E731
    m = None if buffers.rows.m is None else of_columns(buffers.rows.m)
    rows = Rows(of_columns(buffers.rows.lse_log2), None, m)
    p, derivative = weights_of(plan, tile, scores, rows, masked=block.masked)
    if dv is not None:
        dv = instructions.product(tile.kept(p).astype(plan.dtype), here(buffers.dout), dv)
    if dk is not None:
        dp = instructions.product(buffers.v, here(buffers.dout), transposed=True)
        ds = dlogits(plan, tile, p, dp, of_columns(buffers.rows.delta), masked=block.masked)
        tile.add_bias_gradient(inputs.dbias, ds)
        if derivative is not None:
            ds = times(ds, derivative)
        ds = ds.astype(plan.dtype)
        if buffers.ds is not None:
            instructions.keep(ds, buffers.ds.at[part])
        dk = instructions.product(ds, here(buffers.q), dk)
    return Sums(dk, dv)
