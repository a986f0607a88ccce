"""The call that a device makes of its queries and of the keys that are with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import tile_ranges, xla
from pallas_flash.autodiff import Choice
from pallas_flash.distributed import plan as plan_
from pallas_flash.distributed.order import Order
from pallas_flash.distributed.plan import Pair, Plan
from pallas_flash.masks import Band, KeyValueLengths, QueryLengths, Segments
from pallas_flash.spec import Array, AttentionSpec, Operands, vary, varying_axes


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static facts of a call."""

    axis_name: str
    spec: AttentionSpec
    choice: Choice | None
    plan: Plan
    needed: tuple[tuple[bool, ...], ...]  # plan.Chunks.needed
    uniform: bool  # gradients are summed over devices inside the backward pass: all of them must compute it
    groups: int  # of heads, one after the other

    @property
    def devices(self) -> int:
        return self.plan.order.devices


class Keys(NamedTuple):
    """What travels."""

    k: Array
    v: Array
    segments: tuple[Array | None, ...]  # the ids of each part of the mask that has some


class Step(NamedTuple):
    """Where a device is in a step."""

    device: Array
    owner: Array  # of the keys
    keys: Keys


def keys_of(spec: AttentionSpec, operands: Operands) -> Keys:
    parts = zip(spec.mask, operands.mask, strict=True)
    ids = tuple(arrays[1] if isinstance(part, Segments) else None for part, arrays in parts)
    return Keys(operands.k, operands.v, ids)


def zeros(operands: Operands, shape: tuple[int, ...], dtype: Any) -> Array:
    return vary(jnp.zeros(shape, dtype), varying_axes(operands))


class Blocks(NamedTuple):
    """What a call is on: numbers of chunks on a device, maybe traced, or None for all of them as one."""

    q: Any
    kv: Any


def blocks_at(ring: Ring, pair: Pair, device: Any, owner: Any) -> Blocks:
    if pair.other is None:
        return Blocks(pair.q, pair.kv)
    first = _needed(ring, pair, device, owner)
    both = zip((pair.q, pair.kv), pair.other, strict=True)
    return Blocks(*(a if a == b else jnp.where(first, jnp.int32(a), jnp.int32(b)) for a, b in both))


def _needed(ring: Ring, pair: Pair, device: Any, owner: Any) -> Array:
    order = ring.plan.order
    assert pair.q is not None and pair.kv is not None, "all chunks as one are needed by all"
    return jnp.asarray(ring.needed)[order.chunks_of(device)[pair.q], order.chunks_of(owner)[pair.kv]]


def cut(order: Order, array: Array, axis: int, block: Any) -> Array:
    """A device's rows of a block."""
    if block is None or order.chunks_a_device == 1:
        return array
    size = array.shape[axis] // order.chunks_a_device
    if isinstance(block, int):
        return lax.slice_in_dim(array, block * size, (block + 1) * size, axis=axis)
    return lax.dynamic_slice_in_dim(array, block * size, size, axis)


def _start(order: Order, holder: Array, block: Any, size: int) -> Array:
    """The position of the first row."""
    numbers = order.chunks_of(holder)
    return (numbers[block] if isinstance(block, int) else jnp.where(block == 0, *numbers)) * size


def _length(order: Order, holder: Array, block: Any, size: int, length: Array) -> Array:
    """How many rows stand before a position: the first ones, as rows are in the order of their positions."""
    if block is None:
        return sum((jnp.clip(length - number * size, 0, size) for number in order.chunks_of(holder)), jnp.int32(0))
    return jnp.clip(length - _start(order, holder, block, size), 0, size)


def part_of(ring: Ring, operands: Operands, pair: Pair, at: Step, blocks: Blocks) -> tuple[AttentionSpec, Operands]:
    """The call of one pair. It stands at its own position in the sequence where anything asks for positions; else
    nothing moves but the distance between queries and keys."""
    spec, order = ring.spec, ring.plan.order
    of_q, of_kv = zip((order,) * 2, (at.device, at.owner), blocks, ring.plan.lengths, strict=True)
    parts, arrays = [], []
    for part, of_part, key_ids in zip(spec.mask, operands.mask, at.keys.segments, strict=True):
        if plan_.positional(part) and not pair.masked:
            continue
        if isinstance(part, QueryLengths | KeyValueLengths):
            of_part = (_length(*(of_q if isinstance(part, QueryLengths) else of_kv), of_part[0]),)
        elif isinstance(part, Segments):
            of_part = (cut(order, of_part[0], 1, blocks.q), cut(order, key_ids, 1, blocks.kv))
        parts.append(part)
        arrays.append(of_part)
    relative = plan_.relative(spec, tuple(parts))
    bands = any(isinstance(part, Band) for part in parts)
    assert relative or blocks.q is not None, "rows of two chunks stand at no one position"
    q_start, kv_start = (0, 0) if blocks.q is None else (_start(*of_q), _start(*of_kv))
    static: tuple[int | None, int | None] = None, None
    if relative and (not bands or (pair.offset is not None and spec.q_offset is not None)):
        static = (spec.q_offset + pair.offset if bands else 0), 0
    elif relative:
        static = None, 0
        q_start, kv_start = q_start - kv_start, 0
    if not relative:  # lengths are in positions again
        placed = lambda part, x: (x[0] + kv_start,) if isinstance(part, KeyValueLengths) else x  # noqa: E731
        arrays = list(map(placed, parts, arrays))
    per_batch = lambda x: zeros(operands, (operands.shapes.batch,), jnp.int32) + x  # noqa: E731
    q_offset = spec.q_offset if operands.q_offset is None else operands.q_offset
    part_spec = dataclasses.replace(
        spec, mask=tuple(parts), q_offset=static[0], kv_offset=static[1], shares_device=True
    )
    return part_spec, operands._replace(
        q=cut(order, operands.q, 1, blocks.q),
        k=cut(order, at.keys.k, 1, blocks.kv),
        v=cut(order, at.keys.v, 1, blocks.kv),
        mask=tuple(arrays),
        q_offset=per_batch(q_offset + q_start) if static[0] is None else None,
        kv_offset=per_batch(kv_start) if static[1] is None else None,
    )


def where_needed[R](
    ring: Ring,
    pair: Pair,
    at: Step,
    call: tuple[AttentionSpec, Operands],
    compute: Callable[[], R],
    nothing: Callable[[], R],
) -> R:
    """compute() if the mask lets this device's queries see any of the keys, else nothing(). Kernels skip by themselves
    what data hides; only where there are none does it pay to ask before."""
    spec, operands = call
    conditions = []
    if not pair.always:
        conditions.append(_needed(ring, pair, at.device, at.owner))
    by_data = any(map(tile_ranges.has_ranges_by_data, spec.mask))
    if by_data and ring.choice is not None and ring.choice.cuda is xla:
        shapes = operands.shapes
        ranges = tile_ranges.dynamic_ranges(spec, operands, shapes.q_len, shapes.kv_len)
        conditions.append(jnp.any(ranges.end > ranges.start))
    if not conditions:
        return compute()
    needed = jnp.logical_and(*conditions) if len(conditions) > 1 else conditions[0]
    varying = lambda x, like: vary(x, varying_axes(like))  # noqa: E731
    return lax.cond(needed, lambda: jax.tree.map(varying, compute(), nothing()), nothing)
