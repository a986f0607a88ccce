"""Which CTA works on which query tiles, in which order: the longest first, each to the CTA with the least to do.

The grid is persistent: a CTA takes one work item after the other. A work item is a row of eight int32.
"""

from __future__ import annotations

import functools
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import tile_ranges
from pallas_flash.kernels.sm90.config import ForwardConfig
from pallas_flash.masks import Segments
from pallas_flash.spec import AttentionSpec, Operands, Shapes

TILE_OVERHEAD = 1.0  # what a query tile costs besides its key blocks, in key blocks: fill, drain and store


class WorkItem(NamedTuple):
    """A query tile of one head and its key blocks [kv_start, kv_end); [full_start, full_end) of them are unmasked."""

    batch: Any
    head: Any
    qi: Any
    kv_start: Any
    kv_end: Any
    full_start: Any
    full_end: Any


ITEMS = len(WorkItem._fields)  # the last word of each row: how many items this CTA has


def work_items(spec: AttentionSpec, operands: Operands, config: ForwardConfig) -> Any:
    """int32 [CTAs, most items of a CTA, 8]: a constant where the mask's ranges are known without data."""
    shapes = operands.shapes
    costs, ids, counts = _assignment(spec, shapes, config)
    tiles = costs.shape[0]
    batch, head, qi = ids // (shapes.num_q_heads * tiles), ids // tiles % shapes.num_q_heads, ids % tiles
    dynamic = spec.q_offset is None or any(part.uses_batch or isinstance(part, Segments) for part in spec.mask)
    xp: Any = jnp if dynamic else np
    if dynamic:
        ranges = tile_ranges.dynamic_ranges(spec, operands, config.tile_q, config.block_kv)
    else:
        ranges = tile_ranges.static_ranges(spec, shapes, config.tile_q, config.block_kv)
        ranges = tile_ranges.TileRanges(*(np.atleast_2d(x) for x in ranges))
    of_item = [x[batch if x.shape[0] > 1 else 0, qi] for x in ranges]
    start, end, full_start, full_end = of_item
    # A tile with no key does one block, all of it masked, rather than have a path of its own.
    last = -(-shapes.kv_len // config.block_kv) - 1
    start = xp.minimum(start, last)
    empty = end <= start
    end = xp.where(empty, start + 1, end)
    full_start, full_end = (xp.where(empty, end, x) for x in (full_start, full_end))
    item = WorkItem(batch, head, qi, start, end, full_start, full_end)
    fields = (*item, np.broadcast_to(counts[:, None], ids.shape))
    return xp.stack([xp.asarray(x, xp.int32) for x in fields], axis=-1)


@functools.lru_cache(maxsize=64)
def _assignment(
    spec: AttentionSpec, shapes: Shapes, config: ForwardConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Costs [query tiles]; tile ids [CTAs, most items], (batch * heads + head) * tiles + tile; items of each CTA."""
    ranges = tile_ranges.static_ranges(spec, shapes, config.tile_q, config.block_kv)
    costs = np.maximum(ranges.end - ranges.start, 1) + TILE_OVERHEAD
    longest_first = np.argsort(-costs, kind="stable")
    tiles, heads = len(costs), shapes.batch * shapes.num_q_heads
    lists: list[list[int]] = [[] for _ in range(min(config.num_ctas, heads * tiles))]
    loads = [(0.0, cta) for cta in range(len(lists))]
    for first in range(0, heads, config.head_group):
        group = range(first, min(first + config.head_group, heads))
        for tile in longest_first:
            for head in group:
                load, cta = heapq.heappop(loads)
                lists[cta].append(head * tiles + int(tile))
                heapq.heappush(loads, (load + float(costs[tile]), cta))
    counts = np.array([len(items) for items in lists], np.int32)
    ids = np.zeros((len(lists), counts.max()), np.int64)
    for cta, items in enumerate(lists):
        ids[cta, : len(items)] = items
    return costs, ids, counts


def load_count(work: Any, cta: jax.Array) -> jax.Array:
    return work[cta, 0, ITEMS]


def load_item(work: Any, cta: jax.Array, index: jax.Array) -> WorkItem:
    return WorkItem(*(work[cta, index, field] for field in range(ITEMS)))
