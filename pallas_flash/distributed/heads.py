"""Some heads after the others, so that what is on its way and in between is there for those alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.checks import require
from pallas_flash.passes import asks_for_places
from pallas_flash.spec import Array, AttentionSpec, Operands, vary

SHARED = -1  # in place of an axis: an array of all heads, whose results are added up


def groups_of(heads_at_once: Any, num_kv_heads: int) -> int:
    """How many groups of heads there are."""
    if heads_at_once is None:
        return 1
    integer = isinstance(heads_at_once, int | np.integer) and not isinstance(heads_at_once, bool)
    wanted = f"None or an integer, at least 1, that divides the {num_kv_heads} key heads"
    require(
        integer and heads_at_once >= 1 and num_kv_heads % int(heads_at_once) == 0,
        "heads_at_once",
        heads_at_once,
        wanted,
    )
    return max(1, num_kv_heads // int(heads_at_once))


class Group(NamedTuple):
    """The heads of one group: key heads, the query heads that belong to them, and what else comes by the head."""

    number: Array
    count: int

    def cut(self, array: Array, axis: int) -> Array:
        if self.count == 1:
            return array
        size = array.shape[axis] // self.count
        return lax.dynamic_slice_in_dim(array, self.number * size, size, axis)

    def put(self, whole: Array, part: Array, axis: int) -> Array:
        if axis == SHARED:
            return whole + part
        return lax.dynamic_update_slice_in_dim(whole, part, self.number * part.shape[axis], axis)

    def part_of(self, spec: AttentionSpec, operands: Operands) -> Operands:
        q, k, v = (self.cut(x, 2) for x in (operands.q, operands.k, operands.v))
        sinks = None if operands.sinks is None else self.cut(operands.sinks, 0)
        origin = operands.origin
        if self.count > 1 and asks_for_places(spec):
            first = jnp.stack([jnp.zeros_like(self.number), self.number * q.shape[2]])
            origin = first if origin is None else origin + first
        return operands._replace(q=q, k=k, v=v, sinks=sinks, origin=origin)


def in_groups(count: int, function: Callable[[Group], Any], axes: Any) -> Any:
    """The results of all groups, put together along their `axes`: a pytree of the same structure."""
    first = Group(jnp.int32(0), count)
    if count == 1:
        return function(first)

    def whole(part: jax.ShapeDtypeStruct, axis: int) -> Array:
        shape = [n * count if i == axis else n for i, n in enumerate(part.shape)]
        varying = part.manual_axis_type.varying if part.manual_axis_type else ()
        return vary(jnp.zeros(shape, part.dtype), tuple(varying))

    def step(results: Any, number: Array) -> tuple[Any, None]:
        group = Group(number, count)
        return jax.tree.map(group.put, results, function(group), axes), None

    empty = jax.tree.map(whole, jax.eval_shape(lambda: function(first)), axes)
    return lax.scan(step, empty, jnp.arange(count, dtype=jnp.int32))[0]
