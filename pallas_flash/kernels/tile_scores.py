"""From raw q.k to masked logits and kept weights, on a tile in registers; the same mathematics as `scores.py`.

The tile has queries as rows and keys as columns, or the other way round (`TileIndex.transposed`): forward and backward
kernels share this. What an element needs of a larger array is gathered from device memory into its own register.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout, masks
from pallas_flash.kernels import softmax, tile_function
from pallas_flash.kernels.elements import Elements
from pallas_flash.kernels.tile_mask import TileIndex
from pallas_flash.spec import AttentionSpec, Operands

Ref = Any


class ScoreOperands(NamedTuple):
    """What logits are made from beside q and k; what is absent is None (or empty). References are to device memory."""

    scale: Any  # a number, or a scalar
    score_mod: tuple[Ref, ...] = ()  # as in `score_arrays`, and likewise a predicate's in mask
    bias: Ref | None = None  # [1|B, 1|N, 1|T, 1|S]
    mask: tuple[tuple[Any, ...], ...] = ()  # of a part with one int32 a batch element: this element's; else references
    dropout_key: tuple[jax.Array, jax.Array] | None = None
    kv_offset: Any = 0
    origin: tuple[jax.Array, jax.Array] | None = None


class ScoreArrays(NamedTuple):
    """What scores depend on beside q, k and scale: these as in `spec.Operands`, with all arrays that score_mod and
    predicates read, those that they captured under `jit` included."""

    q_offset: Any
    score_mod: tuple[Any, ...]
    bias: Any
    mask: tuple[tuple[Any, ...], ...]
    dropout_key: Any
    kv_offset: Any
    origin: Any


def score_arrays(spec: AttentionSpec, operands: Operands) -> ScoreArrays:
    """Of a call, in the order in which the kernels' `Inputs` have them."""
    parts = zip(spec.mask, operands.mask, strict=True)
    of_part = lambda part, arrays: (  # noqa: E731
        tile_function.operands(part.function, arrays) if isinstance(part, masks.Predicate) else arrays
    )
    score_mod = () if spec.score_mod is None else tile_function.operands(spec.score_mod, operands.score_mod)
    found = {name: getattr(operands, name) for name in ScoreArrays._fields}
    return ScoreArrays(**found | {"score_mod": score_mod, "mask": tuple(of_part(*part) for part in parts)})


def score_operands(spec: AttentionSpec, inputs: Any, batch: Any) -> ScoreOperands:
    """For one batch element. inputs: the references of a kernel, under the names of `spec.Operands`; scale is [1]."""
    of_batch = lambda part, arrays: tuple(x[batch] for x in arrays) if part.uses_batch else arrays  # noqa: E731
    key = inputs.dropout_key
    return ScoreOperands(
        scale=spec.scale if inputs.scale is None else inputs.scale[0],
        score_mod=inputs.score_mod,
        bias=inputs.bias,
        mask=tuple(map(of_batch, spec.mask, inputs.mask)),
        dropout_key=None if key is None else (key[0], key[1]),
        kv_offset=spec.kv_offset if inputs.kv_offset is None else inputs.kv_offset[batch],
        origin=None if inputs.origin is None else (inputs.origin[0], inputs.origin[1]),
    )


