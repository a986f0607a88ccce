"""Masks as data: conditions on (query position, key position) that compose with `&`.

    mask = masks.causal() & masks.sliding_window(1023, 0) & masks.segments(ids)
    flash_attention(q, k, v, mask=mask)

Each part of a mask gives two things. `allowed` says for every pair whether it takes part. `kv_bounds` and `q_bounds`
say, for a span of queries (or keys), which interval of keys (or queries) it needs and inside which interval every pair
is allowed, so that tiles outside the first are skipped and tiles inside the second need no masking (tile_ranges.py).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import elementwise
from pallas_flash.elementwise import Elementwise
from pallas_flash.spec import Array, Index, array_of, described

FAR = 2**29  # beyond every position, and still an int32 after adding two of them

Arrays = tuple[Array, ...]


class Span(NamedTuple):
    """Consecutive rows of queries or keys and their positions, both ends included."""

    row_lo: Any
    row_hi: Any
    pos_lo: Any
    pos_hi: Any


class Bounds(NamedTuple):
    """[start, end) is needed; every pair within [full_start, full_end) is allowed. In positions of the other side."""

    start: Any = -FAR
    end: Any = FAR
    full_start: Any = -FAR
    full_end: Any = FAR


NOTHING_FULL = Bounds(full_start=FAR, full_end=-FAR)


class Part:
    """What the parts share: by default a part is defined by positions alone, has no arrays, and bounds nothing."""

    uses_batch: ClassVar[bool] = False  # arrays[0] is int32 [B]

    def tile(self, arrays: Arrays, q_slice: Slice, kv_slice: Slice) -> Arrays:
        """The arrays of one tile, in shapes that broadcast to [B, N, rows, keys]."""
        return tuple(a[:, None, None, None] for a in arrays) if self.uses_batch else arrays

    def allowed(self, arrays: Arrays, index: Index) -> Array:
        raise NotImplementedError

    def kv_bounds(self, arrays: Arrays, q: Span, xp: Any) -> Bounds:
        return NOTHING_FULL

    def q_bounds(self, arrays: Arrays, kv: Span, q_offset: Any, xp: Any) -> Bounds:
        return NOTHING_FULL


class Slice(NamedTuple):
    """`size` rows from `start` on (`start` may be traced)."""

    start: Any
    size: int


def slice_axis(array: Array, axis: int, rows: Slice) -> Array:
    """The rows of one axis; an axis of size 1 stands for all of them."""
    return array if array.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(array, rows.start, rows.size, axis)


@dataclasses.dataclass(frozen=True)
class Band(Part):
    """position - left <= key <= position + right; None: unbounded, on one side at most. Causal is Band(None, 0)."""

    left: int | None
    right: int | None

    def allowed(self, arrays: Arrays, index: Index) -> Array:
        distance = index.kv_pos - index.q_pos
        sides = []
        if self.right is not None:
            sides.append(distance <= self.right)
        if self.left is not None:
            sides.append(distance >= -self.left)
        return functools.reduce(operator.and_, sides)

    def kv_bounds(self, arrays: Arrays, q: Span, xp: Any) -> Bounds:
        return self._bounds(q, self.left, self.right)

    def q_bounds(self, arrays: Arrays, kv: Span, q_offset: Any, xp: Any) -> Bounds:
        return self._bounds(kv, self.right, self.left)

    def _bounds(self, span: Span, left: int | None, right: int | None) -> Bounds:
        start, full_start = (-FAR, -FAR) if left is None else (span.pos_lo - left, span.pos_hi - left)
        end, full_end = (FAR, FAR) if right is None else (span.pos_hi + right + 1, span.pos_lo + right + 1)
        return Bounds(start, end, full_start, full_end)


@dataclasses.dataclass(frozen=True)
class Chunked(Part):
    """Position and key lie in the same chunk of `size` consecutive positions."""

    size: int

    def allowed(self, arrays: Arrays, index: Index) -> Array:
        return index.q_pos // self.size == index.kv_pos // self.size

    def kv_bounds(self, arrays: Arrays, q: Span, xp: Any) -> Bounds:
        first, last = q.pos_lo // self.size, q.pos_hi // self.size
        return Bounds(first * self.size, (last + 1) * self.size, last * self.size, (first + 1) * self.size)

    def q_bounds(self, arrays: Arrays, kv: Span, q_offset: Any, xp: Any) -> Bounds:
        return self.kv_bounds(arrays, kv, xp)


@dataclasses.dataclass(frozen=True)
class PrefixLM(Part):
    """key <= position, or key < length: the prefix sees itself both ways. arrays = (int32 [B],)."""

    uses_batch: ClassVar[bool] = True

    def allowed(self, arrays: Arrays, index: Index) -> Array:
        return (index.kv_pos <= index.q_pos) | (index.kv_pos < arrays[0])

    def kv_bounds(self, arrays: Arrays, q: Span, xp: Any) -> Bounds:
        (length,) = arrays
        return Bounds(end=xp.maximum(q.pos_hi + 1, length), full_end=xp.maximum(q.pos_lo + 1, length))

    def q_bounds(self, arrays: Arrays, kv: Span, q_offset: Any, xp: Any) -> Bounds:
        (length,) = arrays
        return Bounds(
            start=xp.where(kv.pos_lo < length, -FAR, kv.pos_lo),
            full_start=xp.where(kv.pos_hi < length, -FAR, kv.pos_hi),
        )


@dataclasses.dataclass(frozen=True)
class QueryLengths(Part):
    """Query row < length: the rows behind it attend nothing. arrays = (int32 [B],)."""

    uses_batch: ClassVar[bool] = True

    def allowed(self, arrays: Arrays, index: Index) -> Array:
        return index.q_row < arrays[0]

    def kv_bounds(self, arrays: Arrays, q: Span, xp: Any) -> Bounds:
        (length,) = arrays
        return Bounds(end=xp.where(q.row_lo < length, FAR, -FAR), full_end=xp.where(q.row_hi < length, FAR, -FAR))

    def q_bounds(self, arrays: Arrays, kv: Span, q_offset: Any, xp: Any) -> Bounds:
        end = arrays[0] + q_offset
        return Bounds(end=end, full_end=end)


@dataclasses.dataclass(frozen=True)
class KeyValueLengths(Part):
    """key < length. arrays = (int32 [B],)."""

    uses_batch: ClassVar[bool] = True

    def allowed(self, arrays: Arrays, index: Index) -> Array:
        return index.kv_pos < arrays[0]

    def kv_bounds(self, arrays: Arrays, q: Span, xp: Any) -> Bounds:
        return Bounds(end=arrays[0], full_end=arrays[0])

    def q_bounds(self, arrays: Arrays, kv: Span, q_offset: Any, xp: Any) -> Bounds:
        (length,) = arrays
        return Bounds(end=xp.where(kv.pos_lo < length, FAR, -FAR), full_end=xp.where(kv.pos_hi < length, FAR, -FAR))


@dataclasses.dataclass(frozen=True)
class Segments(Part):
    """Equal ids of query and key. arrays = (int32 [B, T], int32 [B, S]). tile_ranges.py has its ranges."""

    def tile(self, arrays: Arrays, q_slice: Slice, kv_slice: Slice) -> Arrays:
        q_ids, kv_ids = slice_axis(arrays[0], 1, q_slice), slice_axis(arrays[1], 1, kv_slice)
        return q_ids[:, None, :, None], kv_ids[:, None, None, :]

    def allowed(self, arrays: Arrays, index: Index) -> Array:
        return arrays[0] == arrays[1]


@dataclasses.dataclass(frozen=True)
class Predicate(Part):
    """A user's function of (batch, head, q_pos, kv_pos). arrays = what it captured."""

    function: Elementwise

    def allowed(self, arrays: Arrays, index: Index) -> Array:
        return self.function(arrays, index.batch, index.head, index.q_pos, index.kv_pos)


