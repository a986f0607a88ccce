"""Attention on arrays that are sharded over batch and heads: each device computes its own part, nothing is gathered.

A pass (passes.py) says which axes of its arrays may be split over devices (splits.py). How this reaches the compiler
depends on what kind of axes the mesh has:

- automatic ones (`jax.jit` with sharded arguments): `custom_partitioning`, which the partitioner asks once it knows the
  shardings;
- explicit ones: the shardings are in the types, and the pass is a `shard_map` over them. Operands that are sharded
  otherwise than the others are brought to them before (`alike`), so that gradients are sharded as what they belong to;
- manual ones (inside the caller's `shard_map`): arrays are local already.

Sequences that are sharded are gathered by automatic axes and refused by explicit ones; distributed/ is for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding

from pallas_flash.passes import Pass
from pallas_flash.spec import Array
from pallas_flash.splits import (
    BATCH,
    FOLLOWING,
    HEADS,
    KV_HEADS,
    MeshAxes,
    Split,
    refuse_others,
    sizes_of,
    spec_of,
    split_of,
)


def run(pass_: Pass, *arrays: Any) -> Any:
    """The pass on arrays that are sharded in any way."""
    explicit = explicit_axes(arrays)
    if not explicit and (_inside_shard_map() or jax.config.jax_disable_jit):
        return pass_(*arrays)
    flat, treedef = jax.tree.flatten(arrays)
    return _run(Program(pass_, treedef), explicit, *flat)


def differentiated_by_jax(pass_: Pass, *arrays: Any) -> Any:
    """Likewise, for a pass of JAX's own operations, which JAX differentiates and maps, and XLA partitions."""
    explicit = explicit_axes(arrays)
    if not explicit:
        return pass_(*arrays)
    flat, treedef = jax.tree.flatten(arrays)
    return _explicit(Program(pass_, treedef), explicit, *flat)


def alike[T](pass_: Pass, arrays: T) -> T:
    """The arrays of a call, on explicit axes all sharded as its pass wants them; elsewhere as they are."""
    if not explicit_axes(arrays):
        return arrays
    flat, treedef = jax.tree.flatten(arrays)
    return jax.tree.unflatten(treedef, _alike(Program(pass_, jax.tree.structure((arrays,))), *flat))


def explicit_axes(arrays: Any) -> MeshAxes:
    """The explicit axes of the mesh that any of the arrays is on."""
    for array in jax.tree.leaves(arrays):
        mesh = jax.typeof(array).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
            return tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    return ()


def _inside_shard_map() -> bool:
    """Arrays are local there. Axes that a shard_map leaves to the compiler take no rule: XLA partitions what it can."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


@dataclasses.dataclass(frozen=True)
class Program:
    """A pass as a function of a flat list of arrays, mapped by `vmap` once for each entry of `mapped`, which says of
    each array whether it has that axis. Mapped axes come first and are named A, B, ..."""

    pass_: Pass
    treedef: Any
    mapped: tuple[tuple[bool, ...], ...] = ()

    def __call__(self, *arrays: Array) -> Any:
        return self._mapped(lambda *x: self.pass_(*jax.tree.unflatten(self.treedef, x)))(*arrays)

    def _mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        for flags in reversed(self.mapped):
            function = jax.vmap(function, tuple(0 if flag else None for flag in flags))
        return function

    @property
    def letters(self) -> str:
        return "".join(chr(ord("A") + i) for i in range(len(self.mapped)))

    def axes(self, arrays: Any) -> tuple[list[str], Any]:
        """Of the flat arrays, and of the results in their own structure."""
        ranks = [sum(flags) for flags in zip(*self.mapped, strict=True)] if self.mapped else [0] * len(arrays)
        single = [jax.ShapeDtypeStruct(x.shape[n:], x.dtype) for x, n in zip(arrays, ranks, strict=True)]
        of_arrays, of_results = self.pass_.axes(*jax.tree.unflatten(self.treedef, single))
        prefixes = [
            "".join(letter for letter, flags in zip(self.letters, self.mapped, strict=True) if flags[i])
            for i in range(len(arrays))
        ]
        flat = [prefix + axes for prefix, axes in zip(prefixes, jax.tree.leaves(of_arrays), strict=True)]
        return flat, jax.tree.map(lambda axes: self.letters + axes, of_results)

    def on_shards(self, split: Split, arrays: Any, wrap: Callable[..., Any] = lambda f: f) -> Callable[..., Any]:
        """The function of local arrays, and of the local batch and head numbers, that gives the local results.

        wrap: around everything but the sums over devices.
        """
        _, of_results = self.axes(arrays)
        part = partial(self.pass_.part, split)

        def compute(batch: Array, head: Array, *arrays: Array) -> Any:
            return self._mapped(lambda *x: part((batch, head), *jax.tree.unflatten(self.treedef, x)))(*arrays)

        def local(*arrays: Array) -> Any:
            *of_pass, batches, heads = arrays
            results = wrap(compute)(batches[0], heads[0], *of_pass)
            add_up = lambda axes, x: lax.psum(x, rest) if (rest := split.not_in(axes)) else x  # noqa: E731
            return jax.tree.map(add_up, of_results, results)

        return local

    @property
    def names(self) -> list[str]:
        """Of the flat arrays, as a caller knows them."""
        places = jax.tree.unflatten(self.treedef, range(self.treedef.num_leaves))
        fields = (str(getattr(path[1], "name", path[1])) for path, _ in jax.tree.leaves_with_path(places))
        return [self.pass_.names.get(field, field) for field in fields]


def _pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that adds up in a mutable reference is pure as a whole, which what compiles the parts wants to see: a
    `custom_partitioning` says so, and where there is nothing left to partition it is its own function."""
    wrapped = custom_partitioning(function)
    wrapped.def_partition(None)
    return wrapped


