"""What is known of a ring before it runs: which chunks of queries need which chunks of keys, and how far keys travel.

The same question as which tiles a mask needs, asked of larger tiles: `tile_ranges` answers it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pallas_flash import tile_ranges
from pallas_flash.distributed.order import Order
from pallas_flash.masks import Band, Chunked, KeyValueLengths, QueryLengths, Segments
from pallas_flash.spec import AttentionSpec, Shapes


class Pair(NamedTuple):
    """A block of a device's queries and a block of the keys that are with it: one call in each of some steps. A block
    is one of the chunks that are there, by its number, or (None) all of them as if they were one."""

    q: int | None
    kv: int | None
    always: bool  # every device needs it in each of these steps, as far as is known without data
    masked: bool  # the parts of the mask that have no arrays hide some of it
    offset: int | None  # of the queries from the keys, in rows, if it is the same wherever the pair is needed
    other: tuple[int, int] | None = None  # the chunks that are needed, unmasked, exactly where q and kv are not


class Chunks(NamedTuple):
    """Bool [chunks of queries, chunks of keys] of the whole sequence, from what is known without data."""

    needed: np.ndarray
    full: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """Keys of the device `shift` places before (or, below 0, behind) are there in step `shift`."""

    order: Order
    lengths: tuple[int, int]  # rows of a chunk of queries, of keys
    own: tuple[Pair, ...]  # of step 0
    forward: tuple[int, tuple[Pair, ...]]  # how many hops keys make, and what is done with them
    backward: tuple[int, tuple[Pair, ...]]  # the same the other way round the ring


def positional(part: object) -> bool:
    """Parts of a mask that are known without data."""
    return isinstance(part, Band | Chunked)


def chunks_of(spec: AttentionSpec, order: Order, shapes: Shapes) -> Chunks:
    """shapes: of one device."""
    q_len, kv_len = (order.chunk_len(*x) for x in (("query", shapes.q_len), ("key", shapes.kv_len)))
    if not (q_len and kv_len):
        nothing = np.zeros((order.chunks, order.chunks), bool)
        return Chunks(nothing, nothing)
    known = dataclasses.replace(spec, mask=tuple(filter(positional, spec.mask)))
    whole = shapes._replace(q_len=q_len * order.chunks, kv_len=kv_len * order.chunks)
    ranges = tile_ranges.static_ranges(known, whole, q_len, kv_len)
    start, end, full_start, full_end = (x[:, None] for x in ranges)
    keys = np.arange(order.chunks)
    return Chunks((start <= keys) & (keys < end), (full_start <= keys) & (keys < full_end))


def relative(spec: AttentionSpec, parts: tuple[Any, ...]) -> bool:
    """Whether a call with these parts of the mask asks for positions only by their distance, and for lengths."""
    alike = all(isinstance(part, Band | QueryLengths | KeyValueLengths | Segments) for part in parts)
    return alike and spec.score_mod is None and spec.dropout_rate == 0


def make(spec: AttentionSpec, order: Order, shapes: Shapes) -> Plan:
    chunks = chunks_of(spec, order, shapes)
    lengths = shapes.q_len // order.chunks_a_device, shapes.kv_len // order.chunks_a_device
    others = tuple(part for part in spec.mask if not positional(part))

    def pairs(shifts: Iterable[int]) -> tuple[Pair, ...]:
        needs = _needs(chunks, order, lengths, shifts := list(shifts))
        own = shifts == [0] and by_rank(spec, lengths)
        if len(needs) > 1 and (own or (_full(needs, order) and relative(spec, others))):
            return (Pair(None, None, always=True, masked=own, offset=0),)
        return _joined(needs)

    needed = [shift for shift in range(1, order.devices) if pairs([shift])]
    hops = min(((f, _hops_back(needed, f, order.devices)) for f in range(order.devices)), key=lambda x: (sum(x), x[1]))
    ways = ((hops[0], range(1, hops[0] + 1)), (hops[1], range(-hops[1], 0)))
    forward, backward = ((count, pairs(shifts)) for count, shifts in ways)
    return Plan(order, lengths, pairs([0]), forward, backward)


def by_rank(spec: AttentionSpec, lengths: tuple[int, int]) -> bool:
    """Whether the mask asks only which of two positions is the larger one, as causal does. A device has its rows in the
    order of their positions: among its own queries and keys, row numbers tell the same then."""
    bands = [part for part in spec.mask if isinstance(part, Band)]
    ranked = all(side in (None, 0) for part in bands for side in (part.left, part.right))
    aligned = not bands or (spec.q_offset == 0 and lengths[0] == lengths[1])
    return ranked and aligned and relative(spec, spec.mask)


def _hops_back(needed: list[int], forward: int, devices: int) -> int:
    """How far keys must go backward, if they go so far forward."""
    return max((devices - shift for shift in needed if shift > forward), default=0)


class _Need(NamedTuple):
    """Where a pair of chunks is needed: bool [steps, devices]."""

    pair: Pair
    steps: np.ndarray


def _needs(chunks: Chunks, order: Order, lengths: tuple[int, int], shifts: list[int]) -> list[_Need]:
    devices = np.arange(order.devices)
    found = []
    if not shifts:
        return []
    for i, q in enumerate(order.chunks_of(devices)):
        for j in range(order.chunks_a_device):
            kv = np.stack([order.chunks_of((devices - shift) % order.devices)[j] for shift in shifts])
            q_chunk = np.broadcast_to(q, kv.shape)
            needed = chunks.needed[q_chunk, kv]
            if not needed.any():
                continue
            masked = bool((needed & ~chunks.full[q_chunk, kv]).any())
            offsets = np.unique((q_chunk * lengths[0] - kv * lengths[1])[needed])
            offset = int(offsets[0]) if len(offsets) == 1 else None
            found.append(_Need(Pair(i, j, bool(needed.all()), masked, offset), needed))
    return found


def _full(needs: list[_Need], order: Order) -> bool:
    """Whether all queries see all keys."""
    seen = all(need.pair.always and not need.pair.masked for need in needs)
    return seen and len(needs) == order.chunks_a_device**2


def _joined(needs: list[_Need]) -> tuple[Pair, ...]:
    """One call for two pairs of which each device needs exactly one in each step: which one decides what rows the call
    is made of, and nothing is under a condition, which would hold up the device until the host knows its outcome."""
    pairs: list[Pair] = []
    left = list(needs)
    while left:
        need = left.pop(0)
        pair = need.pair
        partner = next((other for other in left if _one_of(need, other)), None)
        if partner is not None:
            left.remove(partner)
            pair = pair._replace(always=True, offset=None, other=(partner.pair.q, partner.pair.kv))
        pairs.append(pair)
    return tuple(pairs)


def _one_of(first: _Need, second: _Need) -> bool:
    return not (first.pair.masked or second.pair.masked) and bool((first.steps ^ second.steps).all())
