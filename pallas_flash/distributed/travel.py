"""A ring at work: the keys on their way, what is computed meanwhile, and what comes home."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.distributed import steps
from pallas_flash.distributed.plan import Pair
from pallas_flash.distributed.steps import Keys, Ring, Step
from pallas_flash.spec import Array, AttentionSpec, Operands, accumulator_dtype, vary, varying_axes

Entries = tuple[tuple[Any, ...], ...]  # of each chunk: the results that are there and not yet added up
Call = tuple[AttentionSpec, Operands]
Pairs = tuple[Pair, ...]


class Results(NamedTuple):
    """What a call gives to its queries, to its keys, and to what all calls share: pytrees of arrays, rows on axis 1."""

    q: Any
    kv: Any
    shared: Any


class Terms(NamedTuple):
    """Results of the queries and of what all calls share. A sum is written as one expression where it can be, which
    XLA computes in one go, rounding once. Only what a loop carries is added up step by step."""

    q: Entries
    shared: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """The forward or the backward pass of one device."""

    ring: Ring
    operands: Operands
    compute: Callable[[Call, Any], Results]  # of a call that is on this block of queries
    nothing: Callable[[Operands], Results]  # what a call with these operands gives if it sees no keys
    add: Callable[..., Any]  # of results of the same queries, at least one, in the accumulator's dtype
    uniform: bool = False  # every device must compute every call

    def around(self) -> Results:
        """The sums of the results, one entry a chunk: of the own keys while the neighbours' are on their way, then of
        those that come by. What a call gives to its keys goes with them, and home in the end."""
        ring, plan = self.ring, self.ring.plan
        device = vary(lax.axis_index(ring.axis_name), varying_axes(self.operands))
        own = steps.keys_of(ring.spec, self.operands)
        ways = [(1, *plan.forward), (-1, *plan.backward)]
        moved = [_sent(ring, own, direction) if hops else None for direction, hops, _ in ways]
        results = self._step(Step(device, device, own), plan.own)
        if any(moved):  # XLA may order calls as it likes: the own keys first, as the others need time to come
            results, moved = lax.optimization_barrier((results, moved))
        terms = self._with(Terms(self._nowhere, ()), results, plan.own, device, device)
        home = self._home(results, plan.own, device, device)
        for keys, (direction, hops, pairs) in zip(moved, ways, strict=True):
            if hops:
                terms, back = self._travel(terms, Step(device, device, keys), direction, hops, pairs)
                home = _joined(home, back)
        q, (shared,) = self._added(terms)
        return Results(tuple(x for (x,) in q), tuple(added(*(x or (self._nothing.kv,))) for x in home), shared)

    def _travel(self, terms: Terms, start: Step, direction: int, hops: int, pairs: Pairs) -> tuple[Terms, Entries]:
        """One way round the ring, from the first neighbour on."""
        ring, device, devices = self.ring, start.device, self.ring.devices
        place = lambda shift: lax.rem(device + shift + devices, jnp.int32(devices))  # noqa: E731
        at = lambda keys, hop: Step(device, place(-direction * hop), keys)  # noqa: E731
        if hops == 1:  # nothing to be added to: as it is, as soon as it is there
            step = at(start.keys, 1)
            results = self._step(step, pairs)
            back = _sent(ring, [result._replace(q=None, shared=None) for result in results], -direction)
            terms = self._with(terms, results, pairs, device, step.owner)
            return terms, self._home(back, pairs, place(direction), device)

        def hop_on(carry: tuple[Terms, Keys, Entries], hop: Array) -> tuple[Any, None]:
            terms, keys, sums = carry
            coming, sums = _sent(ring, keys, direction), _sent(ring, sums, direction)
            terms, sums = behind(terms, sums, at(keys, hop))
            return (self._added(terms), coming, sums), None

        def behind(terms: Terms, sums: Entries, step: Step) -> tuple[Terms, Entries]:
            """The sums of a step's keys go behind these."""
            results = self._step(step, pairs)
            sums = _joined(sums, self._home(results, pairs, device, step.owner))
            return self._with(terms, results, pairs, device, step.owner), tuple((added(*x),) for x in sums)

        sums = ((added(self._nothing.kv),),) * ring.plan.order.chunks_a_device
        carry = self._added(terms), start.keys, sums
        (terms, keys, sums), _ = lax.scan(hop_on, carry, jnp.arange(1, hops, dtype=jnp.int32))
        terms, sums = behind(terms, _sent(ring, sums, direction), at(keys, jnp.int32(hops)))
        return terms, _sent(ring, sums, -direction * hops)

    def _step(self, at: Step, pairs: Pairs) -> list[Results]:
        """Of the call of each pair."""
        ring, found = self.ring, []
        for pair in pairs:
            if self.uniform and not pair.always:
                pair = pair._replace(masked=True)
            blocks = steps.blocks_at(ring, pair, at.device, at.owner)
            call = steps.part_of(ring, self.operands, pair, at, blocks)
            compute, nothing = partial(self.compute, call, blocks.q), partial(self.nothing, call[1])
            found.append(compute() if self.uniform else steps.where_needed(ring, pair, at, call, compute, nothing))
        return found

    def _with(self, terms: Terms, results: list[Results], pairs: Pairs, device: Array, owner: Array) -> Terms:
        """Results for the device's queries, beside those that are there."""
        blocks = (steps.blocks_at(self.ring, pair, device, owner).q for pair in pairs)
        entries = (self._entries(result.q, block, "q") for result, block in zip(results, blocks, strict=True))
        q = functools.reduce(_joined, entries, terms.q)
        return Terms(q, (*terms.shared, *(result.shared for result in results)))

    def _home(self, results: list[Results], pairs: Pairs, device: Array, owner: Array) -> Entries:
        """What the device's calls give to the owner's keys."""
        blocks = (steps.blocks_at(self.ring, pair, device, owner).kv for pair in pairs)
        entries = (self._entries(result.kv, block, "kv") for result, block in zip(results, blocks, strict=True))
        return functools.reduce(_joined, entries, self._nowhere)

    @property
    def _nowhere(self) -> Entries:
        return ((),) * self.ring.plan.order.chunks_a_device

    def _entries(self, results: Any, block: Any, side: str) -> Entries:
        """The results of a block, each chunk's at its place."""
        order = self.ring.plan.order
        numbers = range(order.chunks_a_device)
        if block is None:
            return tuple((jax.tree.map(lambda x: steps.cut(order, x, 1, i), results),) for i in numbers)  # noqa: B023
        if isinstance(block, int):
            return tuple((results,) if i == block else () for i in numbers)
        nothing = getattr(self._nothing, side)
        return tuple((jax.tree.map(partial(jnp.where, block == i), results, nothing),) for i in numbers)

    def _added(self, terms: Terms) -> Terms:
        """One of each."""
        q = tuple((self.add(*(x or (self._nothing.q,))),) for x in terms.q)
        return Terms(q, (added(*(terms.shared or (self._nothing.shared,))),))

    @property
    def _nothing(self) -> Results:
        """Of one chunk of queries and one of keys."""
        order, operands = self.ring.plan.order, self.operands
        chunk = {name: steps.cut(order, getattr(operands, name), 1, 0) for name in ("q", "k", "v")}
        return self.nothing(operands._replace(**chunk))


def added(*terms: Any) -> Any:
    """Their sum, in the accumulator's dtype."""
    wide = lambda x: x.astype(accumulator_dtype(x.dtype))  # noqa: E731
    return jax.tree.map(lambda *xs: functools.reduce(operator.add, map(wide, xs)), *terms)


def _joined(first: Entries, second: Entries) -> Entries:
    return tuple((*x, *y) for x, y in zip(first, second, strict=True))


def _sent(ring: Ring, arrays: Any, hops: int) -> Any:
    """From each device to the one `hops` places on."""
    places = [(device, (device + hops) % ring.devices) for device in range(ring.devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axis_name, places), arrays)
