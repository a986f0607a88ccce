"""A ring at work: the keys on their way, and the call that a device makes of what is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import tile_ranges
from pallas_flash.autodiff import Choice
from pallas_flash.distributed import plan as plan_
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


def around(ring: Ring, operands: Operands, step: Callable[..., Any], state: Any) -> tuple[Any, Any]:
    """Fold `step` over all keys: the own ones while the neighbours' are on their way, then those that come by. The sums
    that a step returns for its keys go with them, and home in the end."""
    device, devices, plan = vary(lax.axis_index(ring.axis_name), varying_axes(operands)), ring.devices, ring.plan
    own = keys_of(ring.spec, operands)
    ways = [(1, *plan.forward), (-1, *plan.backward)]
    moved = [_sent(ring, own, direction) if hops else None for direction, hops, _ in ways]
    state, home = step(state, Step(device, device, own), plan.own)
    for keys, (direction, hops, pairs) in zip(moved, ways, strict=True):
        if not hops:
            continue

        def at(state: Any, keys: Keys, hop: Any, direction: int = direction, pairs: Any = pairs) -> Any:
            owner = lax.rem(device - direction * hop + devices, jnp.int32(devices))
            return step(state, Step(device, owner, keys), pairs)

        def hop_on(carry: Any, hop: Array, direction: int = direction, at: Any = at) -> Any:
            state, keys, sums = carry
            coming, sums = _sent(ring, keys, direction), _sent(ring, sums, direction)
            state, more = at(state, keys, hop)
            return (state, coming, jax.tree.map(jnp.add, sums, more)), None

        sums = jax.tree.map(jnp.zeros_like, home)
        if hops > 1:
            (state, keys, sums), _ = lax.scan(hop_on, (state, keys, sums), jnp.arange(1, hops, dtype=jnp.int32))
            sums = _sent(ring, sums, direction)
        state, more = at(state, keys, jnp.int32(hops))
        back = _sent(ring, jax.tree.map(jnp.add, sums, more), -direction * hops)
        home = jax.tree.map(jnp.add, home, back)
    return state, home


def _sent(ring: Ring, arrays: Any, hops: int) -> Any:
    """From each device to the one `hops` places on."""
    places = [(device, (device + hops) % ring.devices) for device in range(ring.devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axis_name, places), arrays)


def zeros(operands: Operands, shape: tuple[int, ...], dtype: Any) -> Array:
    return vary(jnp.zeros(shape, dtype), varying_axes(operands))


def part_of(ring: Ring, operands: Operands, pair: Pair, at: Step) -> tuple[AttentionSpec, Operands]:
    """The call that attends one chunk of queries to one chunk of keys. It stands at its own position in the sequence
    where anything asks for positions; else nothing moves but the distance between the two."""
    order, (q_len, kv_len) = ring.plan.order, ring.plan.lengths
    spec = ring.spec
    q_start, kv_start = order.chunks_of(at.device)[pair.q] * q_len, order.chunks_of(at.owner)[pair.kv] * kv_len
    parts, arrays = [], []
    for part, of_part, key_ids in zip(spec.mask, operands.mask, at.keys.segments, strict=True):
        if plan_.positional(part) and not pair.masked:
            continue
        if isinstance(part, QueryLengths | KeyValueLengths):
            start, size = (q_start, q_len) if isinstance(part, QueryLengths) else (kv_start, kv_len)
            of_part = (jnp.clip(of_part[0] - start, 0, size),)
        elif isinstance(part, Segments):
            of_part = (order.parts(of_part[0], 1)[pair.q], order.parts(key_ids, 1)[pair.kv])
        parts.append(part)
        arrays.append(of_part)
    relative = all(isinstance(part, Band | QueryLengths | KeyValueLengths | Segments) for part in parts)
    relative &= spec.score_mod is None and spec.dropout_rate == 0
    bands = any(isinstance(part, Band) for part in parts)
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
    part_spec = dataclasses.replace(spec, mask=tuple(parts), q_offset=static[0], kv_offset=static[1])
    return part_spec, operands._replace(
        q=order.parts(operands.q, 1)[pair.q],
        k=order.parts(at.keys.k, 1)[pair.kv],
        v=order.parts(at.keys.v, 1)[pair.kv],
        mask=tuple(arrays),
        q_offset=per_batch(q_offset + q_start) if static[0] is None else None,
        kv_offset=per_batch(kv_start) if static[1] is None else None,
    )


def where_needed(
    ring: Ring,
    pair: Pair,
    at: Step,
    call: tuple[AttentionSpec, Operands],
    compute: Callable[[Any], Any],
    state: Any,
) -> Any:
    """compute(state) if the mask lets this device's queries see any of the keys, else the state as it is."""
    spec, operands = call
    conditions = []
    if not pair.always:
        chunks = ring.plan.order.chunks_of(at.device)[pair.q], ring.plan.order.chunks_of(at.owner)[pair.kv]
        conditions.append(jnp.asarray(ring.needed)[chunks])
    if any(part.uses_batch or isinstance(part, Segments) for part in spec.mask):
        ranges = tile_ranges.dynamic_ranges(spec, operands, *ring.plan.lengths)
        conditions.append(jnp.any(ranges.end > ranges.start))
    if not conditions:
        return compute(state)
    needed = jnp.logical_and(*conditions) if len(conditions) > 1 else conditions[0]
    return lax.cond(needed, compute, lambda state: state, state)
