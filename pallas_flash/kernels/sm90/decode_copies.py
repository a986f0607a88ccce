"""Copies of the Hopper decoding kernel: blocks of keys and values from the cache, or from its pages (TMA)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import tma, warp_products
from pallas_flash.kernels.sm90.decode_config import ROWS, THREADS
from pallas_flash.kernels.sm90.decode_plan import Ref, Worker

Place = tuple[Any, Any]  # sequence or page, and row in it


class Stream(NamedTuple):
    """Blocks of keys, or of values, on their way through a ring of buffers."""

    source: Ref
    buffer: Ref
    landed: Ref
    contract_rows: bool

    @property
    def stages(self) -> int:
        return self.buffer.shape[0]

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.stages))


def streams(worker: Worker) -> tuple[Stream, Stream]:
    plan, inputs, buffers, barriers, _ = worker
    return (
        Stream(inputs.k, buffers.k, barriers.k, contract_rows=False),
        Stream(inputs.v, buffers.v, barriers.v, contract_rows=not plan.converts),
    )


def start(worker: Worker) -> None:
    """Fill every buffer."""
    plan, inputs, buffers, barriers, work = worker
    rows = tma.Rows(work.batch * plan.shapes.num_kv_heads + work.kv_head, work.qi * ROWS, 0, plan.q_rows)
    tma.load(inputs.q, rows, buffers.q, barriers.q, 0)
    of_kind = streams(worker)
    for step in range(max(stream.stages for stream in of_kind)):
        found = places(worker, jnp.int32(step))
        for stream in of_kind:
            if step < stream.stages:
                copy(worker, stream, jnp.int32(step), found)


def places(worker: Worker, step: Any) -> list[Place]:
    """Where the parts of a step's block stand. What lies behind the sequence is not looked up: a part that does stands
    for the last one that does not."""
    plan, inputs, _, _, work = worker
    base = work.blocks.of_step(step) * plan.config.block_kv
    if inputs.page_table is None:
        return [(work.batch, base)]
    size, unit, found = jnp.int32(plan.page_size), jnp.int32(plan.copy_rows), []
    last = lax.div(work.length - 1, unit) * unit
    for part in range(plan.copies):
        row = jnp.minimum(base + part * plan.copy_rows, last)
        page = inputs.page_table[work.batch, lax.div(row, size)]
        found.append((jnp.minimum(jnp.maximum(page, 0), plan.pages - 1), lax.rem(row, size)))
    return found


def copy(worker: Worker, stream: Stream, step: Any, found: Sequence[Place]) -> None:
    """Start filling the buffer of a step's block, if there is one."""
    plan, work = worker.plan, worker.work

    @pl.when(step < work.blocks.steps)
    def _() -> None:
        for part, (sequence, row) in enumerate(found):
            rows = tma.Rows(sequence, row, work.kv_head, plan.copy_rows)
            tma.load(
                stream.source, rows, stream.buffer, stream.landed, stream.slot(step),
                contract_rows=stream.contract_rows, to_row=part * plan.copy_rows,
            )  # fmt: skip


def scale(worker: Worker, source: Ref | None, step: Any) -> jax.Array | None:
    """What the keys, or the values, of a step's block are to be multiplied with: float32, one for each thread's key or
    one for all. A key behind the sequence has that of the last one, and the step behind the last one that of some
    other."""
    plan, inputs, _, _, work = worker
    if source is None:
        return None
    of_token, of_page = source.shape[1] > 1, inputs.page_table is not None
    if not (of_token or of_page):
        return source[work.batch, 0, work.kv_head]
    layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
    full = lambda value: plgpu.layout_cast(jnp.full((THREADS,), value, jnp.int32), layout)  # noqa: E731
    gather = functools.partial(plan.tensor_cores.gather, layout=layout)
    key = plgpu.layout_cast(lax.iota(jnp.int32, THREADS), layout)
    if plan.by_warps:
        key = warp_products.key_of_thread(key, plan.config.block_kv)
    else:
        key = lax.rem(key, full(plan.config.block_kv))
    row = jnp.minimum(key + work.blocks.of_step(step) * plan.config.block_kv, jnp.maximum(work.length - 1, 0))
    if not of_page:
        return gather(source, (work.batch, row, work.kv_head))
    page = gather(inputs.page_table, (work.batch, lax.div(row, full(plan.page_size))))
    page = jnp.minimum(jnp.maximum(page, 0), plan.pages - 1)
    return gather(source, (page, lax.rem(row, full(plan.page_size)) if of_token else jnp.int32(0), work.kv_head))


def spread(scale: jax.Array | None, buffer: Ref, keys: int) -> jax.Array | None:
    """From one key a thread to one value a column of a tile."""
    if scale is None or scale.ndim == 0:
        return scale
    buffer[...] = scale
    return plgpu.layout_cast(buffer[pl.ds(0, keys)], plgpu.Layout.WGMMA.reduce(0))