@dataclasses.dataclass(frozen=True)
class Dense(Part):
    """A bool array. arrays = (bool [1|B, 1|N, 1|T, 1|S],)."""

    def tile(self, arrays: Arrays, q_slice: Slice, kv_slice: Slice) -> Arrays:
        return (slice_axis(slice_axis(arrays[0], 2, q_slice), 3, kv_slice),)

    def allowed(self, arrays: Arrays, index: Index) -> Array:
        return arrays[0]


def allowed(parts: tuple[Part, ...], arrays: tuple[Arrays, ...], index: Index) -> Array | None:
    """Whether each pair of a tile takes part, broadcastable to the tile; None: all do. `arrays` are the tile's own."""
    result = None
    for part, part_arrays in zip(parts, arrays, strict=True):
        ok = part.allowed(part_arrays, index)
        result = ok if result is None else result & ok
    return result


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """A conjunction of parts with their arrays; made by the functions below, composed with `&`. It is a pytree, so it
    passes through jit, vmap and scan."""

    parts: tuple[Part, ...]
    arrays: tuple[Arrays, ...]

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise TypeError(f"`&` composes masks of pallas_flash.masks, and {described(other)} is none")
        return Mask(self.parts + other.parts, self.arrays + other.arrays)

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false: compose masks with `&`, not with `and`, `or` and `not`")

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self.arrays,), self.parts

    @classmethod
    def tree_unflatten(cls, parts: Any, children: tuple[Any, ...]) -> Mask:
        return cls(parts, *children)


