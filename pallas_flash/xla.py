"""Flash attention in plain JAX: chunk by chunk, memory linear in the sequence length, on any device.

The forward pass is FlashAttention-2's recurrence (Dao 2023, section 3.1): into the rows of a query tile, fold one tile
of keys after the other, rescale what is there when the maximum grows, divide once at the end. The backward pass
recomputes the softmax weights of each tile from m and l and needs five matrix products a tile. Only the tile pairs that
the mask needs are visited; those it allows as a whole are not masked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout, products, scores
from pallas_flash.masks import Slice
from pallas_flash.scores import ScoreInputs, Tile
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
    vary,
    varying_axes,
)
from pallas_flash.tile_ranges import static_pairs

NAME = "xla"

# A tile of scores, over all heads and the batch, has at most this many elements unless it would be smaller than
# MIN_BLOCK squared: large enough to feed the matrix unit, small enough to stay near the cache.
TILE_ELEMENTS = 2**21
MIN_BLOCK, MAX_BLOCK = 128, 512


def unsupported(spec: AttentionSpec, operands: Operands) -> str | None:
    return None


class Blocks(NamedTuple):
    """How the score matrix is cut. The last tile of a side ends at the array's end and may overlap the one before."""

    q: int
    kv: int
    shapes: Shapes

    def slices(self, qi: Array, ki: Array) -> tuple[Slice, Slice]:
        return (
            Slice(jnp.minimum(qi * self.q, self.shapes.q_len - self.q), self.q),
            Slice(jnp.minimum(ki * self.kv, self.shapes.kv_len - self.kv), self.kv),
        )

    @property
    def overlapping(self) -> tuple[bool, bool]:
        return self.shapes.q_len % self.q != 0, self.shapes.kv_len % self.kv != 0


