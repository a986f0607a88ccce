"""What is computed on sharded arrays: a pass is a function of a call's arrays that knows their axes, and how one device
computes its part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from pallas_flash import elementwise
from pallas_flash.combine import Partial
from pallas_flash.decode_spec import DecodeOperands, DecodeSpec
from pallas_flash.masks import Predicate, Segments
from pallas_flash.spec import (
    Array,
    AttentionSpec,
    Cotangents,
    Forward,
    Gradients,
    Operands,
    Residuals,
    Shapes,
    accumulator_dtype,
)
from pallas_flash.splits import GATHERED, HEADS, KV_HEADS, UNSPLIT, Split, there

First = tuple[Array, Array]  # the numbers of a device's first batch element and head


class Pass(Protocol):
    """Hashable: programs are cached by it."""

    @property
    def names(self) -> Mapping[str, str]:
        """What callers call the fields of the first array tuple, where that is something else."""
        ...

    def __call__(self, *arrays: Any) -> Any: ...

    def axes(self, *arrays: Any) -> tuple[Any, Any]:
        """The axes of all arrays, and those of all results, in their own structures with strings as leaves."""
        ...

    def part(self, split: Split, first: First, *arrays: Any) -> Any:
        """On the local arrays of one device."""
        ...


@dataclasses.dataclass(frozen=True)
class AttentionPass:
    """What one implementation, or one for each platform, computes. Arrays come as `function` takes them."""

    function: Callable[..., Any]  # (spec, operands, *more) -> Forward | Gradients
    spec: AttentionSpec
    backward: bool = False

    @property
    def names(self) -> Mapping[str, str]:
        return {"q": "query", "k": "key", "v": "value"}

    def __call__(self, *arrays: Any) -> Any:
        return self.function(self.spec, *arrays)

    def axes(self, operands: Operands, *_: Any) -> tuple[Any, Any]:
        of_operands, of_residuals = axes_of_operands(self.spec, operands), Residuals("btne", "bnt", "bnt")
        if not self.backward:
            return (of_operands,), Forward(of_residuals, "bn" if self.spec.return_max_logit else None)
        floating = lambda x, axes: axes if jnp.issubdtype(x.dtype, jnp.floating) else None  # noqa: E731
        score_mod = tuple(map(floating, operands.score_mod, of_operands.score_mod))
        fields = {name: getattr(of_operands, name) for name in ("q", "k", "v", "bias", "sinks", "scale")}
        gradients = Gradients(**fields, score_mod=score_mod)
        return (of_operands, of_residuals, Cotangents("btne", "bnt")), gradients

    def part(self, split: Split, first: First, operands: Operands, *more: Any) -> Any:
        if asks_for_places(self.spec):
            origin = jnp.stack(first)
            operands = operands._replace(origin=origin if operands.origin is None else operands.origin + origin)
        head = split.key_head(first[1], operands.shapes.num_kv_heads)
        if head is None:
            return self(operands, *more)
        results = self(operands._replace(**of_one_head(head, k=operands.k, v=operands.v)), *more)
        if not isinstance(results, Gradients):
            return results
        dk, dv = (
            lax.dynamic_update_slice_in_dim(jnp.zeros_like(whole), part, head, axis=2)
            for whole, part in ((operands.k, results.k), (operands.v, results.v))
        )
        return results._replace(k=dk, v=dv)


def of_one_head(head: Array, **arrays: Array | None) -> dict[str, Array | None]:
    """Of arrays whose axis 2 are key heads."""
    return {name: None if x is None else lax.dynamic_slice_in_dim(x, head, 1, axis=2) for name, x in arrays.items()}


def axes_of_operands(spec: AttentionSpec, operands: Operands) -> Operands:
    shapes = operands.shapes
    kv_heads = _kv_heads(shapes)
    scores = lambda x: "".join(axis if n > 1 else UNSPLIT for axis, n in zip("bnts", x.shape, strict=True))  # noqa: E731

    def of_part(part: Any, arrays: tuple[Array, ...]) -> tuple[str, ...]:
        if part.uses_batch:
            return ("d",)
        if isinstance(part, Segments):
            return "d_", "d_"
        return tuple(GATHERED * x.ndim if isinstance(part, Predicate) else scores(x) for x in arrays)

    return Operands(
        q="btnh",
        k=f"bs{kv_heads}h",
        v=f"bs{kv_heads}e",
        bias=None if operands.bias is None else scores(operands.bias),
        sinks=there("m", operands.sinks),
        scale=there("", operands.scale),
        score_mod=tuple(GATHERED * x.ndim for x in operands.score_mod),
        mask=tuple(of_part(part, arrays) for part, arrays in zip(spec.mask, operands.mask, strict=True)),
        q_offset=there("d", operands.q_offset),
        kv_offset=there("d", operands.kv_offset),
        dropout_key=there(UNSPLIT, operands.dropout_key),
        origin=there(UNSPLIT, operands.origin),
    )


def asks_for_places(spec: AttentionSpec) -> bool:
    """Whether a score depends on which batch element or head it belongs to."""
    return spec.score_mod is not None or spec.dropout_rate > 0 or any(isinstance(p, Predicate) for p in spec.mask)


def _kv_heads(shapes: Shapes) -> str:
    return HEADS if shapes.num_kv_heads == shapes.num_q_heads else KV_HEADS


@dataclasses.dataclass(frozen=True)
class DecodePass:
    """Decoding. Pages are whole but for their heads: any sequence may read any of them."""

    function: Callable[..., Partial]  # (spec, operands)
    spec: DecodeSpec
    paged: bool

    @property
    def names(self) -> Mapping[str, str]:
        stored = "pages" if self.paged else "cache"
        return {"q": "query", "k": f"key_{stored}", "v": f"value_{stored}"}

    def __call__(self, *arrays: Any) -> Partial:
        return self.function(self.spec, *arrays)

    def axes(self, operands: DecodeOperands) -> tuple[tuple[DecodeOperands], Partial]:
        rows = f"{'ps' if self.paged else 'bs'}{_kv_heads(operands.shapes)}"
        of_operands = DecodeOperands(
            q="btnh",
            k=f"{rows}h",
            v=f"{rows}e",
            kv_lengths="d",
            page_table=there("d_", operands.page_table),
            q_lengths=there("d", operands.q_lengths),
            k_scale=there(rows, operands.k_scale),
            v_scale=there(rows, operands.v_scale),
            sinks=there("m", operands.sinks),
            scale=there("", operands.scale),
            score_mod=tuple(GATHERED * x.ndim for x in operands.score_mod),
        )
        return (of_operands,), Partial("btne", "btn")  # pyright: ignore[reportArgumentType]

    def part(self, split: Split, first: First, operands: DecodeOperands) -> Partial:
        spec = self.spec
        if spec.score_mod is not None:
            score_mod, captures = _counted_from(first, spec.score_mod, operands)
            spec, operands = dataclasses.replace(spec, score_mod=score_mod), operands._replace(score_mod=captures)
        head = split.key_head(first[1], operands.shapes.num_kv_heads)
        if head is not None:
            fields = {name: getattr(operands, name) for name in ("k", "v", "k_scale", "v_scale")}
            operands = operands._replace(**of_one_head(head, **fields))
        return self.function(spec, operands)


def _counted_from(
    first: First, score_mod: elementwise.Elementwise, operands: DecodeOperands
) -> tuple[elementwise.Elementwise, tuple[Array, ...]]:
    """The same for local batch and head numbers."""

    def counted(score: Array, batch: Array, head: Array, q_pos: Array, kv_pos: Array) -> Array:
        return score_mod(operands.score_mod, score, batch + first[0], head + first[1], q_pos, kv_pos)

    dtype = accumulator_dtype(operands.q.dtype)
    return elementwise.trace("score_mod", counted, {"score": dtype} | elementwise.PLACE, dtype)
