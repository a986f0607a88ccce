"""How the arrays of one call are split over the axes of a mesh: every axis has a letter, and equal letters are split
alike.

b n k: batch, heads, key heads, of the arrays that decide. d, m: batch and heads of small arrays (lengths, tables, new
tokens), which go where the others are. A, B, ...: axes that `vmap` maps. All others are whole on every device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pallas_flash.spec import Array

BATCH, HEADS, KV_HEADS = "b", "n", "k"
UNSPLIT = "."  # an axis that is whole on every device, whatever it is
GATHERED = "_"  # likewise, of a small array: if it comes split, it is gathered
FOLLOWING = {"d": BATCH, "m": HEADS}
MeshAxes = tuple[str, ...]


def there(axes: str, array: Array | None) -> str | None:
    """The axes of an array that a call may not have."""
    return None if array is None else axes


class Split(NamedTuple):
    """Which mesh axes each named axis is split over."""

    mesh_axes: dict[str, MeshAxes]
    sizes: dict[str, int]  # of the named axes
    mesh: Any

    def spec(self, axes: str) -> PartitionSpec:
        return PartitionSpec(*(self.mesh_axes.get(axis) or None for axis in axes))

    def not_in(self, axes: str) -> MeshAxes:
        """The mesh axes over which partial sums of an array with these axes must be added up."""
        used = {name for axis in axes for name in self.mesh_axes.get(axis, ())}
        every = dict.fromkeys(name for names in self.mesh_axes.values() for name in names)
        return tuple(name for name in every if name not in used)

    def ways(self, names: MeshAxes) -> int:
        return math.prod(self.mesh.shape[name] for name in names)

    def key_head(self, first_head: Array, num_kv_heads: int) -> Array | None:
        """The one key head, out of several that are all there, that a device's query heads belong to; None where they
        belong to all that are there."""
        if num_kv_heads <= 1 or self.ways(self.mesh_axes.get(HEADS, ())) <= 1 or self._shares_key_heads:
            return None
        return first_head // (self.sizes[HEADS] // num_kv_heads)

    @property
    def _shares_key_heads(self) -> bool:
        return self.sizes.get(KV_HEADS) is None or bool(self.mesh_axes.get(KV_HEADS))


def sizes_of(axes: list[str], arrays: Any) -> dict[str, int]:
    return {axis: n for names, x in zip(axes, arrays, strict=True) for axis, n in zip(names, x.shape, strict=True)}


def split_of(mesh: Any, axes: list[str], arrays: Any, specs: list[Any]) -> Split:
    """What the specs of the arrays say: of those that split an axis the largest array decides, as a cache beside a few
    new tokens. An axis stays whole where it cannot be divided evenly, and where its mesh axes split another one."""
    sizes = sizes_of(axes, arrays)
    found: dict[str, MeshAxes] = {}
    split = Split(found, sizes, mesh)
    large_first = sorted(zip(axes, specs, arrays, strict=True), key=lambda x: -math.prod(x[2].shape))
    for axis, names in _splits((axes, spec) for axes, spec, _ in large_first):
        target = HEADS if axis == KV_HEADS else axis
        if target in found or not names or any(name in used for used in found.values() for name in names):
            continue
        ways = split.ways(names)
        if sizes[target] % ways == 0 and (target != HEADS or _heads_divide(sizes, ways)):
            found[target] = names
            if target == HEADS and KV_HEADS in sizes and sizes[KV_HEADS] % ways == 0:
                found[KV_HEADS] = names
    found.update({axis: found[other] for axis, other in FOLLOWING.items() if other in found})
    return split


def spec_of(sharding: Any, mesh: Any, rank: int) -> PartitionSpec:
    """A sharding as the partitioner has it. An axis that is split over a part of a mesh axis, as by a reshape of one
    that was split over all of it, has no such spec and counts as whole."""
    try:
        indices = sharding.devices_indices_map((mesh.size,) * rank)  # a size that any number of ways divides
    except (AttributeError, NotImplementedError):  # not known
        return PartitionSpec()
    starts = np.array([[index.start or 0 for index in indices[device]] for device in mesh.devices.flat])
    starts = starts.reshape(*mesh.devices.shape, rank)
    return PartitionSpec(*(_mesh_axes(mesh, starts[..., axis]) or None for axis in range(rank)))


def _mesh_axes(mesh: Any, starts: np.ndarray) -> MeshAxes:
    """Over which mesh axes an axis is split, the major one first, if its parts start there on each device."""
    steps = [starts.take(min(1, n - 1), axis).flat[0] for axis, n in enumerate(starts.shape)]
    over = sorted((axis for axis, step in enumerate(steps) if step), key=lambda axis: -steps[axis])
    number = np.zeros_like(starts)
    for axis in over:
        number = number * starts.shape[axis] + np.indices(starts.shape)[axis]
    ways = math.prod(starts.shape[axis] for axis in over)
    return tuple(mesh.axis_names[axis] for axis in over) if (starts == number * (mesh.size // ways)).all() else ()


def refuse_others(split: Split, name: str, axes: str, array: Array) -> None:
    """ValueError for an array that would have to be gathered, or to change places."""
    type_ = jax.typeof(array)
    for axis, got, wanted in zip(axes, type_.sharding.spec, split.spec(axes), strict=False):
        if got not in (None, wanted) and axis not in (*FOLLOWING, GATHERED):
            raise ValueError(
                f"{name}: {_AXIS_NAMES.get(axis, 'an axis')} of {type_.str_short(True)} is split over {got!r}, not "
                f"{wanted!r}: on a mesh with explicit axes batch and heads alone are split, those of all operands "
                "alike. Reshard it (jax.sharding.reshard); for sequences there is ring_attention"
            )


_AXIS_NAMES = {
    "b": "the batch",
    "t": "the query axis",
    "s": "the key axis",
    "p": "the page axis",
    "n": "the head axis",
    "k": "the head axis",
}


def _splits(arrays: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, MeshAxes]]:
    for names, spec in arrays:
        for axis, entry in zip(names, spec, strict=False):
            if isinstance(entry, str | tuple) and (axis in (BATCH, HEADS, KV_HEADS) or axis.isupper()):
                yield axis, entry if isinstance(entry, tuple) else (entry,)


def _heads_divide(sizes: dict[str, int], ways: int) -> bool:
    """Whether each device has whole groups of heads, or heads of one group."""
    num_kv_heads = sizes.get(KV_HEADS, sizes[HEADS])
    return num_kv_heads % ways == 0 or ways % num_kv_heads == 0
