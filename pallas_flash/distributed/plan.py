"""What is known of a ring before it runs: which chunks of queries need which chunks of keys, and how far keys travel.

The same question as which tiles a mask needs, asked of larger tiles: `tile_ranges` answers it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from pallas_flash import tile_ranges
from pallas_flash.distributed.order import Order
from pallas_flash.masks import Band, Chunked
from pallas_flash.spec import AttentionSpec, Shapes


class Pair(NamedTuple):
    """A chunk of a device's queries and a chunk of the keys that are with it, over some steps of the ring."""

    q: int  # which of the device's chunks
    kv: int
    always: bool  # every device needs it in each of these steps, as far as is known without data
    masked: bool  # the parts of the mask that have no arrays hide some of it
    offset: int | None  # of the queries from the keys, in rows, if it is the same wherever the pair is needed


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
    known = dataclasses.replace(spec, mask=tuple(part for part in spec.mask if positional(part)))
    whole = shapes._replace(q_len=q_len * order.chunks, kv_len=kv_len * order.chunks)
    ranges = tile_ranges.static_ranges(known, whole, q_len, kv_len)
    start, end, full_start, full_end = (x[:, None] for x in ranges)
    keys = np.arange(order.chunks)
    return Chunks((start <= keys) & (keys < end), (full_start <= keys) & (keys < full_end))


def make(spec: AttentionSpec, order: Order, shapes: Shapes) -> Plan:
    chunks = chunks_of(spec, order, shapes)
    lengths = shapes.q_len // order.chunks_a_device, shapes.kv_len // order.chunks_a_device
    pairs = lambda shifts: _pairs(chunks, order, lengths, list(shifts))  # noqa: E731
    needed = [shift for shift in range(1, order.devices) if pairs([shift])]
    hops = min(((f, _hops_back(needed, f, order.devices)) for f in range(order.devices)), key=lambda x: (sum(x), x[1]))
    ways = ((hops[0], range(1, hops[0] + 1)), (hops[1], range(-hops[1], 0)))
    forward, backward = ((count, pairs(shifts)) for count, shifts in ways)
    return Plan(order, lengths, pairs([0]), forward, backward)


def _hops_back(needed: list[int], forward: int, devices: int) -> int:
    """How far keys must go backward, if they go so far forward."""
    return max((devices - shift for shift in needed if shift > forward), default=0)


def _pairs(chunks: Chunks, order: Order, lengths: tuple[int, int], shifts: list[int]) -> tuple[Pair, ...]:
    devices = np.arange(order.devices)
    found = []
    if not shifts:
        return ()
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
            found.append(Pair(i, j, bool(needed.all()), masked, offset))
    return tuple(found)
