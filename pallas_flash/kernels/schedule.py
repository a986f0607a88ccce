"""Which CTA works on which query tiles, in which order: the longest first, and about as much for each CTA.

The grid is persistent: a CTA takes one work item after the other. A work item is a row of eight int32.
"""

from __future__ import annotations

import functools
import heapq
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash import tile_ranges
from pallas_flash.kernels.tile_mask import TileIndex
from pallas_flash.masks import Segments
from pallas_flash.spec import AttentionSpec, Operands, Shapes

TILE_OVERHEAD = 1.0  # what a query tile costs besides its key blocks, in key blocks: fill, drain and store


class Tiles(Protocol):
    """What a kernel's configuration says of its tiles; it must be hashable."""

    @property
    def tile_q(self) -> int: ...
    @property
    def block_kv(self) -> int: ...
    @property
    def head_group(self) -> int: ...
    @property
    def num_ctas(self) -> int: ...


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


class Order(NamedTuple):
    """The query tiles that each CTA works on, [CTAs, most items of a CTA], and how many those are, [CTAs]."""

    batch: Any
    head: Any
    qi: Any
    counts: np.ndarray


def work_items(spec: AttentionSpec, operands: Operands, config: Tiles) -> Any:
    """int32 [CTAs, most items of a CTA, 8]: a constant where the mask's ranges are known without data."""
    shapes = operands.shapes
    dynamic = None in (spec.q_offset, spec.kv_offset)
    dynamic |= any(part.uses_batch or isinstance(part, Segments) for part in spec.mask)
    xp: Any = jnp if dynamic else np
    if dynamic:
        ranges = tile_ranges.dynamic_ranges(spec, operands, config.tile_q, config.block_kv)
        order = _dealt(ranges, shapes, config)
    else:
        ranges = tile_ranges.static_ranges(spec, shapes, config.tile_q, config.block_kv)
        ranges = tile_ranges.TileRanges(*(np.atleast_2d(x) for x in ranges))
        order = _assigned(spec, shapes, config)
    batch, head, qi, counts = order
    of_item = [x[batch if x.shape[0] > 1 else 0, qi] for x in ranges]
    start, end, full_start, full_end = of_item
    # A tile with no key does one block, all of it masked, rather than have a path of its own.
    last = -(-shapes.kv_len // config.block_kv) - 1
    start = xp.minimum(start, last)
    empty = end <= start
    end = xp.where(empty, start + 1, end)
    full_start, full_end = (xp.where(empty, end, x) for x in (full_start, full_end))
    item = WorkItem(batch, head, qi, start, end, full_start, full_end)
    fields = (*item, np.broadcast_to(counts[:, None], head.shape))
    return xp.stack([xp.asarray(x, xp.int32) for x in fields], axis=-1)


@functools.lru_cache(maxsize=64)
def _assigned(spec: AttentionSpec, shapes: Shapes, config: Tiles) -> Order:
    """Where costs are known: each tile to the CTA with the least to do so far."""
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
    return Order(ids // (shapes.num_q_heads * tiles), ids // tiles % shapes.num_q_heads, ids % tiles, counts)


def _dealt(ranges: tile_ranges.TileRanges, shapes: Shapes, config: Tiles) -> Order:
    """Where costs depend on data: the tiles of all batch elements are sorted by cost on the device, and dealt out to
    the CTAs as `_deal` says."""
    tiles = ranges.start.shape[1]
    rank, head, counts = _deal(shapes.batch * tiles, shapes.num_q_heads, config)
    blocks = jnp.broadcast_to(jnp.maximum(ranges.end - ranges.start, 1), (shapes.batch, tiles))
    place = jnp.argsort(-blocks.ravel())[rank]
    return Order(place // tiles, head, place % tiles, counts)


@functools.lru_cache(maxsize=64)
def _deal(ranks: int, heads: int, config: Tiles) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rank by cost and the head of each item of each CTA, and how many it has. One group of heads after the other,
    in rounds over the CTAs there and back again: who gets the dearest item of one gets the cheapest of the next."""
    ctas = min(config.num_ctas, ranks * heads)
    group_size = max(config.head_group, -(-ctas // ranks))  # each group has something for every CTA
    items = []  # (CTA, rank, head)
    for first in range(0, heads, group_size):
        group = np.arange(heads)[first : first + group_size]
        turn, place = np.divmod(np.arange(ranks * len(group)), ctas)
        back = (turn + first // group_size) % 2
        cta = np.where(back, ctas - 1 - place, place)
        items.append(np.stack([cta, np.repeat(np.arange(ranks), len(group)), np.tile(group, ranks)]))
    cta, rank, head = np.concatenate(items, axis=1)
    counts = np.bincount(cta, minlength=ctas).astype(np.int32)
    by_cta = np.argsort(cta, kind="stable")
    first = np.cumsum(counts) - counts
    item = np.minimum(first[:, None] + np.arange(counts.max()), len(cta) - 1)
    return rank[by_cta][item], head[by_cta][item], counts


def load_count(work: Any, cta: jax.Array) -> jax.Array:
    return work[cta, 0, ITEMS]


def load_item(work: Any, cta: jax.Array, index: jax.Array) -> WorkItem:
    return WorkItem(*(work[cta, index, field] for field in range(ITEMS)))


def key_block(item: WorkItem, step: jax.Array) -> jax.Array:
    """The key block of a step. They are rotated so that the masked ones behind the unmasked ones come first, then the
    masked ones before them, then the unmasked ones: the first steps are masked, the last ones are not."""
    return item.kv_start + lax.rem(step + item.full_end - item.kv_start, item.kv_end - item.kv_start)


def selected_key_block(item: WorkItem, step: jax.Array) -> jax.Array:
    """The same without a division, where the threads that multiply ask for it in every step."""
    block = item.full_end + step
    return block - jnp.where(block >= item.kv_end, item.kv_end - item.kv_start, 0)


def first_unmasked(item: WorkItem) -> jax.Array:
    """The first step whose keys need no mask; step 0 is done as if they did."""
    return jnp.maximum(item.kv_end - item.kv_start - (item.full_end - item.full_start), 1)


def tile_index(config: Any, work: Any, ki: jax.Array, *, masked: bool) -> TileIndex:
    """Of the tile of a key block, with queries as rows. work: an item as one warpgroup sees it."""
    return TileIndex(
        shape=(config.block_q, config.block_kv),
        batch=work.item.batch,
        head=work.item.head,
        q_base=work.q_base,
        kv_base=ki * config.block_kv,
        q_offset=work.q_offset,
        columns_inside=not masked,
    )
