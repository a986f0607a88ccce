"""From raw scores to logits, on one tile: soft_cap(score_mod(scale * q.k)) + bias, and -inf where the mask says so."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from pallas_flash import masks
from pallas_flash.elementwise import PLACE
from pallas_flash.masks import Slice, slice_axis
from pallas_flash.spec import Array, AttentionSpec, Index, Operands, accumulator_dtype


class ScoreInputs(NamedTuple):
    """What changes scores and has a gradient, cut to one tile."""

    scale: Array | None
    score_mod: tuple[Array | None, ...]
    bias: Array | None


def split(inputs: ScoreInputs) -> tuple[ScoreInputs, ScoreInputs]:
    """(what has a gradient, the rest): integer arrays that score_mod captured have none. None fills the gaps."""
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in inputs.score_mod]
    floats = tuple(x if yes else None for x, yes in zip(inputs.score_mod, is_float, strict=True))
    others = tuple(None if yes else x for x, yes in zip(inputs.score_mod, is_float, strict=True))
    return inputs._replace(score_mod=floats), ScoreInputs(None, others, None)


def join(inputs: ScoreInputs, rest: ScoreInputs) -> ScoreInputs:
    both = zip(inputs.score_mod, rest.score_mod, strict=True)
    return inputs._replace(score_mod=tuple(y if x is None else x for x, y in both))


class Tile(NamedTuple):
    """A rectangle of scores: where it stands and which of its pairs take part (None: all)."""

    index: Index
    live: Array | None


def score_inputs(operands: Operands, q_slice: Slice, kv_slice: Slice) -> ScoreInputs:
    """The bias comes in the accumulator's dtype, so that its gradients of many tiles add up without rounding each."""
    bias = operands.bias
    if bias is not None:
        bias = slice_axis(slice_axis(bias, 2, q_slice), 3, kv_slice).astype(accumulator_dtype(operands.q.dtype))
    return ScoreInputs(operands.scale, operands.score_mod, bias)


def index_of(spec: AttentionSpec, operands: Operands, q_slice: Slice, kv_slice: Slice) -> Index:
    """The index of a tile, in shapes that broadcast to [B, N, rows, keys]."""
    shapes = operands.shapes
    axis = lambda n, dim: jnp.arange(n, dtype=jnp.int32).reshape([n if i == dim else 1 for i in range(4)])  # noqa: E731
    q_row = axis(q_slice.size, 2) + jnp.int32(q_slice.start)
    kv_row = axis(kv_slice.size, 3) + jnp.int32(kv_slice.start)
    q_offset, kv_offset = (
        jnp.int32(static) if array is None else array[:, None, None, None]
        for static, array in ((spec.q_offset, operands.q_offset), (spec.kv_offset, operands.kv_offset))
    )
    first_batch, first_head = (0, 0) if operands.origin is None else operands.origin
    batch_axis, _, head_axis, _ = jax.typeof(operands.q).sharding.spec
    return Index(
        batch=_sharded(axis(shapes.batch, 0), 0, batch_axis) + first_batch,
        head=_sharded(axis(shapes.num_q_heads, 1), 1, head_axis) + first_head,
        q_row=q_row,
        q_pos=q_row + q_offset,
        kv_row=kv_row,
        kv_pos=kv_row + kv_offset,
    )


def _sharded(index: Array, dim: int, mesh_axes: Any) -> Array:
    """On a mesh with explicit axes, an index must be sharded as what it is mapped beside."""
    if mesh_axes is None:
        return index
    return jax.sharding.reshard(index, PartitionSpec(*[mesh_axes if i == dim else None for i in range(index.ndim)]))