def _numbers(axes: list[str], arrays: Any) -> tuple[Array, Array]:
    """Of the batch elements and heads. Split like what they number, they tell each device which ones it has."""
    sizes = sizes_of(axes, arrays)
    batch, heads = (jnp.arange(sizes.get(axis, 1), dtype=jnp.int32) for axis in (BATCH, HEADS))
    return batch, heads


@partial(jax.jit, static_argnums=(0, 1))
def _run(program: Program, explicit: MeshAxes, *arrays: Array) -> Any:
    @jax.custom_jvp
    def differentiable(*arrays: Array) -> Any:
        return mappable(*arrays)

    @differentiable.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:  # second derivatives: as the pass itself has them
        return jax.jvp(program, primals, tangents)

    @jax.custom_batching.custom_vmap
    def mappable(*arrays: Array) -> Any:
        return _explicit(program, explicit, *arrays) if explicit else _automatic(program, arrays)

    @mappable.def_vmap
    def _vmap(axis_size: int, in_batched: Any, *arrays: Array) -> Any:
        del axis_size
        mapped = dataclasses.replace(program, mapped=(tuple(in_batched), *program.mapped))
        results = _run(mapped, explicit, *arrays)
        return results, jax.tree.map(lambda _: True, results)

    # A shard_map is differentiated as it is, and no kernel with a mutable reference may stand in a custom_jvp.
    return mappable(*arrays) if explicit else differentiable(*arrays)


def _automatic(program: Program, arrays: Any) -> Any:
    """A rule that the partitioner asks."""
    axes, of_results = program.axes(arrays)
    arrays = (*arrays, *_numbers(axes, arrays))
    axes = [*axes, BATCH, HEADS]

    def split(mesh: Any, shapes: Any) -> Split:
        return split_of(mesh, axes, shapes, [spec_of(x.sharding, mesh, len(x.shape)) for x in shapes])

    def results(split: Split) -> Any:
        return jax.tree.map(lambda axes: NamedSharding(split.mesh, split.spec(axes)), of_results)

    def partition(mesh: Any, shapes: Any, _: Any) -> Any:
        how = split(mesh, shapes)
        shardings = tuple(NamedSharding(mesh, how.spec(names)) for names in axes)
        return mesh, program.on_shards(how, shapes[:-2], _pure), results(how), shardings

    @custom_partitioning
    def whole(*arrays: Array) -> Any:
        return program(*arrays[:-2])

    whole.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, shapes, _: results(split(mesh, shapes)),
        decode_shardings=False,  # JAX fails on those that are no PartitionSpec
        sharding_rule=_shardy_rule(axes, jax.tree.leaves(of_results)),
    )
    return whole(*arrays)


def _shardy_rule(axes: list[str], of_results: list[str]) -> SdyShardingRule:
    """The same in Shardy's words."""
    whole: list[str] = []

    def factor(axis: str, place: str) -> str:
        axis = FOLLOWING.get(axis, axis)
        if axis in (BATCH, HEADS, KV_HEADS):
            return axis
        if axis.isupper():
            return f"mapped{axis}"
        whole.append(place)
        return place

    def mappings(side: str, names: list[str]) -> tuple[ArrayMapping, ...]:
        return tuple(
            ArrayMapping(*(factor(axis, f"{side}{i}_{j}") for j, axis in enumerate(axes)))
            for i, axes in enumerate(names)
        )

    operands, results = mappings("operand", axes), mappings("result", of_results)
    return SdyShardingRule(operands, results, need_replication_factors=tuple(whole))


@partial(jax.jit, static_argnums=0)
def _alike(program: Program, *arrays: Array) -> list[Array]:
    return _placed(program.axes(arrays)[0], list(arrays), program.names)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _explicit(program: Program, explicit: MeshAxes, *arrays: Array) -> Any:
    """A shard_map over the explicit axes of the mesh."""
    axes, of_results = program.axes(arrays)
    names = [*program.names, "batch numbers", "head numbers"]
    numbered, axes = [*arrays, *_numbers(axes, arrays)], [*axes, BATCH, HEADS]
    operands, split = _placed(axes, numbered, names)
    # The trace of one instance of a vmap has the whole mesh, yet not the axis that the instances are split over. By
    # default shard_map takes all that it has.
    all_explicit = len(explicit) == len(split.mesh.axis_names)
    return jax.shard_map(
        program.on_shards(split, arrays),
        mesh=split.mesh,
        in_specs=tuple(map(split.spec, axes)),
        out_specs=jax.tree.map(split.spec, of_results),
        axis_names=set() if all_explicit else set(explicit),
        check_vma=False,  # sums over the axes that an array is not split over are written out in on_shards
    )(*operands)


def _placed(axes: list[str], arrays: list[Array], names: list[str]) -> tuple[list[Array], Split]:
    """The arrays, sharded alike, and how."""
    shardings = [jax.typeof(x).sharding for x in arrays]
    mesh = next(s.mesh for s in shardings if AxisType.Explicit in s.mesh.axis_types)
    split = split_of(mesh, axes, arrays, [s.spec for s in shardings])
    for name, of_array, array in zip(names, axes, arrays, strict=True):
        refuse_others(split, name, of_array, array)
    places = [NamedSharding(mesh, split.spec(of_array)) for of_array in axes]
    return list(map(jax.sharding.reshard, arrays, places)), split
