"""Which CTA works on which tiles, in which order: the dearest first, and about as much for each CTA.

Heads are worked on in groups: several, so that no CTA runs dry at the end, and no more than the L2 has room for.
"""

from __future__ import annotations

import functools
import heapq
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_flash.spec import Array

# Of what the tiles of a group read in common: a third of an H100's L2. Tiles that cost differently drift apart in time
# and need it to stay there; others read it together. docs/performance.md has the measurement.
GROUP_BYTES = 2**24


class Order(NamedTuple):
    """The tiles that each CTA works on, [CTAs, most tiles of a CTA], and how many those are, [CTAs]."""

    batch: Any
    head: Any
    tile: Any
    counts: np.ndarray


class Crew(NamedTuple):
    """What there is to do it with. ctas: persistent ones; None: one for each tile of a head, in this order."""

    heads: int  # of a batch element
    head_group: int  # at most so many at a time
    ctas: int | None
    head_bytes: int  # what the tiles of a head read in common


def by_cost(costs: np.ndarray, batch: int, crew: Crew) -> Order:
    """costs: of each tile of a head, where they are known: each tile goes to the CTA with the least to do so far."""
    longest_first = np.argsort(-costs, kind="stable")
    tiles, heads, size = len(costs), batch * crew.heads, crew.head_group
    if crew.ctas is not None and costs.min() < costs.max():
        size = max(min(size, GROUP_BYTES // max(crew.head_bytes, 1)), 1)
    groups = (range(first, min(first + size, heads)) for first in range(0, heads, size))
    order = [head * tiles + int(tile) for group in groups for tile in longest_first for head in group]
    if crew.ctas is None:
        lists = [[tile_id] for tile_id in order]
    else:
        lists = [[] for _ in range(min(crew.ctas, len(order)))]
        loads = [(0.0, cta) for cta in range(len(lists))]
        for tile_id in order:
            load, cta = heapq.heappop(loads)
            lists[cta].append(tile_id)
            heapq.heappush(loads, (load + float(costs[tile_id % tiles]), cta))
    counts = np.array([len(items) for items in lists], np.int32)
    ids = np.zeros((len(lists), counts.max()), np.int64)
    for cta, items in enumerate(lists):
        ids[cta, : len(items)] = items
    return Order(ids // (crew.heads * tiles), ids // tiles % crew.heads, ids % tiles, counts)


def by_rank(costs: Array, batch: int, crew: Crew) -> Order:
    """costs: [B or 1, tiles] of each tile of a head, where they depend on data: the tiles of all batch elements are
    sorted on the device, and dealt out to the CTAs as `_deal` says."""
    tiles = costs.shape[1]
    costs = jnp.broadcast_to(costs, (batch, tiles))
    rank, head, counts = _deal(costs.size, crew)
    place = jnp.argsort(-costs.ravel())[rank]
    return Order(place // tiles, head, place % tiles, counts)


@functools.lru_cache(maxsize=64)
def _deal(ranks: int, crew: Crew) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rank by cost and the head of each tile of each CTA, and how many it has. One group of heads after the other,
    in rounds over the CTAs there and back again: who gets the dearest tile of one gets the cheapest of the next."""
    ctas = min(crew.ctas or 1, ranks * crew.heads)
    size = max(crew.head_group, -(-ctas // ranks))  # each group has something for every persistent CTA
    groups = [np.arange(crew.heads)[first : first + size] for first in range(0, crew.heads, size)]
    rank = np.concatenate([np.repeat(np.arange(ranks), len(group)) for group in groups])
    head = np.concatenate([np.tile(group, ranks) for group in groups])
    if crew.ctas is None:
        return rank[:, None], head[:, None], np.ones(len(rank), np.int32)
    turn, place = np.divmod(np.concatenate([np.arange(ranks * len(group)) for group in groups]), ctas)
    back = (turn + head // size) % 2
    cta = np.where(back, ctas - 1 - place, place)
    counts = np.bincount(cta, minlength=ctas).astype(np.int32)
    by_cta = np.argsort(cta, kind="stable")
    first = np.cumsum(counts) - counts
    item = np.minimum(first[:, None] + np.arange(counts.max()), len(cta) - 1)
    return rank[by_cta][item], head[by_cta][item], counts