def _blocks(shapes: Shapes) -> Blocks:
    side = (TILE_ELEMENTS / max(1, shapes.batch * shapes.num_q_heads)) ** 0.5
    block = int(min(MAX_BLOCK, max(MIN_BLOCK, side)))
    even = lambda length: -(-length // -(-length // block)) if length else 1  # noqa: E731
    return Blocks(even(shapes.q_len), even(shapes.kv_len), shapes)


def _visit(step: Callable[..., Any], carry: Any, spec: AttentionSpec, blocks: Blocks) -> Any:
    """Fold `step(carry, qi, ki, masked=...)` over the tile pairs that the mask needs: first over those it allows as a
    whole, then over the others. Any order gives the same sums; so the body exists once without and once with mask."""
    qi, ki, masked = static_pairs(spec, blocks.shapes, blocks.q, blocks.kv)
    last_q, last_kv = -(-blocks.shapes.q_len // blocks.q) - 1, -(-blocks.shapes.kv_len // blocks.kv) - 1
    q_overlaps, kv_overlaps = blocks.overlapping
    masked = masked | (q_overlaps & (qi == last_q)) | (kv_overlaps & (ki == last_kv))
    for chosen, is_masked in ((~masked, False), (masked, True)):
        if chosen.any():
            fold = partial(_fold, partial(step, masked=is_masked))
            carry, _ = lax.scan(fold, carry, (jnp.asarray(qi[chosen]), jnp.asarray(ki[chosen])))
    return carry


def _fold(step: Callable[..., Any], carry: Any, pair: tuple[Array, Array]) -> tuple[Any, None]:
    return step(carry, *pair), None


class Call(NamedTuple):
    """One call, prepared: heads come before rows, and it is known whether NaN or Inf stands anywhere."""

    spec: AttentionSpec
    operands: Operands
    blocks: Blocks
    q: Array  # [B, N, T, H]
    k: Array  # [B, K, S, H]
    v: Array  # [B, K, S, Hv]
    junk: Array  # bool []

    @classmethod
    def prepare(cls, spec: AttentionSpec, operands: Operands, *more: Array) -> Call:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (operands.q, operands.k, operands.v))
        return cls(spec, operands, _blocks(operands.shapes), q, k, v, products.has_junk(q, k, v, *more))

    def tile(self, qi: Array, ki: Array, *, masked: bool) -> Tile:
        q_slice, kv_slice = self.blocks.slices(qi, ki)
        index, live = scores.tile_of(self.spec, self.operands, q_slice, kv_slice, masked=masked)
        if masked:  # where tiles overlap, a pair belongs to the earlier one
            q_overlaps, kv_overlaps = self.blocks.overlapping
            for overlaps, owned in (
                (q_overlaps, index.q_row >= qi * self.blocks.q),
                (kv_overlaps, index.kv_row >= ki * self.blocks.kv),
            ):
                if overlaps:
                    live = owned if live is None else live & owned
        return Tile(index, live)

    def zeros_like(self, array: Array) -> Array:
        """What a loop's sum begins with: sharded as the array is, and inside shard_map varying as it does."""
        return vary(jnp.zeros_like(array, dtype=accumulator_dtype(self.q.dtype)), varying_axes(array))


def _rows(array: Array, rows: Slice) -> Array:
    return lax.dynamic_slice_in_dim(array, rows.start, rows.size, 2)


def _set_rows(array: Array, value: Array, rows: Slice) -> Array:
    return lax.dynamic_update_slice_in_dim(array, value, rows.start, 2)


def _add_tile(array: Array, value: Array, q_slice: Slice, kv_slice: Slice) -> Array:
    """Add a tile's share to an array over [1|B, 1|N, 1|T, 1|S]; an axis of size 1 collects all tiles."""
    zero = jnp.int32(0)
    q_start, kv_start = (zero if array.shape[axis] == 1 else x.start for axis, x in ((2, q_slice), (3, kv_slice)))
    start = (zero, zero, q_start, kv_start)
    old = lax.dynamic_slice(array, start, value.shape)
    return lax.dynamic_update_slice(array, old + value, start)


class SoftmaxState(NamedTuple):
    m: Array  # [B, N, T]
    l: Array  # noqa: E741  [B, N, T]
    acc: Array  # [B, N, T, Hv]


def forward(spec: AttentionSpec, operands: Operands) -> Forward:
    call = Call.prepare(spec, operands)
    row_zeros = call.zeros_like(call.q.sum(axis=-1))
    acc = jnp.broadcast_to(row_zeros[..., None], (*row_zeros.shape, operands.shapes.value_head_dim))
    state = SoftmaxState(m=row_zeros - jnp.inf, l=row_zeros, acc=acc)
    m, l, acc = _visit(partial(_forward_step, call), state, spec, call.blocks)  # noqa: E741
    max_logit = jnp.max(m, axis=-1, initial=-jnp.inf) if spec.return_max_logit else None
    if operands.sinks is not None:  # joins once the maximum over all keys is known
        sinks = operands.sinks.astype(m.dtype)[None, :, None]
        m_old, m = m, jnp.maximum(m, sinks)
        shift = _finite_shift(m)
        alpha = jnp.exp(m_old - shift)
        l, acc = l * alpha + jnp.exp(sinks - shift), acc * alpha[..., None]  # noqa: E741
    out = acc / jnp.where(l == 0, 1, l)[..., None]
    return Forward(Residuals(jnp.swapaxes(out, 1, 2).astype(operands.q.dtype), m, l), max_logit)


def _finite_shift(m: Array) -> Array:
    """What to subtract from logits: the maximum, or 0 in a row that has met no key (-inf - -inf is NaN)."""
    return jnp.where(m == -jnp.inf, 0, m)


def _forward_step(call: Call, state: SoftmaxState, qi: Array, ki: Array, *, masked: bool) -> SoftmaxState:
    spec, operands = call.spec, call.operands
    qs, ks = call.blocks.slices(qi, ki)
    tile = call.tile(qi, ki, masked=masked)
    raw = products.scores(_rows(call.q, qs), _rows(call.k, ks), spec.precision)
    s = scores.logits(spec, raw, scores.score_inputs(operands, qs, ks), tile, differentiated=False)

    m_old, l, acc = (_rows(x, qs) for x in state)  # noqa: E741
    m = jnp.maximum(m_old, jnp.max(s, axis=-1))
    shift = _finite_shift(m)
    alpha = jnp.exp(m_old - shift)
    p = jnp.exp(s - shift[..., None])
    l = l * alpha + jnp.sum(p, axis=-1)  # noqa: E741
    p = dropout.scale_kept(spec, operands.dropout_key, tile.index, p)
    acc = acc * alpha[..., None] + products.sum_over_keys(p, _rows(call.v, ks), tile.live, spec.precision, call.junk)
    return SoftmaxState(*(_set_rows(x, value, qs) for x, value in zip(state, (m, l, acc), strict=True)))


class GradientState(NamedTuple):
    """The sums of the backward pass, in the accumulator's dtype."""

    dq: Array  # [B, N, T, H]
    dk: Array  # [B, K, S, H]
    dv: Array  # [B, K, S, Hv]
    inputs: ScoreInputs  # in the shapes of the whole operands


class Rows(NamedTuple):
    """What the backward pass needs of each query row beside q."""

    dout: Array  # [B, N, T, Hv]
    m: Array  # [B, N, T]
    l: Array  # noqa: E741  [B, N, T]
    delta: Array  # [B, N, T], sum(out * dout) - dlse


def backward(spec: AttentionSpec, operands: Operands, residuals: Residuals, cotangents: Cotangents) -> Gradients:
    rows = backward_rows(residuals, cotangents)
    call = Call.prepare(spec, operands, rows.dout)
    inputs = ScoreInputs(operands.scale, operands.score_mod, operands.bias)
    state = GradientState(*jax.tree.map(call.zeros_like, (call.q, call.k, call.v, scores.split(inputs)[0])))
    state = _visit(partial(_backward_step, call, rows), state, spec, call.blocks)
    dq, dk, dv = (
        jnp.swapaxes(x, 1, 2).astype(operand.dtype)
        for x, operand in zip(state[:3], (operands.q, operands.k, operands.v), strict=True)
    )
    dinputs = jax.tree.map(lambda total, x: total.astype(x.dtype), state.inputs, scores.split(inputs)[0])
    return Gradients(dq, dk, dv, dinputs.bias, sink_gradient(operands, rows), dinputs.scale, dinputs.score_mod)


def backward_rows(residuals: Residuals, cotangents: Cotangents) -> Rows:
    """Rows with no key get zeros, so that no junk in their cotangents goes any further."""
    out, m, l = residuals  # noqa: E741
    dead = m == -jnp.inf
    dout = jnp.where(dead[..., None], 0, jnp.swapaxes(cotangents.out, 1, 2))
    out = jnp.swapaxes(out, 1, 2).astype(m.dtype)
    delta = jnp.sum(jnp.where(out == 0, 0, out * dout.astype(m.dtype)), axis=-1)  # also with sinks: not 0 * NaN
    delta = delta - jnp.where(dead, 0, cotangents.lse)
    return Rows(dout, jnp.where(dead, 0, m), jnp.where(l == 0, 1, l), delta)


def _backward_step(
    call: Call, rows: Rows, state: GradientState, qi: Array, ki: Array, *, masked: bool
) -> GradientState:
    spec, operands = call.spec, call.operands
    qs, ks = call.blocks.slices(qi, ki)
    tile = call.tile(qi, ki, masked=masked)
    q, k, v = _rows(call.q, qs), _rows(call.k, ks), _rows(call.v, ks)
    dout, m, l, delta = (_rows(x, qs) for x in rows)  # noqa: E741

    inputs, rest = scores.split(scores.score_inputs(operands, qs, ks))
    s, pull = jax.vjp(
        lambda raw, inputs: scores.logits(spec, raw, scores.join(inputs, rest), tile),
        products.scores(q, k, spec.precision),
        inputs,
    )
    p = jnp.exp(s - m[..., None]) / l[..., None]
    if tile.live is not None:  # not 0 but NaN where m is
        p = jnp.where(tile.live, p, 0)
    dropped = partial(dropout.scale_kept, spec, operands.dropout_key, tile.index)
    dp = dropped(products.scores(dout, v, spec.precision))
    dlogits = p * (dp - delta[..., None])
    if tile.live is not None:  # dp is junk where v or dout is
        dlogits = jnp.where(tile.live, dlogits, 0)
    ds, dinputs = pull(dlogits)

    sums = partial(products.sum_over_queries, live=tile.live, precision=spec.precision, junk=call.junk)
    dv = sums(dropped(p), dout, num_kv_heads=v.shape[1])
    dk = sums(ds, q, num_kv_heads=k.shape[1])
    dq = products.sum_over_keys(ds, k, tile.live, spec.precision, call.junk)
    return GradientState(
        _set_rows(state.dq, _rows(state.dq, qs) + dq, qs),
        _set_rows(state.dk, _rows(state.dk, ks) + dk, ks),
        _set_rows(state.dv, _rows(state.dv, ks) + dv, ks),
        _add_inputs(state.inputs, dinputs, qs, ks),
    )


def _add_inputs(total: ScoreInputs, part: ScoreInputs, qs: Slice, ks: Slice) -> ScoreInputs:
    bias = None
    if total.bias is not None and part.bias is not None:
        bias = _add_tile(total.bias, part.bias, qs, ks)
    scale, score_mod = jax.tree.map(
        lambda x, y: x + y.astype(x.dtype), (total.scale, total.score_mod), (part.scale, part.score_mod)
    )
    return ScoreInputs(scale, score_mod, bias)


def sink_gradient(operands: Operands, rows: Rows) -> Array | None:
    """The sink is one more logit whose value vector is 0: d sink = p_sink * (0 - delta)."""
    if operands.sinks is None:
        return None
    p_sink = jnp.exp(operands.sinks.astype(rows.m.dtype)[None, :, None] - rows.m) / rows.l
    return -jnp.sum(p_sink * rows.delta, axis=(0, 2)).astype(operands.sinks.dtype)
