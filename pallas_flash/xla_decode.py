"""Decoding in plain JAX: chunk by chunk of the cache, on any device.

The recurrence of xla.py, over a number of chunks that is known at run time only: from where the first window begins to
where the longest sequence ends. A chunk of pages is gathered as it is needed; there never is a dense cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import products, scores
from pallas_flash.combine import Partial
from pallas_flash.decode_spec import DecodeOperands, DecodeSpec
from pallas_flash.masks import Slice
from pallas_flash.scores import ScoreInputs, Tile
from pallas_flash.spec import Array, AttentionSpec, Operands, accumulator_dtype, vary, varying_axes

NAME = "xla"

# A tile of scores has at most SCORE_ELEMENTS, a chunk of keys and values at most CHUNK_ELEMENTS, over all heads and the
# batch, unless the chunk would be shorter than MIN_CHUNK. Long queries are taken in blocks of BLOCK_Q rows.
SCORE_ELEMENTS, CHUNK_ELEMENTS = 2**21, 2**24
MIN_CHUNK, MAX_CHUNK, BLOCK_Q = 128, 2048, 128


def unsupported(spec: DecodeSpec, operands: DecodeOperands) -> str | None:
    return None


def decode(spec: DecodeSpec, operands: DecodeOperands) -> Partial:
    q_len = operands.shapes.q_len
    lengths = jnp.clip(operands.kv_lengths, 0, operands.shapes.kv_len)
    offset = lengths - (q_len if operands.q_lengths is None else operands.q_lengths)
    if q_len <= BLOCK_Q:
        return _attend(spec, operands, lengths, offset)
    num_blocks = -(-q_len // BLOCK_Q)
    rows = -(-q_len // num_blocks)
    padded = jnp.pad(operands.q, ((0, 0), (0, num_blocks * rows - q_len), (0, 0), (0, 0)))
    blocks = jnp.moveaxis(padded.reshape(padded.shape[0], num_blocks, rows, *padded.shape[2:]), 1, 0)
    starts = rows * jnp.arange(num_blocks, dtype=jnp.int32)
    parts = lax.map(lambda x: _attend(spec, operands._replace(q=x[0]), lengths, offset + x[1]), (blocks, starts))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :q_len], parts)


class Call(NamedTuple):
    """One block of query rows, prepared: heads come before rows; how the cache is cut into chunks, from `start` (a
    multiple of the page size; [] where all sequences begin at the same row) up to `end`."""

    spec: AttentionSpec
    window: int | None
    operands: DecodeOperands
    q: Array  # [B, N, T, H]
    offset: Array  # int32 [B], the position of query row 0
    start: Array  # int32 [B] or []
    end: Array  # int32 [B]
    chunk: int  # rows


class SoftmaxState(NamedTuple):
    m: Array  # [B, N, T]
    l: Array  # noqa: E741  [B, N, T]
    acc: Array  # [B, N, T, Hv]


def _attend(spec: DecodeSpec, operands: DecodeOperands, lengths: Array, offset: Array) -> Partial:
    shapes = operands.shapes
    start = jnp.int32(0) if spec.window is None else _page_floor(operands, jnp.maximum(offset - spec.window, 0))
    as_attention = AttentionSpec(spec.scale, q_offset=None, soft_cap=spec.soft_cap, score_mod=spec.score_mod)
    q = jnp.swapaxes(operands.q, 1, 2)
    end = jnp.minimum(lengths, offset + shapes.q_len)
    call = Call(as_attention, spec.window, operands, q, offset, start, end, _chunk_size(operands))

    dtype, axes = accumulator_dtype(q.dtype), varying_axes((operands, lengths))
    row_zeros = vary(jnp.zeros_like(q[..., 0], dtype=dtype), axes)
    acc = jnp.broadcast_to(row_zeros[..., None], (*row_zeros.shape, shapes.value_head_dim))
    state = SoftmaxState(row_zeros - jnp.inf, row_zeros, acc)
    if call.chunk > 0:
        chunks = jnp.max((end - start + call.chunk - 1) // call.chunk, initial=0)
        state = lax.fori_loop(0, _largest(chunks), partial(_step, call), state)
    return _finish(operands, state)


def _page_floor(operands: DecodeOperands, rows: Array) -> Array:
    page_size = 1 if operands.page_table is None else max(1, operands.k.shape[1])
    return rows // page_size * page_size


def _chunk_size(operands: DecodeOperands) -> int:
    """The rows of a chunk, a multiple of the page size; 0 where there is no row at all."""
    batch, q_len, capacity, num_q_heads, num_kv_heads, head_dim, value_head_dim = operands.shapes
    if capacity == 0 or operands.k.shape[0] == 0:
        return 0
    by_scores = SCORE_ELEMENTS // max(1, batch * num_q_heads * q_len)
    by_rows = CHUNK_ELEMENTS // max(1, batch * num_kv_heads * (head_dim + value_head_dim))
    chunk = min(max(MIN_CHUNK, min(by_scores, by_rows, MAX_CHUNK)), capacity)
    if operands.page_table is None:
        return chunk
    page_size = operands.k.shape[1]
    return max(1, chunk // page_size) * page_size


@jax.custom_batching.custom_vmap
def _largest(count: Array) -> Array:
    return count


@_largest.def_vmap
def _largest_vmap(axis_size: int, in_batched: Any, count: Array) -> tuple[Array, bool]:
    """One count for all instances of a vmap, so that the loop stays one loop without a selection in every step."""
    del axis_size, in_batched
    return jnp.max(count, initial=0), False


def _step(call: Call, i: Array, state: SoftmaxState) -> SoftmaxState:
    operands = call.operands
    base = call.start + i * call.chunk
    first = jnp.minimum(base, operands.shapes.kv_len - call.chunk)  # the last chunk may overlap the one before
    k, v = (jnp.swapaxes(_rows(call, x, first), 1, 2) for x in (operands.k, operands.v))
    tile, readable = _tile(call, base, first)

    raw = products.scores(call.q, k.astype(call.q.dtype), None)
    raw = raw * _row_scales(call, operands.k_scale, first, raw.dtype)
    s = scores.logits(call.spec, raw, ScoreInputs(operands.scale, operands.score_mod, None), tile, differentiated=False)

    m = jnp.maximum(state.m, jnp.max(s, axis=-1))
    shift = jnp.where(m == -jnp.inf, 0, m)
    alpha = jnp.exp(state.m - shift)
    p = jnp.exp(s - shift[..., None])
    l = state.l * alpha + jnp.sum(p, axis=-1)  # noqa: E741
    if operands.v_scale is not None:
        p = jnp.where(tile.live, p * _row_scales(call, operands.v_scale, first, p.dtype), 0)
    v = jnp.where(readable[..., None], v.astype(call.q.dtype), 0)
    # What no query reads is 0 now. Of several queries, one must yet be spared the NaN of a row that another one reads.
    junk = products.has_junk(v) if call.q.shape[2] > 1 else jnp.zeros((), bool)
    acc = state.acc * alpha[..., None] + products.sum_over_keys(p, v, tile.live, None, junk)
    return SoftmaxState(m, l, acc)


def _rows(call: Call, array: Array, first: Array) -> Array:
    """`chunk` rows of each sequence, from row `first` on: [B, chunk, ...]. An axis of size 1 stands for all rows."""
    table = call.operands.page_table
    if table is not None:
        page_size = call.operands.k.shape[1]
        pages = jnp.clip(_slice(table, first // page_size, call.chunk // page_size), 0, array.shape[0] - 1)
        found = array.at[pages].get(mode="promise_in_bounds")
        found = jnp.broadcast_to(found, (*pages.shape, page_size, *array.shape[2:]))
        return found.reshape(pages.shape[0], call.chunk, *array.shape[2:])
    return array if array.shape[1] == 1 else _slice(array, first, call.chunk)


def _slice(array: Array, first: Array, size: int) -> Array:
    """Along axis 1; `first` is one for all sequences, or has one for each."""
    if first.ndim == 0:
        return lax.dynamic_slice_in_dim(array, first, size, 1)
    return jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, size, 0))(array, first)


def _row_scales(call: Call, scale: Array | None, first: Array, dtype: Any) -> Array | float:
    """The scales of a chunk's rows, for a tile of scores: [B, N, 1, chunk | 1]."""
    if scale is None:
        return 1.0
    by_head = jnp.swapaxes(_rows(call, scale, first), 1, 2).astype(dtype)
    return jnp.repeat(by_head, call.operands.shapes.q_heads_per_kv_head, axis=1)[:, :, None]


