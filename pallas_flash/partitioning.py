"""Attention on arrays that are sharded over batch and heads: each device computes its own part, nothing is gathered.

A pass (forward or backward) is a function of `spec.Operands` and its like. The axes of all of its arrays have names,
b t s n k h e (batch, queries, keys, heads, key heads, the rest); b and n may be split over devices, all others are
whole on each. How this reaches the compiler depends on what kind of axes the mesh has:

- automatic ones (`jax.jit` with sharded arguments): `custom_partitioning`, which the partitioner asks once it knows the
  shardings;
- explicit ones: the shardings are in the types, and the pass is a `shard_map` over them;
- manual ones (inside the caller's `shard_map`): arrays are local already.

Sequences that are sharded are gathered by automatic axes and refused by explicit ones; distributed/ is for them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_flash.masks import Predicate, Segments
from pallas_flash.spec import Array, AttentionSpec, Cotangents, Forward, Gradients, Operands, Residuals

BATCH, HEADS, KV_HEADS = "b", "n", "k"
UNSPLIT = "."  # an axis that is whole on every device, whatever it is
MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Pass:
    """What one implementation, or one for each platform, computes. Arrays come as `function` takes them."""

    function: Callable[..., Any]  # (spec, operands, *more) -> Forward | Gradients
    spec: AttentionSpec
    backward: bool

    def __call__(self, *arrays: Any) -> Any:
        return self.function(self.spec, *arrays)

    def axes(self, operands: Operands) -> tuple[Any, Any]:
        """The axes of all arrays, and those of all results, in their own structures with strings as leaves."""
        of_operands, of_residuals = axes_of_operands(self.spec, operands), Residuals("btne", "bnt", "bnt")
        if not self.backward:
            return (of_operands,), Forward(of_residuals, "bn" if self.spec.return_max_logit else None)
        floating = lambda x, axes: axes if jnp.issubdtype(x.dtype, jnp.floating) else None  # noqa: E731
        score_mod = tuple(map(floating, operands.score_mod, of_operands.score_mod))
        fields = {name: getattr(of_operands, name) for name in ("q", "k", "v", "bias", "sinks", "scale")}
        gradients = Gradients(**fields, score_mod=score_mod)
        return (of_operands, of_residuals, Cotangents("btne", "bnt")), gradients


def axes_of_operands(spec: AttentionSpec, operands: Operands) -> Operands:
    shapes = operands.shapes
    kv_heads = HEADS if shapes.num_kv_heads == shapes.num_q_heads else KV_HEADS
    scores = lambda x: "".join(axis if n > 1 else UNSPLIT for axis, n in zip("bnts", x.shape, strict=True))  # noqa: E731

    def of_part(part: Any, arrays: tuple[Array, ...]) -> tuple[str, ...]:
        if part.uses_batch:
            return ("b",)
        if isinstance(part, Segments):
            return "bt", "bs"
        return tuple(UNSPLIT * x.ndim if isinstance(part, Predicate) else scores(x) for x in arrays)

    there = lambda axes, x: None if x is None else axes  # noqa: E731
    return Operands(
        q="btnh",
        k=f"bs{kv_heads}h",
        v=f"bs{kv_heads}e",
        bias=None if operands.bias is None else scores(operands.bias),
        sinks=there("n", operands.sinks),
        scale=there("", operands.scale),
        score_mod=tuple(UNSPLIT * x.ndim for x in operands.score_mod),
        mask=tuple(of_part(part, arrays) for part, arrays in zip(spec.mask, operands.mask, strict=True)),
        q_offset=there("b", operands.q_offset),
        kv_offset=there("b", operands.kv_offset),
        dropout_key=there(UNSPLIT, operands.dropout_key),
        origin=there(UNSPLIT, operands.origin),
    )


def run(pass_: Pass, operands: Operands, *more: Any) -> Any:
    """The pass on arrays that are sharded in any way."""
    explicit = explicit_axes((operands, *more))
    if not explicit and (_inside_shard_map() or jax.config.jax_disable_jit):
        return pass_(operands, *more)
    arrays, treedef = jax.tree.flatten((operands, *more))
    return _run(Program(pass_, treedef), explicit, *arrays)


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
        of_arrays, of_results = self.pass_.axes(jax.tree.unflatten(self.treedef, single)[0])
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
        num_heads = split.sizes[HEADS]
        _, of_results = self.axes(arrays)

        def compute(batch: Array, head: Array, *arrays: Array) -> Any:
            return self._mapped(lambda *x: self._part(split, (batch, head), num_heads, x))(*arrays)

        def local(*arrays: Array) -> Any:
            *of_pass, batches, heads = arrays
            results = wrap(compute)(batches[0], heads[0], *of_pass)
            add_up = lambda axes, x: lax.psum(x, rest) if (rest := split.not_in(axes)) else x  # noqa: E731
            return jax.tree.map(add_up, of_results, results)

        return local

    def _part(self, split: Split, first: tuple[Array, Array], num_heads: int, arrays: Any) -> Any:
        operands, *more = jax.tree.unflatten(self.treedef, arrays)
        spec, num_kv_heads = self.pass_.spec, operands.shapes.num_kv_heads
        if asks_for_places(spec):
            origin = jnp.stack(first) if operands.origin is None else operands.origin + jnp.stack(first)
            operands = operands._replace(origin=origin)
        if not split.heads_of_one_key_head(num_kv_heads):
            return self.pass_(operands, *more)
        head = first[1] // (num_heads // num_kv_heads)
        k, v = (lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (operands.k, operands.v))
        results = self.pass_(operands._replace(k=k, v=v), *more)
        if not isinstance(results, Gradients):
            return results
        dk, dv = (
            lax.dynamic_update_slice_in_dim(jnp.zeros_like(whole), part, head, axis=2)
            for whole, part in ((operands.k, results.k), (operands.v, results.v))
        )
        return results._replace(k=dk, v=dv)


def _pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that adds up in a mutable reference is pure as a whole, which what compiles the parts wants to see: a
    `custom_partitioning` says so, and where there is nothing left to partition it is its own function."""
    wrapped = custom_partitioning(function)
    wrapped.def_partition(None)
    return wrapped


