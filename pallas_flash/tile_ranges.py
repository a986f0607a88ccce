"""Which tiles a mask needs: for each tile of queries the range of key tiles, for each tile of keys the range of query
tiles. Everything an implementation skips, it skips by these numbers."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import masks
from pallas_flash.masks import Bounds, Segments, Span
from pallas_flash.spec import AttentionSpec, Operands, Shapes


class TileRanges(NamedTuple):
    """Tile indices on the other side, one entry a tile: [start, end) is needed, [full_start, full_end) inside it needs
    no masking. Arrays of int32, [tiles], or [B, tiles] where they depend on data."""

    start: Any
    end: Any
    full_start: Any
    full_end: Any


def static_ranges(spec: AttentionSpec, shapes: Shapes, block_q: int, block_kv: int, *, of: str = "q") -> TileRanges:
    """From what is known without data, as NumPy arrays. Parts with arrays need everything and have nothing full.

    of="q": key tiles for each query tile; of="kv": query tiles for each key tile.
    """
    offsets = spec.q_offset, spec.kv_offset
    known = () if None in offsets else tuple((part, ()) for part in spec.mask if not _has_arrays(part))
    ranges = _ranges(known, (offsets[0] or 0, offsets[1] or 0), shapes, (block_q, block_kv), of, np)
    if len(known) < len(spec.mask):
        ranges = ranges._replace(full_start=ranges.end, full_end=ranges.end)
    return ranges


def dynamic_ranges(
    spec: AttentionSpec, operands: Operands, block_q: int, block_kv: int, *, of: str = "q"
) -> TileRanges:
    """From everything, lengths and segments included, as JAX arrays [B, tiles] (or [1, tiles] without such parts)."""
    parts = tuple(zip(spec.mask, operands.mask, strict=True))
    q_offset = spec.q_offset if operands.q_offset is None else operands.q_offset[:, None]
    kv_offset = spec.kv_offset if operands.kv_offset is None else operands.kv_offset[:, None]
    ranges = _ranges(parts, (q_offset, kv_offset), operands.shapes, (block_q, block_kv), of, jnp)
    return TileRanges(*(jnp.atleast_2d(x).astype(jnp.int32) for x in ranges))


def depend_on_data(spec: AttentionSpec) -> bool:
    """Whether `dynamic_ranges` know more than `static_ranges`, or offsets are needed that only the data has."""
    known = None not in (spec.q_offset, spec.kv_offset)
    return not known or any(map(has_ranges_by_data, spec.mask))


def has_ranges_by_data(part: Any) -> bool:
    """Whether the arrays of a part of a mask say which tiles it needs."""
    return part.uses_batch or isinstance(part, Segments)


def _has_arrays(part: Any) -> bool:
    return has_ranges_by_data(part) or isinstance(part, masks.Predicate | masks.Dense)


def _ranges(
    parts: Any, offsets: tuple[Any, Any], shapes: Shapes, blocks: tuple[int, int], of: str, xp: Any
) -> TileRanges:
    """Intersect the intervals of all parts and round them to tiles: needed outwards, unmasked inwards."""
    lengths = (shapes.q_len, shapes.kv_len) if of == "q" else (shapes.kv_len, shapes.q_len)
    block, other_block = blocks if of == "q" else blocks[::-1]
    length, other_length = lengths
    row_lo = np.arange(-(-length // block), dtype=np.int32) * block
    row_hi = np.minimum(row_lo + block, length).astype(np.int32) - 1
    if xp is jnp:  # beside what has an axis of the batch
        row_lo, row_hi = row_lo[None], row_hi[None]
    # A position is a row + offset: bounds come in positions of the other side.
    own_offset, shift = offsets if of == "q" else offsets[::-1]
    span = Span(row_lo, row_hi, row_lo + own_offset, row_hi + own_offset)
    bounds, tiles = Bounds(0, other_length, 0, other_length), []
    for part, arrays in parts:
        if isinstance(part, Segments):
            tiles.append(_segment_tiles(arrays if of == "q" else arrays[::-1], block, other_block))
            continue
        columns = tuple(a[:, None] for a in arrays) if part.uses_batch else arrays
        b = part.kv_bounds(columns, span, xp) if of == "q" else part.q_bounds(columns, span, offsets[0], xp)
        bounds = _intersect(bounds, Bounds(*(x - shift for x in b)), xp)
    start = xp.maximum(bounds.start, 0) // other_block
    end = -(-xp.minimum(bounds.end, other_length) // other_block)
    # The last tile may be cut off by the end of the array; what lies behind the end must be masked.
    full_start = -(-xp.maximum(bounds.full_start, 0) // other_block)
    full_end = xp.minimum(bounds.full_end, other_length) // other_block
    for needed_and_full in tiles:
        start, end, full_start, full_end = _intersect(
            Bounds(start, end, full_start, full_end), Bounds(*needed_and_full), xp
        )
    start, end, full_start, full_end = xp.broadcast_arrays(start + 0 * row_lo, end, full_start, full_end)
    empty, some_full = end <= start, full_end > full_start
    start, end = xp.where(empty, 0, start), xp.where(empty, 0, end)
    full_end = xp.where(some_full & ~empty, xp.minimum(full_end, end), end)
    full_start = xp.where(some_full & ~empty, xp.maximum(full_start, start), end)
    return TileRanges(start, end, full_start, full_end)


def _intersect(a: Bounds, b: Bounds, xp: Any) -> Bounds:
    return Bounds(
        xp.maximum(a.start, b.start),
        xp.minimum(a.end, b.end),
        xp.maximum(a.full_start, b.full_start),
        xp.minimum(a.full_end, b.full_end),
    )


def _segment_tiles(ids: tuple[jax.Array, jax.Array], block: int, other_block: int) -> TileRanges:
    """Ranges by each tile's smallest and largest id: right for any ids, tight for ids that only grow along a row."""
    lo, hi = _tile_extremes(ids[0], block)
    other_lo, other_hi = _tile_extremes(ids[1], other_block)
    meets = (lo[:, :, None] <= other_hi[:, None]) & (other_lo[:, None] <= hi[:, :, None])  # [B, tiles, other tiles]
    same = (lo == hi)[:, :, None] & (other_lo == other_hi)[:, None] & (lo[:, :, None] == other_lo[:, None])
    return TileRanges(*_first_last(meets), *_first_run(same))


