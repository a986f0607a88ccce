"""Decoding for Hopper: a few new tokens against a long cache (Flash-Decoding), limited by memory bandwidth.

The query heads of a key head and all new tokens fill the rows of one tile of 64, so that a key is read once. A CTA is a
single warpgroup: it starts copies of key and value blocks far ahead (TMA), and works on one block after the other, as
the online softmax does. Two CTAs an SM hide each other's waits. The walk over a sequence is cut into splits, each with
a CTA of its own; `decode_combine` merges what they found.

Caches in 8 bits with up to 16 queries of a key head go through decode_warps.py.

Queries stay rows here, as in the forward kernel. Most of the 64 are padding, yet with 64 rows and head dim 128 a key
costs the tensor cores 4 cycles and the exponentials 4, of the 26 that its 512 bytes take to arrive at an SM.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.combine import Partial
from pallas_flash.decode_spec import DecodeOperands, DecodeSpec
from pallas_flash.kernels import junk, matmul, memory, softmax, tile_function, tma, warp_products
from pallas_flash.kernels.sm90 import decode_combine, decode_copies, decode_plan, decode_warps
from pallas_flash.kernels.sm90.decode_config import ROWS, DecodeConfig, padded_head_dims
from pallas_flash.kernels.sm90.decode_plan import Barriers, Buffers, Inputs, Outputs, Plan, Ref, Work, Worker
from pallas_flash.kernels.sm90.decode_state import State, first_state
from pallas_flash.kernels.tile_mask import line
from pallas_flash.kernels.tile_scores import ScoreOperands
from pallas_flash.spec import LN2


def run(
    spec: DecodeSpec, operands: DecodeOperands, config: DecodeConfig, splits: int, *, interpret: Any = None
) -> Partial:
    """interpret: `plgpu.InterpretGPUParams` to run the kernel in Pallas' interpreter."""
    plan = _plan(spec, operands, config, splits, interpreted=interpret is not None)
    shapes = operands.shapes
    score_mod = () if spec.score_mod is None else tile_function.operands(spec.score_mod, operands.score_mod)
    inputs = decode_plan.inputs_of(plan, operands, score_mod)
    if interpret is not None:  # which knows nothing of how TMA clips
        inputs = _padded_for_interpreter(plan, inputs)
    rows = shapes.batch * shapes.q_len * shapes.num_q_heads
    several = () if splits == 1 else (splits,)
    width = shapes.value_head_dim if splits == 1 else decode_combine.width(shapes.value_head_dim)
    outputs = Outputs(
        jax.ShapeDtypeStruct((*several, rows, width), plan.dtype if splits == 1 else jnp.float32),
        jax.ShapeDtypeStruct((*several, rows), jnp.float32),
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=(outputs,),
        scratch_types=(decode_plan.buffers(plan), decode_plan.barriers(plan)),
        grid=(shapes.batch * splits * shapes.num_kv_heads * plan.row_tiles,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="flash_decode_sm90",
    )
    ((out, lse),) = kernel(inputs)
    if splits > 1:
        out, lse = decode_combine.run(plan, inputs, Outputs(out, lse), interpret=interpret)
    return Partial(out.reshape(*operands.q.shape[:3], -1), lse.reshape(operands.q.shape[:3]))


def _plan(spec: DecodeSpec, operands: DecodeOperands, config: DecodeConfig, splits: int, *, interpreted: bool) -> Plan:
    shapes = operands.shapes
    head_dim, value_head_dim = padded_head_dims(shapes, operands.k.dtype)
    return Plan(
        spec=decode_plan.as_attention(spec),
        shapes=shapes._replace(head_dim=head_dim, value_head_dim=value_head_dim),
        value_head_dim=shapes.value_head_dim,
        dtype=operands.q.dtype,
        cache_dtype=operands.k.dtype,
        page_size=None if operands.page_table is None else operands.k.shape[1],
        pages=operands.k.shape[0],
        splits=splits,
        config=config,
        tensor_cores=matmul.Interpreted() if interpreted else matmul.Wgmma(),
        warp_products=warp_products.Interpreted() if interpreted else warp_products.Compiled(),
    )


def _padded_for_interpreter(plan: Plan, inputs: Inputs) -> Inputs:
    rows = 1 if plan.page_size else plan.config.block_kv
    q, k = tma.padded(inputs.q, ROWS, plan.shapes.head_dim), tma.padded(inputs.k, rows, plan.shapes.head_dim)
    return inputs._replace(q=q, k=k, v=tma.padded(inputs.v, rows, plan.shapes.value_head_dim))


def _kernel(plan: Plan, inputs: Inputs, outputs: Outputs, buffers: Buffers, barriers: Barriers) -> None:
    if plan.config.early_combine and plan.splits > 1:
        plgpu.griddepcontrol_launch_dependents()
    work = _work(plan, inputs, lax.axis_index("cta"))
    worker = Worker(plan, inputs, buffers, barriers, work)
    if plan.splits == 1:
        _attend(worker, outputs)
    else:  # `decode_combine` counts the first split as used, with keys or without
        pl.when((work.blocks.steps > 0) | (work.split == 0))(lambda: _attend(worker, outputs))


def _work(plan: Plan, inputs: Inputs, cta: jax.Array) -> Work:
    """Those that run at the same time read the same tokens of neighbouring heads, which lie side by side."""
    cta, qi = lax.div(cta, jnp.int32(plan.row_tiles)), lax.rem(cta, jnp.int32(plan.row_tiles))
    heads, splits = jnp.int32(plan.shapes.num_kv_heads), jnp.int32(plan.splits)
    cta, kv_head = lax.div(cta, heads), lax.rem(cta, heads)
    batch, split = lax.div(cta, splits), lax.rem(cta, splits)
    length, q_offset = decode_plan.length_of(plan, inputs, batch)
    scale = plan.spec.scale if inputs.scale is None else inputs.scale[0]
    scores = ScoreOperands(scale=scale, score_mod=inputs.score_mod, mask=((),))
    blocks = plan.split_blocks(plan.walk(length, q_offset, qi), split)
    return Work(batch, kv_head, qi, split, length, q_offset, blocks, scores)


def _attend(worker: Worker, outputs: Outputs) -> None:
    plan, _, buffers, barriers, work = worker
    if buffers.junk is not None:
        junk.forget(buffers.junk, jnp.int32(0), plan.tensor_cores)
    decode_copies.start(worker)
    plgpu.barrier_wait(barriers.q.at[0])

    if plan.by_warps:
        _store(worker, outputs, *decode_warps.attend(worker))
        return

    def walk(acc: Ref) -> tuple[jax.Array, softmax.RowStatistics]:
        step = functools.partial(_step, worker, acc)
        masked = work.blocks.masked_steps
        state = lax.fori_loop(0, masked, functools.partial(step, masked=True), first_state(worker))
        state = lax.fori_loop(masked, work.blocks.steps, functools.partial(step, masked=False), state)
        return plan.tensor_cores.load(acc, pending=0), state.stats

    shape = (ROWS, plan.shapes.value_head_dim)
    out, stats = plan.tensor_cores.accumulator(walk, shape, buffers.acc)
    _store(worker, outputs, out, softmax.totals(stats))


def _step(worker: Worker, acc: Ref, step: jax.Array, state: State, *, masked: bool) -> State:
    """S = Q K^T, the softmax, O += P V on one block."""
    plan, inputs, buffers, _, work = worker
    tensor_cores = plan.tensor_cores
    keys, values = decode_copies.streams(worker)
    # What must come from device memory before a copy can start, or a block be worked on, comes a step early.
    next_k, next_v = (decode_copies.places(worker, step + stream.stages) for stream in (keys, values))

    k = _landed(worker, keys, buffers.k_converted, step)
    scores = tensor_cores.landed(tensor_cores.issue(buffers.q.at[0], k), pending=0)
    decode_copies.copy(worker, keys, step + keys.stages, next_k)
    if state.k_scale is not None:
        k_scale = decode_copies.spread(state.k_scale, buffers.scales.at[0], plan.config.block_kv)
        scores = scores * softmax.columns_like(k_scale, scores)
    k_scale = decode_copies.scale(worker, inputs.k_scale, step + 1)
    tile = plan.tile(work, step)
    if not plan.raw_scores:
        scores = tile.logits(scores)
    if masked:
        scores = tile.masked(scores, None)

    out = tensor_cores.load(acc, pending=0)
    stats, p, out = softmax.advance(state.stats, scores, out, plan.units, plan.must_rescale)
    tensor_cores.store(acc, out)
    if state.v_scale is not None:
        v_scale = decode_copies.spread(state.v_scale, buffers.scales.at[1], plan.config.block_kv)
        scaled = p * softmax.columns_like(v_scale, p)
        p = jnp.where(p > 0, scaled, 0.0) if masked else scaled  # the scale of a hidden key may be NaN
    v_scale = decode_copies.scale(worker, inputs.v_scale, step + 1)

    p16 = lax.optimization_barrier(p.astype(plan.weights_dtype))
    v = _landed(worker, values, buffers.v_converted, step)
    if masked and buffers.junk is not None:
        _clean(worker, v, step)
    tensor_cores.start(acc, p16, v)
    tensor_cores.wait(0)
    decode_copies.copy(worker, values, step + values.stages, next_v)
    return State(stats, k_scale, v_scale)


def _landed(worker: Worker, stream: decode_copies.Stream, converted: Ref | None, step: jax.Array) -> Ref:
    """The step's block in 16 bits, once it is there."""
    slot = stream.slot(step)
    plgpu.barrier_wait(stream.landed.at[slot])
    if converted is None:
        return stream.buffer.at[slot]
    width = memory.tile_columns(stream.buffer.shape, stream.buffer.dtype)
    row_bytes = memory.tile_columns(converted.shape, converted.dtype) * 2
    layout = plgpu.Layout.SMEM_GMEM_COPY((worker.plan.config.block_kv, width), converted.dtype, row_bytes)

    @pl.loop(0, stream.buffer.shape[-1] // width)
    def _(index: jax.Array) -> None:
        part = pl.ds(pl.multiple_of(index * width, width), width)
        cached = plgpu.layout_cast(stream.buffer[slot, :, part], layout)
        converted[0, :, part] = _exactly(cached, converted.dtype)

    plgpu.commit_smem()
    return converted.at[0]


def _exactly(cached: jax.Array, dtype: Any) -> jax.Array:
    """8-bit values in 16 bits, by conversions that the hardware has."""
    if cached.dtype == jnp.int8:
        cached = cached.astype(jnp.bfloat16)
    return cached if cached.dtype == dtype else cached.astype(jnp.float32).astype(dtype)


def _clean(worker: Worker, values: Ref, step: jax.Array) -> None:
    """Make a masked block of values finite, and note which queries take part with one that was not."""
    plan, _, buffers, _, work = worker
    known = buffers.junk
    columns = memory.tile_columns(values.shape, values.dtype, contract_rows=True)
    junk.clean(values, columns, known, 0, plan.tensor_cores)

    junk.note_readers(lambda: plan.tile(work, step), known, 0, jnp.int32(0))


def _store(worker: Worker, outputs: Outputs, out: jax.Array, stats: softmax.RowTotals) -> None:
    plan, inputs, buffers, _, work = worker
    final = softmax.finish(stats, plan.units)
    lse = final.m + jnp.log2(final.l) * LN2
    normalizer = final.normalizer
    rows = _output_rows(plan, work)
    if buffers.junk is not None:
        normalizer += junk.of_readers(buffers.junk, jnp.int32(0))
    if plan.splits == 1 and inputs.sinks is not None:
        head = lax.rem(jnp.maximum(rows, 0), jnp.full(rows.shape, plan.shapes.num_q_heads, jnp.int32))
        sinks = plan.tensor_cores.gather(inputs.sinks, (head,), plgpu.Layout.WGMMA.reduce(1))
        lse, weight = decode_combine.with_sink(lse, sinks)
        normalizer *= weight
    out = (out * softmax.rows_like(normalizer, out)).astype(outputs.out.dtype)
    target = outputs if plan.splits == 1 else Outputs(*(x.at[work.split] for x in outputs))
    plan.tensor_cores.scatter(target.out, rows, out)
    plan.tensor_cores.scatter(target.lse, rows, lse)


def _output_rows(plan: Plan, work: Work) -> jax.Array:
    """Where each row of the tile stands in the output; -1: nowhere."""
    shapes, group = plan.shapes, plan.shapes.q_heads_per_kv_head
    row = line(ROWS, 0) + work.qi * ROWS
    token, head = (
        lax.div(row, jnp.full(row.shape, group, jnp.int32)),
        lax.rem(row, jnp.full(row.shape, group, jnp.int32)),
    )
    place = (work.batch * shapes.q_len + token) * shapes.num_q_heads + work.kv_head * group + head
    return jnp.where(row < plan.rows, place, -1)
