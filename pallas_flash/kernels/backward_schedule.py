"""Which CTA works on which key tiles in the backward pass, in which order: those with the most queries first.

Either a CTA takes one work item, and the hardware gives an SM the next CTA, or the grid is persistent and each work
item goes to the CTA with the least to do. A work item is a row of eight int32.
"""

from __future__ import annotations

import functools
import heapq
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import tile_ranges
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
    tiles, ids, counts = _assignment(spec, shapes, config)
    batch, kv_head, ki = ids // (shapes.num_kv_heads * tiles), ids // tiles % shapes.num_kv_heads, ids % tiles
    dynamic = any(operands.mask) or None in (spec.q_offset, spec.kv_offset)
    xp: Any = jnp if dynamic else np
    if dynamic:
        ranges = tile_ranges.dynamic_ranges(spec, operands, config.block_q, config.block_kv, of="kv")
    else:
        ranges = tile_ranges.static_ranges(spec, shapes, config.block_q, config.block_kv, of="kv")
        ranges = tile_ranges.TileRanges(*(np.atleast_2d(x) for x in ranges))
    start, end, full_start, full_end = (x[batch if x.shape[0] > 1 else 0, ki] for x in ranges)
    # Keys behind the last one must be masked: exp2(0 - lse) of theirs may be infinite.
    cut_off = ki == (tiles - 1 if shapes.kv_len % config.block_kv else tiles)
    full_start, full_end = (xp.where(cut_off, end, x) for x in (full_start, full_end))
    item = WorkItem(batch, kv_head, ki, start, end, full_start, full_end)
    fields = (*item, np.broadcast_to(counts[:, None], ids.shape))
    return xp.stack([xp.asarray(x, xp.int32) for x in fields], axis=-1)


@functools.lru_cache(maxsize=64)
def _assignment(spec: AttentionSpec, shapes: Shapes, config: Tiles) -> tuple[int, np.ndarray, np.ndarray]:
    """Key tiles; tile ids [CTAs, most items], (batch * key heads + key head) * tiles + tile; items of each CTA."""
    ranges = tile_ranges.static_ranges(spec, shapes, config.block_q, config.block_kv, of="kv")
    costs = (ranges.end - ranges.start) * shapes.q_heads_per_kv_head + TILE_OVERHEAD
    longest_first = np.argsort(-costs, kind="stable")
    tiles, heads = len(costs), shapes.batch * shapes.num_kv_heads
    groups = [range(first, min(first + config.head_group, heads)) for first in range(0, heads, config.head_group)]
    order = [head * tiles + int(tile) for group in groups for tile in longest_first for head in group]
    if config.num_ctas is None:
        return tiles, np.array(order)[:, None], np.ones(len(order), np.int32)
    lists: list[list[int]] = [[] for _ in range(min(config.num_ctas, len(order)))]
    loads = [(0.0, cta) for cta in range(len(lists))]
    for tile_id in order:
        load, cta = heapq.heappop(loads)
        lists[cta].append(tile_id)
        heapq.heappush(loads, (load + float(costs[tile_id % tiles]), cta))
    counts = np.array([len(items) for items in lists], np.int32)
    ids = np.zeros((len(lists), counts.max()), np.int64)
    for cta, items in enumerate(lists):
        ids[cta, : len(items)] = items
    return tiles, ids, counts


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