def asks_for_places(spec: AttentionSpec) -> bool:
    """Whether a score depends on which batch element or head it belongs to."""
    return spec.score_mod is not None or spec.dropout_rate > 0 or any(isinstance(p, Predicate) for p in spec.mask)


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

    def heads_of_one_key_head(self, num_kv_heads: int) -> bool:
        """Whether a device has some of the query heads of one key head, out of several that are all there."""
        return num_kv_heads > 1 and self.ways(self.mesh_axes.get(HEADS, ())) > 1 and not self._shares_key_heads

    @property
    def _shares_key_heads(self) -> bool:
        return self.sizes.get(KV_HEADS) is None or bool(self.mesh_axes.get(KV_HEADS))


def split_of(mesh: Any, axes: list[str], arrays: Any, shardings: list[Any]) -> Split:
    """What the shardings of the arrays say: the first array that splits an axis decides. An axis stays whole where it
    cannot be divided evenly, and where its mesh axes split another one."""
    sizes = {axis: n for names, x in zip(axes, arrays, strict=True) for axis, n in zip(names, x.shape, strict=True)}
    found: dict[str, MeshAxes] = {}
    split = Split(found, sizes, mesh)
    for axis, names in _splits(axes, shardings):
        target = HEADS if axis == KV_HEADS else axis
        if target in found or not names or any(name in used for used in found.values() for name in names):
            continue
        ways = split.ways(names)
        if sizes[target] % ways == 0 and (target != HEADS or _heads_divide(sizes, ways)):
            found[target] = names
            if target == HEADS and KV_HEADS in sizes and sizes[KV_HEADS] % ways == 0:
                found[KV_HEADS] = names
    return split


def _splits(axes: list[str], shardings: list[Any]) -> Iterator[tuple[str, MeshAxes]]:
    for names, sharding in zip(axes, shardings, strict=True):
        for axis, entry in zip(names, getattr(sharding, "spec", ()), strict=False):
            if isinstance(entry, str | tuple) and (axis in (BATCH, HEADS, KV_HEADS) or axis.isupper()):
                yield axis, entry if isinstance(entry, tuple) else (entry,)


def _heads_divide(sizes: dict[str, int], ways: int) -> bool:
    """Whether each device has whole groups of heads, or heads of one group."""
    num_kv_heads = sizes.get(KV_HEADS, sizes[HEADS])
    return num_kv_heads % ways == 0 or ways % num_kv_heads == 0


def _numbers(axes: list[str], arrays: Any) -> tuple[Array, Array]:
    """Of the batch elements and heads. Split like what they number, they tell each device which ones it has."""
    batch, _, heads, _ = arrays[0].shape[axes[0].index(BATCH) :]
    return jnp.arange(batch, dtype=jnp.int32), jnp.arange(heads, dtype=jnp.int32)


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
        return _explicit(program, explicit, arrays) if explicit else _automatic(program, arrays)

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
    axes = [*axes, BATCH, HEADS]

    def split(mesh: Any, shapes: Any) -> Split:
        return split_of(mesh, axes, shapes, [getattr(x, "sharding", None) for x in shapes])

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
        sharding_rule=_shardy_rule(axes, jax.tree.leaves(of_results)),
    )
    return whole(*arrays, *_numbers(axes, arrays))


def _shardy_rule(axes: list[str], of_results: list[str]) -> SdyShardingRule:
    """The same in Shardy's words."""
    whole: list[str] = []

    def factor(axis: str, place: str) -> str:
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


def _explicit(program: Program, explicit: MeshAxes, arrays: Any) -> Any:
    """A shard_map over the explicit axes of the mesh."""
    axes, of_results = program.axes(arrays)
    shardings = [jax.typeof(x).sharding for x in arrays]
    mesh = next(s.mesh for s in shardings if AxisType.Explicit in s.mesh.axis_types)
    split = split_of(mesh, axes, arrays, shardings)
    specs = [split.spec(names) for names in axes]
    for names, array, sharding, spec in zip(axes, arrays, shardings, specs, strict=True):
        for axis, got, wanted in zip(names, sharding.spec, (*spec, *(None,) * len(names)), strict=False):
            if got not in (None, wanted):
                raise ValueError(
                    f"{_AXIS_NAMES.get(axis, 'an axis')} of {jax.typeof(array).str_short(True)} is split over {got!r}, "
                    f"not {wanted!r}: flash_attention shards batch and heads only, all operands alike. "
                    "Reshard it (jax.sharding.reshard); for sequences there is ring_attention"
                )
    specs += [split.spec(BATCH), split.spec(HEADS)]
    operands = (
        jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip((*arrays, *_numbers(axes, arrays)), specs, strict=True)
    )
    return jax.shard_map(
        program.on_shards(split, arrays),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=jax.tree.map(split.spec, of_results),
        axis_names=set(explicit),
        check_vma=False,  # sums over the axes that an array is not split over are written out in on_shards
    )(*operands)


_AXIS_NAMES = {"b": "the batch", "t": "the query axis", "s": "the key axis", "n": "the head axis", "k": "the head axis"}