def tile_of(spec: AttentionSpec, operands: Operands, q_slice: Slice, kv_slice: Slice, *, masked: bool = True) -> Tile:
    """The tile of these rows and keys. masked=False: the caller knows that the mask allows all of it."""
    index = index_of(spec, operands, q_slice, kv_slice)
    live = None
    if masked:
        arrays = tuple(p.tile(a, q_slice, kv_slice) for p, a in zip(spec.mask, operands.mask, strict=True))
        live = masks.allowed(spec.mask, arrays, index)
    if operands.bias is not None:  # -inf says "not allowed", whatever stands in q or k there
        bias = score_inputs(operands, q_slice, kv_slice).bias
        live = bias != -jnp.inf if live is None else live & (bias != -jnp.inf)
    return Tile(index, live)


def logits(spec: AttentionSpec, raw: Array, inputs: ScoreInputs, tile: Tile, *, differentiated: bool = True) -> Array:
    """`raw` = q.k in the accumulator's dtype. Pairs that take no part are computed on 1 instead of their score, so that
    junk in q or k, or a score_mod with a pole at 0, cannot reach a gradient as 0 * NaN, and become -inf at the end.
    differentiated=False: nobody asks for gradients of this."""
    live, scale = tile.live, inputs.scale if spec.scale is None else spec.scale
    assert scale is not None
    scores = _rounded((raw if live is None else jnp.where(live, raw, 1)) * scale)
    if spec.score_mod is not None:
        captures, index = inputs.score_mod, tile.index
        sums_over_pairs = inputs.scale is not None or any(jnp.issubdtype(x.dtype, jnp.floating) for x in captures)
        if differentiated and live is not None and sums_over_pairs:
            captures, scores, index = _at_live_pairs(captures, scores, live, index)
        scores = spec.score_mod(captures, scores, index.batch, index.head, index.q_pos, index.kv_pos)
        scores = _rounded(scores)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    if inputs.bias is not None:
        scores = scores + inputs.bias
    return scores if live is None else jnp.where(live, scores, -jnp.inf)


def _at_live_pairs(
    captures: tuple[Array, ...], scores: Array, live: Array, index: Index
) -> tuple[tuple[Array, ...], Array, Index]:
    """The arguments of score_mod, with those of a pair that takes part in place of those of each that does not.

    score_mod may have a pole where the mask hides it, as log(q_pos - kv_pos), and what it captures may be junk there.
    A gradient that is a sum over all pairs would be NaN by 0 times such a pair's derivative. The pair taken instead is
    one of the same head, so that heads stay the few scalars that they are, or of another where a head has none.
    """
    rows = (index.batch, index.head, index.q_row, index.kv_row)
    score = jnp.where(live, scores, 0)
    values = {"score": score, **{name: getattr(index, name) for name in PLACE}}
    for group in ((2, 3), (0, 1)):
        axes = tuple(axis for axis in group if live.shape[axis] > 1)
        first = live
        for axis, *behind in (axes[i:] for i in range(len(axes))):
            place = jnp.where(first, rows[axis], jnp.iinfo(jnp.int32).max)
            first = first & (rows[axis] == jnp.min(place, (axis, *behind), keepdims=True))
        for name, value in values.items():
            if any(value.shape[axis] > 1 for axis in axes):
                of_first = jnp.sum(jnp.where(first, value, 0), axes, value.dtype, keepdims=True)
                values[name] = jnp.where(live, value, lax.stop_gradient(of_first))
        live = jnp.any(live, axes, keepdims=True)
    some_pair = live.any()  # without one, nothing of what was captured counts
    captures = tuple(jnp.where(some_pair, x, jnp.zeros((), x.dtype)) for x in captures)
    return captures, values.pop("score"), index._replace(**values)


def _rounded(product: Array) -> Array:
    """The product as a number of its own. A compiler that contracts `product - maximum` into one multiply-add compares
    an exact product with a rounded one: at logits of 1e9 the largest weight is then exp(100) instead of 1."""
    return jnp.where(product == -jnp.inf, -jnp.inf, jnp.maximum(product, jnp.finfo(product.dtype).min))
