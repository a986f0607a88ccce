"""What a CTA does that works on query tiles, and in which order: assignment.py deals them out.

The grid is persistent: a CTA takes one work item after the other. A work item is a row of eight int32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash import tile_ranges
from pallas_flash.kernels import assignment
from pallas_flash.kernels.assignment import Crew, Order
from pallas_flash.kernels.tile_mask import TileIndex
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


def work_items(spec: AttentionSpec, operands: Operands, config: Tiles) -> Any:
    """int32 [CTAs, most items of a CTA, 8]: a constant where the mask's ranges are known without data."""
    shapes = operands.shapes
    itemsize = operands.k.dtype.itemsize
    dynamic = tile_ranges.depend_on_data(spec)
    xp: Any = jnp if dynamic else np
    if dynamic:
        ranges = tile_ranges.dynamic_ranges(spec, operands, config.tile_q, config.block_kv)
        blocks = jnp.maximum(ranges.end - ranges.start, 1)
        order = assignment.by_rank(blocks, shapes.batch, _crew(shapes, config, itemsize))
    else:
        ranges = tile_ranges.static_ranges(spec, shapes, config.tile_q, config.block_kv)
        ranges = tile_ranges.TileRanges(*(np.atleast_2d(x) for x in ranges))
        order = _assigned(spec, shapes, config, itemsize)
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
def _assigned(spec: AttentionSpec, shapes: Shapes, config: Tiles, itemsize: int) -> Order:
    ranges = tile_ranges.static_ranges(spec, shapes, config.tile_q, config.block_kv)
    costs = np.maximum(ranges.end - ranges.start, 1) + TILE_OVERHEAD
    return assignment.by_cost(costs, shapes.batch, _crew(shapes, config, itemsize))


def _crew(shapes: Shapes, config: Tiles, itemsize: int) -> Crew:
    keys_and_values = shapes.kv_len * (shapes.head_dim + shapes.value_head_dim) * itemsize
    return Crew(shapes.num_q_heads, config.head_group, config.num_ctas, keys_and_values // shapes.q_heads_per_kv_head)


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
