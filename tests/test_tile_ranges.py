"""Tile ranges against a brute-force look at the mask: nothing live is skipped, nothing masked is taken for full."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_flash import masks
from pallas_flash.masks import Mask, Slice
from pallas_flash.scores import tile_of
from pallas_flash.spec import AttentionSpec, Operands, Shapes
from pallas_flash.tile_ranges import TileRanges, dynamic_ranges, static_pairs, static_ranges

B = 2


def call_of(mask: Mask, q_len: int, kv_len: int, offset: Any = 0) -> tuple[AttentionSpec, Operands]:
    arrays = tuple(
        tuple(jnp.broadcast_to(a, (B,)) for a in part_arrays) if part.uses_batch else part_arrays
        for part, part_arrays in zip(mask.parts, mask.arrays, strict=True)
    )
    static = isinstance(offset, int)
    spec = AttentionSpec(scale=1.0, mask=mask.parts, q_offset=offset if static else None)
    tensors = (jnp.zeros((B, n, 1, 1)) for n in (q_len, kv_len, kv_len))
    return spec, Operands(*tensors, mask=arrays, q_offset=None if static else jnp.asarray(offset, jnp.int32))


def live_pairs(spec: AttentionSpec, operands: Operands) -> np.ndarray:
    """[B, T, S]"""
    shapes = operands.shapes
    live = tile_of(spec, operands, Slice(0, shapes.q_len), Slice(0, shapes.kv_len)).live
    return np.broadcast_to(True if live is None else live, (B, 1, shapes.q_len, shapes.kv_len))[:, 0]


def assert_sound(ranges: TileRanges, live: np.ndarray, block: int, other_block: int) -> None:
    """live is [B, own, other]."""
    ranges = TileRanges(*(np.atleast_2d(x) for x in ranges))
    tiles, other_tiles = (-(-n // b) for n, b in zip(live.shape[1:], (block, other_block), strict=True))
    assert all(x.shape[-1] == tiles and x.shape[0] in (1, len(live)) for x in ranges)
    for b in range(len(live)):
        for i in range(tiles):
            start, end, full_start, full_end = (int(x[min(b, len(x) - 1), i]) for x in ranges)
            assert 0 <= start <= end <= other_tiles
            assert start <= full_start <= full_end <= end
            for j in range(other_tiles):
                tile = live[b, i * block : (i + 1) * block, j * other_block : (j + 1) * other_block]
                assert start <= j < end or not tile.any(), f"tile {i, j} of batch {b} is skipped"
                is_whole = tile.shape[1] == other_block  # what lies behind the array's end needs the mask
                assert not full_start <= j < full_end or (tile.all() and is_whole), f"tile {i, j} is not full"


@st.composite
def masks_and_sizes(draw: Any) -> tuple[Mask, int, int, Any]:
    q_len, kv_len = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    side = st.one_of(st.none(), st.integers(0, 45))
    ids = lambda n, change: np.sort(rng.integers(0, 4, (B, n))) if change else rng.integers(-2, 3, (B, n))  # noqa: E731
    options = (
        lambda: masks.causal(),
        lambda: masks.sliding_window(draw(side), draw(side)),
        lambda: masks.chunked(draw(st.integers(1, 20))),
        lambda: masks.prefix_lm(rng.integers(0, kv_len + 1, B)),
        lambda: masks.lengths(rng.integers(0, q_len + 1, B), rng.integers(0, kv_len + 1, B)),
        lambda: masks.segments(*(ids(n, draw(st.booleans())) for n in (q_len, kv_len))),
        lambda: masks.predicate(lambda b, h, i, j: (i + j) % 3 == 0),
    )
    mask = masks.everything()
    for make in draw(st.lists(st.sampled_from(options), max_size=3)):
        mask &= make()
    offset = draw(st.integers(-45, 45))
    return mask, q_len, kv_len, offset if draw(st.booleans()) else rng.integers(-45, 45, B)


@settings(max_examples=150)
@given(case=masks_and_sizes(), block_q=st.sampled_from([1, 4, 16]), block_kv=st.sampled_from([1, 3, 8, 64]))
def test_ranges_are_sound(case: tuple[Mask, int, int, Any], block_q: int, block_kv: int) -> None:
    mask, q_len, kv_len, offset = case
    spec, operands = call_of(mask, q_len, kv_len, offset)
    live, shapes = live_pairs(spec, operands), operands.shapes
    for ranges in (
        static_ranges(spec, shapes, block_q, block_kv),
        dynamic_ranges(spec, operands, block_q, block_kv),
    ):
        assert_sound(ranges, live, block_q, block_kv)
    for ranges in (
        static_ranges(spec, shapes, block_q, block_kv, of="kv"),
        dynamic_ranges(spec, operands, block_q, block_kv, of="kv"),
    ):
        assert_sound(ranges, live.swapaxes(1, 2), block_kv, block_q)


def test_soundness_rejects_wrong_ranges() -> None:
    """The companion: ranges that need nothing, and ranges that take all they need for full."""
    spec, operands = call_of(masks.sliding_window(3, 3), 40, 40)
    ranges = static_ranges(spec, operands.shapes, 4, 4)
    assert_sound(ranges, live_pairs(spec, operands), 4, 4)
    nothing = TileRanges(*[ranges.end] * 4)
    for wrong in (nothing, ranges._replace(full_start=ranges.start, full_end=ranges.end)):
        with pytest.raises(AssertionError, match=r"is skipped|is not full"):
            assert_sound(wrong, live_pairs(spec, operands), 4, 4)


TIGHT: dict[str, tuple[Mask, Any]] = {
    "nothing": (masks.everything(), 0),
    "causal": (masks.causal(), 0),
    "causal, bottom-right": (masks.causal(), 13),
    "window": (masks.sliding_window(9, 4), 0),
    "window, offset": (masks.sliding_window(9, 0), -7),
    "chunked and causal": (masks.chunked(16) & masks.causal(), 0),
    "lengths": (masks.lengths(np.array([20, 33]), np.array([17, 50])), 0),
    "prefix": (masks.prefix_lm(np.array([5, 30])), 0),
    "sorted segments": (masks.segments(*(np.arange(n)[None].repeat(B, 0) // 11 for n in (40, 53))), 0),
    "per-batch offset": (masks.sliding_window(9, 0), np.array([0, 13])),
}


@pytest.mark.parametrize("name", TIGHT)
def test_dynamic_ranges_are_tight(name: str) -> None:
    """For these masks the tiles needed are exactly those with a live pair, and every full one is known as full."""
    mask, offset = TIGHT[name]
    spec, operands = call_of(mask, 40, 53, offset)
    live = live_pairs(spec, operands)
    block_q, block_kv = 8, 4
    ranges = dynamic_ranges(spec, operands, block_q, block_kv)
    for b in range(B):
        for i in range(5):
            tiles = [live[b, i * 8 : i * 8 + 8, j * 4 : j * 4 + 4] for j in range(14)]
            start, end, full_start, full_end = (int(x[min(b, len(x) - 1), i]) for x in ranges)
            assert [start <= j < end for j in range(14)] == [bool(t.any()) for t in tiles]
            full = [t.all() and t.shape[1] == 4 for t in tiles]
            if "segments" not in name:  # there only tiles of a single id count as full
                assert [full_start <= j < full_end for j in range(14)] == full


@pytest.mark.parametrize("name", ["nothing", "causal", "window, offset", "chunked and causal"])
def test_static_ranges_equal_dynamic_ones(name: str) -> None:
    mask, offset = TIGHT[name]
    spec, operands = call_of(mask, 40, 53, offset)
    for of in ("q", "kv"):
        known = static_ranges(spec, operands.shapes, 8, 4, of=of)
        assert all(isinstance(x, np.ndarray) for x in known)
        for a, b in zip(known, dynamic_ranges(spec, operands, 8, 4, of=of), strict=True):
            np.testing.assert_array_equal(a, b[0])


def test_the_number_of_pairs_follows_the_mask() -> None:
    """Causal visits half the square, a window a band of it; only tiles on an edge are masked."""
    shapes = Shapes(1, 4096, 4096, 1, 1, 64, 64)
    number = lambda mask: len(static_pairs(AttentionSpec(1.0, mask=mask.parts), shapes, 128, 128)[0])  # noqa: E731
    masked = lambda mask: static_pairs(AttentionSpec(1.0, mask=mask.parts), shapes, 128, 128)[2].sum()  # noqa: E731
    assert number(masks.everything()) == 32 * 32 and masked(masks.everything()) == 0
    assert number(masks.causal()) == 32 * 33 // 2 and masked(masks.causal()) == 32
    window = masks.sliding_window(255, 0)
    assert number(window) == 32 * 3 - 3 and masked(window) == 32 + 30
    assert number(masks.chunked(512)) == 32 * 4 and masked(masks.chunked(512)) == 0
    assert number(masks.causal() & masks.lengths(key_value=7)) == number(masks.causal())


def test_empty_sides() -> None:
    for q_len, kv_len in ((0, 5), (5, 0), (0, 0)):
        spec, operands = call_of(masks.causal(), q_len, kv_len)
        for of in ("q", "kv"):
            ranges = static_ranges(spec, operands.shapes, 4, 4, of=of)
            assert (ranges.start == ranges.end).all()
        assert len(static_pairs(spec, operands.shapes, 4, 4)[0]) == 0