class TileScores(NamedTuple):
    """Everything that the scores of one tile depend on."""

    spec: AttentionSpec
    operands: ScoreOperands
    index: TileIndex
    elements: Elements

    @property
    def place(self) -> TileIndex:
        """Where the tile stands in the whole of a call that is spread over devices, for what asks for positions."""
        index, kv_offset, origin = self.index, self.operands.kv_offset, self.operands.origin
        if isinstance(kv_offset, int) and kv_offset == 0 and origin is None:
            return index
        batch, head = origin or (0, 0)
        base = index.kv_base + kv_offset
        return dataclasses.replace(index, batch=index.batch + batch, head=index.head + head, kv_base=base)

    def logits(self, scores: jax.Array) -> jax.Array:
        """soft_cap(score_mod(scale * q.k)) + bias, in natural units, of scores = q.k."""
        return self.biased(self.unbiased(scores))

    def unbiased(self, scores: jax.Array) -> jax.Array:
        spec, operands = self.spec, self.operands
        scores = scores * operands.scale
        if spec.score_mod is not None:
            scores = self._call(spec.score_mod, operands.score_mod, lambda: scores)
        return scores if spec.soft_cap is None else softmax.soft_cap(scores, spec.soft_cap)

    def biased(self, logits: jax.Array) -> jax.Array:
        if self.operands.bias is None:
            return logits
        bias = self._take(self.operands.bias).astype(jnp.float32)
        # -inf says "not allowed", whatever stands in q or k there.
        return jnp.where(bias == -jnp.inf, -jnp.inf, logits + bias)

    def derivative(self, scores: jax.Array, unbiased: jax.Array) -> jax.Array:
        """Of the logits, by scale * q.k; `unbiased` was made from these scores = q.k."""
        spec, operands = self.spec, self.operands
        slope = None
        if spec.score_mod is not None:
            derivative = tile_function.derivative(spec.score_mod)
            slope = self._call(derivative, operands.score_mod, lambda: scores * operands.scale)
        if spec.soft_cap is not None:
            tanh = unbiased * (1 / spec.soft_cap)
            slope = 1 - tanh * tanh if slope is None else slope * (1 - tanh * tanh)
        assert slope is not None, "of scores that are only scaled it is 1"
        return slope

    def masked(self, scores: jax.Array, kv_len: int | None) -> jax.Array:
        """-inf where the mask forbids a pair. kv_len: and for keys from there on."""
        allowed = [self._allowed(part, arrays) for part, arrays in zip(self.spec.mask, self.operands.mask, strict=True)]
        if kv_len is not None:
            allowed.append(self.index.kv_pos < kv_len)  # without its offset: the row
        return jnp.where(functools.reduce(jnp.logical_and, allowed), scores, -jnp.inf)

    def kept(self, weights: jax.Array) -> jax.Array:
        """The softmax weights that dropout keeps, not yet divided by 1 - rate; 0 elsewhere."""
        if self.operands.dropout_key is None:
            return weights
        keep = dropout.keep(self.operands.dropout_key, self.place, self.spec.dropout_rate)
        return jnp.where(keep, weights, 0.0)

    def add_bias_gradient(self, total: Ref | None, dlogits: jax.Array) -> None:
        """Add the gradient of the logits to a sum in device memory: as it is to [1|B, 1|N, T, S], or summed up along
        its rows to [B, N, T], or to [B, N, S] if the tile is transposed."""
        if total is None:
            return
        index = self.index
        batch, head = (x if size > 1 else 0 for x, size in zip((index.batch, index.head), total.shape[:2], strict=True))
        starts = (index.kv_base, index.q_base) if index.transposed else (index.q_base, index.kv_base)
        target = total.at[batch, head]
        if len(total.shape) == 4:
            assert not index.transposed, "only a tile with queries as rows stands in memory as it does in registers"
            self.elements.add(target, starts, dlogits)
        else:
            self.elements.add(target, starts[:1], dlogits.sum(axis=1))

    def _allowed(self, part: masks.Part, arrays: tuple[Any, ...]) -> jax.Array:
        index = self.index
        match part:
            case masks.Segments():
                axes = (index.q_axis, index.kv_axis)
                q_ids, kv_ids = (
                    index.spread(self.elements.take(ids.at[index.batch], (index.span(axis, ids.shape[1]),)), axis)
                    for ids, axis in zip(arrays, axes, strict=True)
                )
                return q_ids == kv_ids
            case masks.Dense():
                return self._take(arrays[0])
            case masks.Predicate():
                return self._call(part.function, arrays)
        return part.allowed(arrays, self.place)

    def _take(self, array: Ref) -> jax.Array:
        """The tile's part of an array [1|B, 1|N, 1|T, 1|S], as a tile."""
        index = self.index
        batch, head = (x if size > 1 else 0 for x, size in zip((index.batch, index.head), array.shape[:2], strict=True))
        axes = zip((index.q_axis, index.kv_axis), array.shape[2:], strict=True)
        spans = [index.span(axis, length) if length > 1 else None for axis, length in axes]
        part = array.at[(batch, head, *(0 if span is None else slice(None) for span in spans))]
        spans = tuple(span for span in spans if span is not None)
        value = self.elements.take(part, spans) if spans else part[...]
        return lax.broadcast_in_dim(value, index.shape, tuple(sorted(span.axis for span in spans)))

    def _call(self, function: Any, captures: tuple[Ref, ...], *first: Any) -> jax.Array:
        index = self.index
        place = [functools.partial(getattr, self.place, name) for name in ("batch", "head", "q_pos", "kv_pos")]
        value = tile_function.evaluate(function, captures, (*first, *place), self._read)
        return lax.broadcast_in_dim(value, index.shape, ()) if jnp.ndim(value) == 0 else value

    def _read(self, source: Ref, place: tuple[Any, ...]) -> jax.Array:
        tiles = any(jnp.ndim(x) for x in place)
        return self.elements.gather(source, place) if tiles else source[place]