def _mask(part: Part, *arrays: Any) -> Mask:
    return Mask((part,), (arrays,))


def _integers_or_struct(name: str, value: Any) -> Any:
    """In a mask for `explain`, structs may stand for the arrays; other functions refuse the call that has it."""
    is_struct = isinstance(value, jax.ShapeDtypeStruct) and jnp.issubdtype(value.dtype, jnp.integer)
    return value if is_struct else integers(name, value)


def integers(name: str, value: Any) -> Any:
    """`value` as an array (NumPy's stay NumPy's); ValueError unless it holds integers."""
    array = array_of(name, value, "of an integer dtype")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        wanted = "within 64 bits" if _whole_numbers(value) else "of an integer dtype"
        raise ValueError(f"{name} must be {wanted}, not {described(value)}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array.astype(np.int32) if jnp.iinfo(array.dtype).bits < 8 else array  # NumPy computes on no int4


def _whole_numbers(value: Any) -> bool:
    """Whether these are Python integers, which NumPy holds as something else only where they are too large for it."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(x, int) and not isinstance(x, bool) for x in leaves)


def clamp(array: Any, low: int, high: int) -> Array:
    """Integers of any dtype as int32, each clamped to [low, high] before it is cut to 32 bits."""
    limits = np.iinfo(array.dtype)
    xp = np if isinstance(array, np.ndarray | np.generic) else jnp
    return jnp.asarray(xp.clip(array, max(low, limits.min), min(high, limits.max)).astype(np.int32))


def everything() -> Mask:
    """Allows every pair."""
    return Mask((), ())


def causal() -> Mask:
    """Key <= position, where query row i stands at `query_offset + i`."""
    return _mask(Band(None, 0))


def sliding_window(left: int | None = None, right: int | None = None) -> Mask:
    """position - left <= key <= position + right, both ends included; None or -1: unbounded on that side."""
    sides = []
    for name, side in (("left", left), ("right", right)):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | np.integer) or side < -1):
            raise ValueError(
                f"masks.sliding_window: {name} must be an integer >= 0, or None or -1 for no bound, not {side!r}"
            )
        sides.append(None if side is None or side == -1 else min(int(side), FAR // 2))
    return everything() if sides == [None, None] else _mask(Band(*sides))


def chunked(size: int) -> Mask:
    """Query and key lie in the same chunk of `size` positions, as in Llama 4's local layers (there with causal)."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 1 <= size < FAR:
        raise ValueError(f"masks.chunked: size must be an integer in [1, {FAR}), not {size!r}")
    return _mask(Chunked(int(size)))


def prefix_lm(length: Any) -> Mask:
    """Causal, and every query also sees the first `length` keys. length: int or int [*B]."""
    return _mask(PrefixLM(), _integers_or_struct("masks.prefix_lm: length", length))


def lengths(query: Any = None, key_value: Any = None) -> Mask:
    """Only the first `query` rows attend and only the first `key_value` keys are attended: int or int [*B] each."""
    mask = everything()
    if query is not None:
        mask &= _mask(QueryLengths(), _integers_or_struct("masks.lengths: query", query))
    if key_value is not None:
        mask &= _mask(KeyValueLengths(), _integers_or_struct("masks.lengths: key_value", key_value))
    return mask


def segments(query: Any, key_value: Any = None) -> Mask:
    """Equal ids may attend to each other. query: int [*B, T]; key_value: int [*B, S], by default the same ids."""
    q_ids = _integers_or_struct("masks.segments: query", query)
    kv_ids = q_ids if key_value is None else _integers_or_struct("masks.segments: key_value", key_value)
    return _mask(Segments(), q_ids, kv_ids)


def predicate(function: Callable[..., Any]) -> Mask:
    """Pairs where `function(batch, head, q_pos, kv_pos)` is True; traced with int32 scalars, it may capture arrays:

    masks.predicate(lambda b, h, q, k: (q - k) % stride[h] == 0)
    """
    traced, captures = elementwise.trace("masks.predicate", function, elementwise.PLACE, np.bool_)
    return _mask(Predicate(traced), *captures)
