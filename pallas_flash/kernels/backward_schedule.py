"""What a CTA does that works on key tiles, in the backward pass, and in which order: assignment.py deals them out.

Either a CTA takes one work item, and the hardware gives an SM the next CTA, or the grid is persistent. A work item is a
row of eight int32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import tile_ranges
from pallas_flash.kernels import assignment
from pallas_flash.kernels.assignment import Crew, Order
from pallas_flash.spec import AttentionSpec, Operands, Shapes

TILE_OVERHEAD = 1.0  # what a key tile costs besides its query blocks, in query blocks


class Tiles(Protocol):
    """What a kernel's configuration says of its tiles; it must be hashable. num_ctas: persistent ones, or None."""

    @property
    def block_q(self) -> int: ...
    @property
    def block_kv(self) -> int: ...
    @property
    def head_group(self) -> int: ...
    @property
    def num_ctas(self) -> int | None: ...


class WorkItem(NamedTuple):
    """A key tile of one key head and its query blocks [q_start, q_end); [full_start, full_end) of them are unmasked."""

    batch: Any
    kv_head: Any
    ki: Any
    q_start: Any
    q_end: Any
    full_start: Any
    full_end: Any


ITEMS = len(WorkItem._fields)  # the last word of each row: how many items this CTA has


def work_items(spec: AttentionSpec, operands: Operands, config: Tiles) -> Any:
    """int32 [CTAs, most items of a CTA, 8]: a constant where the mask's ranges are known without data."""
    shapes = operands.shapes
    itemsize = operands.k.dtype.itemsize
    dynamic = tile_ranges.depend_on_data(spec)
    xp: Any = jnp if dynamic else np
    if dynamic:
        ranges = tile_ranges.dynamic_ranges(spec, operands, config.block_q, config.block_kv, of="kv")
        blocks = ranges.end - ranges.start
        order = assignment.by_rank(blocks, shapes.batch, _crew(shapes, config, itemsize))
    else:
        ranges = tile_ranges.static_ranges(spec, shapes, config.block_q, config.block_kv, of="kv")
        ranges = tile_ranges.TileRanges(*(np.atleast_2d(x) for x in ranges))
        order = _assigned(spec, shapes, config, itemsize)
    batch, kv_head, ki, counts = order
    start, end, full_start, full_end = (x[batch if x.shape[0] > 1 else 0, ki] for x in ranges)
    if not spec.mask:  # queries behind the last one need none: their lse is infinite. Kernels rely on there being none
        full_start, full_end = start, end
    # Keys behind the last one must be masked: exp2(0 - lse) of theirs may be infinite.
    cut_off = (ki + 1) * config.block_kv > shapes.kv_len
    full_start, full_end = (xp.where(cut_off, end, x) for x in (full_start, full_end))
    item = WorkItem(batch, kv_head, ki, start, end, full_start, full_end)
    fields = (*item, np.broadcast_to(counts[:, None], kv_head.shape))
    return xp.stack([xp.asarray(x, xp.int32) for x in fields], axis=-1)


@functools.lru_cache(maxsize=64)
def _assigned(spec: AttentionSpec, shapes: Shapes, config: Tiles, itemsize: int) -> Order:
    ranges = tile_ranges.static_ranges(spec, shapes, config.block_q, config.block_kv, of="kv")
    costs = (ranges.end - ranges.start) * shapes.q_heads_per_kv_head + TILE_OVERHEAD
    return assignment.by_cost(costs, shapes.batch, _crew(shapes, config, itemsize))


def _crew(shapes: Shapes, config: Tiles, itemsize: int) -> Crew:
    row = (shapes.head_dim + shapes.value_head_dim) * itemsize + shapes.head_dim * 4  # q, dout, float32 dq
    rows = shapes.q_len * shapes.q_heads_per_kv_head
    return Crew(shapes.num_kv_heads, config.head_group, config.num_ctas, rows * row)


def query_block(item: WorkItem, step: jax.Array) -> jax.Array:
    """The query block of a step. They are rotated so that the masked ones behind the unmasked ones come first, then the
    masked ones before them, then the unmasked ones: the first steps are masked, the last ones are not."""
    block = item.full_end + step
    return block - jnp.where(block >= item.q_end, item.q_end - item.q_start, 0)


def masked_steps(item: WorkItem) -> jax.Array:
    return item.q_end - item.q_start - (item.full_end - item.full_start)


def load_count(work: Any, cta: jax.Array) -> jax.Array:
    return work[cta, 0, ITEMS]


def load_item(work: Any, cta: jax.Array, index: Any) -> WorkItem:
    return WorkItem(*(work[cta, index, field] for field in range(ITEMS)))
