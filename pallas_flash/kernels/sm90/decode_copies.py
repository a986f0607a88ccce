"""Copies of the Hopper decoding kernel: blocks of keys and values from the cache, or from its pages (TMA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash.kernels import tma
from pallas_flash.kernels.sm90.decode_config import ROWS
from pallas_flash.kernels.sm90.decode_plan import Ref, Worker
from pallas_flash.kernels.tile_mask import line

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
    rows = tma.Rows(work.batch * plan.shapes.num_kv_heads + work.kv_head, work.qi * ROWS, 0, ROWS)
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


class Scales(NamedTuple):
    """What the keys, and the values, of a block are to be multiplied with: float32, for each or for all of them."""

    k: jax.Array | None
    v: jax.Array | None


def scales(worker: Worker, step: Any) -> Scales:
    """Those of a step's block. A key behind the sequence has that of the last one."""
    plan, inputs, _, _, work = worker
    if inputs.k_scale is None and inputs.v_scale is None:
        return Scales(None, None)
    # The step behind the last one reads some block's again.
    base = work.blocks.of_step(step) * plan.config.block_kv
    row = jnp.minimum(line(plan.config.block_kv, 1) + base, work.length - 1)
    sequence = work.batch
    if inputs.page_table is not None:
        size = jnp.full(row.shape, plan.page_size, jnp.int32)
        page = plan.tensor_cores.gather(inputs.page_table, (work.batch, lax.div(row, size)), axis=1)
        sequence, row = jnp.minimum(jnp.maximum(page, 0), plan.pages - 1), lax.rem(row, size)

    def read(source: Ref | None) -> jax.Array | None:
        if source is None:
            return None
        place = (sequence, row if source.shape[1] > 1 else jnp.int32(0), work.kv_head)
        lines = any(index.ndim for index in place)
        return plan.tensor_cores.gather(source, place, axis=1) if lines else source[place]

    return Scales(read(inputs.k_scale), read(inputs.v_scale))