def _tile(call: Call, base: Array, first: Array) -> tuple[Tile, Array]:
    """The tile of a chunk, and which of its rows some query of the sequence reads: [B, 1, chunk]."""
    place = Operands(call.operands.q, call.operands.k, call.operands.v, q_offset=call.offset)
    index = scores.index_of(call.spec, place, Slice(0, call.q.shape[2]), Slice(0, call.chunk))
    by_sequence = lambda x: x.reshape(-1, 1, 1, 1)  # noqa: E731
    kv_pos = index.kv_pos + by_sequence(first)
    owned = kv_pos >= by_sequence(base)  # where chunks overlap, a row belongs to the earlier one
    live = owned & (kv_pos <= index.q_pos)
    readable = owned & (kv_pos < by_sequence(call.end))
    if call.window is not None:
        live &= kv_pos >= index.q_pos - call.window
        readable &= kv_pos >= by_sequence(call.offset) - call.window
    return Tile(index._replace(kv_pos=kv_pos), live), readable[:, :, 0]


def _finish(operands: DecodeOperands, state: SoftmaxState) -> Partial:
    m, l, acc = state  # noqa: E741
    if operands.sinks is not None:  # joins once the maximum over all keys is known
        sinks = operands.sinks.astype(m.dtype)[None, :, None]
        m_old, m = m, jnp.maximum(m, sinks)
        shift = jnp.where(m == -jnp.inf, 0, m)
        alpha = jnp.exp(m_old - shift)
        l, acc = l * alpha + jnp.exp(sinks - shift), acc * alpha[..., None]  # noqa: E741
    out = acc / jnp.where(l == 0, 1, l)[..., None]
    lse = jnp.where(l == 0, -jnp.inf, m + jnp.log(jnp.where(l == 0, 1, l)))
    return Partial(jnp.swapaxes(out, 1, 2).astype(operands.q.dtype), jnp.swapaxes(lse, 1, 2))
