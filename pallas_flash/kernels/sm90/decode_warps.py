"""Decoding from caches in 8 bits, up to 16 queries of a key head: each warp works on keys of its own.

Shared memory is what limits 8 bits: a key of 256 bytes takes 13 cycles to arrive, and as much to be converted there and
read again. Here it is written once and read once, by ldmatrix, and a warp waits for no other.
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

from pallas_flash.kernels import softmax, warp_products
from pallas_flash.kernels.sm90 import decode_copies
from pallas_flash.kernels.sm90.decode_config import MERGED_COLUMNS, ROWS
from pallas_flash.kernels.sm90.decode_plan import Worker
from pallas_flash.kernels.sm90.decode_state import State, first_state, tile_of

Ref = Any


def attend(worker: Worker) -> tuple[jax.Array, softmax.RowTotals]:
    """Unnormalised, of all keys of the CTA."""
    plan, _, buffers, _, work = worker
    queries = plan.warp_products.queries(buffers.q.at[0])
    step = functools.partial(_step, worker, queries)
    masked = work.blocks.masked_steps
    state = tile_of(plan.shapes.value_head_dim, 0.0), first_state(worker)
    state = lax.fori_loop(0, masked, functools.partial(step, masked=True), state)
    out, state = lax.fori_loop(masked, work.blocks.steps, functools.partial(step, masked=False), state)
    return _gathered(worker, plan.warp_products.in_order(out), softmax.totals(state.stats))


def _step(
    worker: Worker, queries: jax.Array, step: jax.Array, carry: tuple[jax.Array, State], *, masked: bool
) -> tuple[jax.Array, State]:
    """As in decode_kernel.py, of each warp."""
    plan, inputs, _, _, work = worker
    out, state = carry
    products = plan.warp_products
    keys, values = decode_copies.streams(worker)
    next_k, next_v = (decode_copies.places(worker, step + stream.stages) for stream in (keys, values))

    scores = products.scores(queries, _landed(keys, step))
    scores = _scaled(worker, scores, state.k_scale)
    k_scale = decode_copies.scale(worker, inputs.k_scale, step + 1)
    tile = plan.tile(work, step)
    if not plan.raw_scores:
        scores = tile.logits(scores)
    if masked:
        scores = tile.masked(scores, None)

    stats, p, out = softmax.advance(state.stats, scores, out, plan.units, plan.must_rescale)
    scaled = _scaled(worker, p, state.v_scale)
    p = jnp.where(p > 0, scaled, 0.0) if masked and state.v_scale is not None else scaled  # a hidden key's may be NaN
    v_scale = decode_copies.scale(worker, inputs.v_scale, step + 1)

    seen = None
    if masked:
        pairs = jnp.where(scores > -jnp.inf, 1.0, 0.0).astype(plan.weights_dtype)
        seen = warp_products.Seen(pairs, alike=plan.queries_are_alike)
    out = products.add(out, p.astype(plan.weights_dtype), _landed(values, step), seen)
    decode_copies.copy(worker, keys, step + keys.stages, next_k)
    decode_copies.copy(worker, values, step + values.stages, next_v)
    return out, State(stats, k_scale, v_scale)


def _landed(stream: decode_copies.Stream, step: jax.Array) -> Ref:
    slot = stream.slot(step)
    plgpu.barrier_wait(stream.landed.at[slot])
    return stream.buffer.at[slot]


def _scaled(worker: Worker, tile: jax.Array, scale: jax.Array | None) -> jax.Array:
    if scale is None or scale.ndim == 0:
        return tile if scale is None else tile * scale
    return tile * worker.plan.warp_products.columns(scale, tile.shape[1])


def _gathered(worker: Worker, out: jax.Array, stats: softmax.RowTotals) -> tuple[jax.Array, softmax.RowTotals]:
    """What the warps found together: rows 0 to 15 are right."""
    units = worker.plan.units
    shift = _over_warps(worker, jnp.maximum, stats.shift)
    alpha = jnp.exp2(units.log2(stats.shift - shift))
    out *= softmax.rows_like(alpha, out)
    parts = [out[:, first : first + MERGED_COLUMNS] for first in range(0, out.shape[1], MERGED_COLUMNS)]
    out = jnp.concatenate([_over_warps(worker, jnp.add, part) for part in parts], axis=1)
    m, total = _over_warps(worker, jnp.maximum, stats.m), _over_warps(worker, jnp.add, stats.l * alpha)
    return out, softmax.RowTotals(m, shift, total)


def _over_warps(worker: Worker, operation: Callable[[jax.Array, jax.Array], jax.Array], part: jax.Array) -> jax.Array:
    """Of one value a row, or a tile. The buffer holds the rows twice, so that each warp finds those of the others at
    the same distances from its own."""
    buffer = worker.buffers.merged_rows if part.ndim == 1 else worker.buffers.merged
    layout = plgpu.Layout.WGMMA.reduce(1) if part.ndim == 1 else plgpu.Layout.WGMMA
    worker.plan.tensor_cores.commit()  # what was there has been read
    for copy in range(2):
        buffer[pl.ds(copy * ROWS, ROWS)] = part
    worker.plan.tensor_cores.commit()
    starts = range(0, ROWS, warp_products.ROWS)
    return functools.reduce(operation, (plgpu.layout_cast(buffer[pl.ds(start, ROWS)], layout) for start in starts))