def _tile_extremes(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    tiles = -(-ids.shape[1] // block)
    padded = jnp.pad(ids, ((0, 0), (0, tiles * block - ids.shape[1])), mode="edge").reshape(-1, tiles, block)
    return padded.min(-1), padded.max(-1)


def _first_last(flags: jax.Array) -> tuple[jax.Array, jax.Array]:
    n = flags.shape[-1]
    some = flags.any(-1)
    start = jnp.where(some, jnp.argmax(flags, -1), 0)
    return start, jnp.where(some, n - jnp.argmax(flags[..., ::-1], -1), 0)


def _first_run(flags: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first run of consecutive True."""
    n = flags.shape[-1]
    start = jnp.where(flags.any(-1), jnp.argmax(flags, -1), n)
    places = jnp.arange(n).reshape(*[1] * start.ndim, n)
    after = (places >= start[..., None]) & ~flags
    return start, jnp.where(after.any(-1), jnp.argmax(after, -1), n)


@functools.lru_cache(maxsize=256)
def static_pairs(
    spec: AttentionSpec, shapes: Shapes, block_q: int, block_kv: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All (query tile, key tile) pairs that the static ranges need, in the order of query tiles, and whether each needs
    masking. A call without batch elements or heads needs none."""
    start, end, full_start, full_end = static_ranges(spec, shapes, block_q, block_kv)
    if not (shapes.batch and shapes.num_q_heads):
        end = start
    tiles = np.arange(-(-shapes.kv_len // block_kv), dtype=np.int32)
    qi, ki = np.nonzero((tiles >= start[:, None]) & (tiles < end[:, None]))
    masked = (ki < full_start[qi]) | (ki >= full_end[qi])
    return qi.astype(np.int32), ki.astype(np.int32), masked
