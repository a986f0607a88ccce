"""From raw q.k to masked logits and kept weights, on a tile in registers; the same mathematics as `scores.py`.

The tile has queries as rows and keys as columns, or the other way round (`TileIndex.transposed`): forward and backward
kernels share this. What an element needs of a larger array is gathered from device memory into its own register.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout, masks
from pallas_flash.kernels import softmax, tile_function
from pallas_flash.kernels.matmul import TensorCores
from pallas_flash.kernels.tile_mask import TileIndex
from pallas_flash.spec import AttentionSpec, Operands

Ref = Any


class ScoreOperands(NamedTuple):
    """What logits are made from beside q and k; what is absent is None (or empty). References are to device memory."""

    scale: Any  # a number, or a scalar
    score_mod: tuple[Ref, ...] = ()  # as in `function_arrays`, and likewise a predicate's in mask
    bias: Ref | None = None  # [1|B, 1|N, 1|T, 1|S]
    mask: tuple[tuple[Any, ...], ...] = ()  # of a part with one int32 a batch element: this element's; else references
    dropout_key: tuple[jax.Array, jax.Array] | None = None


def function_arrays(spec: AttentionSpec, operands: Operands) -> Operands:
    """`operands` with all arrays that score_mod and predicates read, those that they captured under `jit` included."""
    parts = zip(spec.mask, operands.mask, strict=True)
    of_part = lambda part, arrays: (  # noqa: E731
        tile_function.operands(part.function, arrays) if isinstance(part, masks.Predicate) else arrays
    )
    score_mod = () if spec.score_mod is None else tile_function.operands(spec.score_mod, operands.score_mod)
    return operands._replace(score_mod=score_mod, mask=tuple(of_part(*part) for part in parts))


class TileScores(NamedTuple):
    """Everything that the scores of one tile depend on."""

    spec: AttentionSpec
    operands: ScoreOperands
    index: TileIndex
    tensor_cores: TensorCores

    def logits(self, scores: jax.Array) -> jax.Array:
        """soft_cap(score_mod(scale * q.k)) + bias, in natural units, of scores = q.k."""
        spec, operands = self.spec, self.operands
        scores = scores * operands.scale
        if spec.score_mod is not None:
            scores = self._call(spec.score_mod, operands.score_mod, lambda: scores)
        if spec.soft_cap is not None:
            scores = softmax.soft_cap(scores, spec.soft_cap)
        if operands.bias is None:
            return scores
        bias = self._take(operands.bias).astype(jnp.float32)
        # -inf says "not allowed", whatever stands in q or k there.
        return jnp.where(bias == -jnp.inf, -jnp.inf, scores + bias)

    def derivative(self, scores: jax.Array, logits: jax.Array) -> jax.Array:
        """Of `logits`, which were made from these scores = q.k without a bias, by scale * q.k."""
        spec, operands = self.spec, self.operands
        assert operands.bias is None
        slope = None
        if spec.score_mod is not None:
            derivative = tile_function.derivative(spec.score_mod)
            slope = self._call(derivative, operands.score_mod, lambda: scores * operands.scale)
        if spec.soft_cap is not None:
            tanh = logits * (1 / spec.soft_cap)
            slope = 1 - tanh * tanh if slope is None else slope * (1 - tanh * tanh)
        assert slope is not None, "of scores that are only scaled it is 1"
        return slope

    def masked(self, scores: jax.Array, kv_len: int | None) -> jax.Array:
        """-inf where the mask forbids a pair. kv_len: and for keys from there on."""
        allowed = [self._allowed(part, arrays) for part, arrays in zip(self.spec.mask, self.operands.mask, strict=True)]
        if kv_len is not None:
            allowed.append(self.index.kv_pos < kv_len)
        return jnp.where(functools.reduce(jnp.logical_and, allowed), scores, -jnp.inf)

    def kept(self, weights: jax.Array) -> jax.Array:
        """The softmax weights that dropout keeps, not yet divided by 1 - rate; 0 elsewhere."""
        if self.operands.dropout_key is None:
            return weights
        keep = dropout.keep(self.operands.dropout_key, self.index, self.spec.dropout_rate)
        return jnp.where(keep, weights, 0.0)

    def _allowed(self, part: masks.Part, arrays: tuple[Any, ...]) -> jax.Array:
        index = self.index
        match part:
            case masks.Segments():
                axes = (index.q_axis, index.kv_axis)
                q_ids, kv_ids = (
                    index.spread(self.tensor_cores.take(ids.at[index.batch], (index.span(axis, ids.shape[1]),)), axis)
                    for ids, axis in zip(arrays, axes, strict=True)
                )
                return q_ids == kv_ids
            case masks.Dense():
                return self._take(arrays[0])
            case masks.Predicate():
                return self._call(part.function, arrays)
        return part.allowed(arrays, index)

    def _take(self, array: Ref) -> jax.Array:
        """The tile's part of an array [1|B, 1|N, 1|T, 1|S], as a tile."""
        index = self.index
        batch, head = (x if size > 1 else 0 for x, size in zip((index.batch, index.head), array.shape[:2], strict=True))
        axes = zip((index.q_axis, index.kv_axis), array.shape[2:], strict=True)
        spans = [index.span(axis, length) if length > 1 else None for axis, length in axes]
        part = array.at[(batch, head, *(0 if span is None else slice(None) for span in spans))]
        spans = tuple(span for span in spans if span is not None)
        value = self.tensor_cores.take(part, spans) if spans else part[...]
        return lax.broadcast_in_dim(value, index.shape, tuple(sorted(span.axis for span in spans)))

    def _call(self, function: Any, captures: tuple[Ref, ...], *first: Any) -> jax.Array:
        index = self.index
        place = [functools.partial(getattr, index, name) for name in ("batch", "head", "q_pos", "kv_pos")]
        value = tile_function.evaluate(function, captures, (*first, *place), self._read)
        return lax.broadcast_in_dim(value, index.shape, ()) if jnp.ndim(value) == 0 else value

    def _read(self, source: Ref, place: tuple[Any, ...]) -> jax.Array:
        tiles = any(jnp.ndim(x) for x in place)
        return self.tensor_cores.gather(source, place) if tiles else source[place]
