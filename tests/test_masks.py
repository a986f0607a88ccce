"""Which keys a query reads: the masks, their composition, the edges of windows, lengths and offsets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention, masks
from tests.conftest import check, inputs, op_by_op


def weights(implementation: str, q_len: int, kv_len: int, **options: Any) -> np.ndarray:
    """The softmax weights [T, S] of equal scores, read off with v one-hot by key: 1 / count on every key allowed."""
    q, k, v = jnp.zeros((1, q_len, 1, 4)), jnp.zeros((1, kv_len, 1, 4)), jnp.eye(kv_len)[None, :, None]
    with op_by_op(implementation):
        return np.asarray(flash_attention(q, k, v, implementation=implementation, **options))[0, :, 0]


def counts(implementation: str, q_len: int, kv_len: int, **options: Any) -> list[int]:
    read = weights(implementation, q_len, kv_len, **options)
    number = (read > 0).sum(-1)
    np.testing.assert_allclose(read, np.where(read > 0, 1 / np.maximum(number, 1)[:, None], 0), rtol=1e-6)
    return number.tolist()


@pytest.mark.case("B05", "B06")
def test_windows_include_both_ends(implementation: str) -> None:
    def count(window: Any, **options: Any) -> list[int]:
        return counts(implementation, 16, 16, local_window_size=window, **options)

    assert count((1, 0)) == [1] + [2] * 15
    assert count((2, 0)) == [1, 2] + [3] * 14
    assert count((1, 1)) == count(1) == [2] + [3] * 14 + [2]
    assert count((0, 3)) == [4] * 13 + [3, 2, 1]
    assert count((3, 5), is_causal=True) == count((3, 0)) == [1, 2, 3] + [4] * 13
    np.testing.assert_array_equal(weights(implementation, 16, 16, local_window_size=(0, 0)), np.eye(16))


@pytest.mark.case("B08")
def test_a_wide_side_does_not_open_the_other(implementation: str) -> None:
    causal = list(range(1, 65))
    for left in (63, 64, None, -1, 10**6, 2**40):
        assert counts(implementation, 64, 64, local_window_size=(left, 0)) == causal
        assert counts(implementation, 64, 64, local_window_size=(0, left)) == causal[::-1]
    assert counts(implementation, 64, 64, is_causal=True) == causal
    assert counts(implementation, 4, 9, local_window_size=(None, None)) == [9] * 4


@pytest.mark.case("B02", "B03", "B09")
def test_offsets_move_the_diagonal(implementation: str) -> None:
    assert counts(implementation, 6, 3, is_causal=True, query_offset=-3) == [0, 0, 0, 1, 2, 3]
    assert counts(implementation, 6, 3, local_window_size=(2, 9), query_offset=-3) == [3] * 6
    assert counts(implementation, 129, 64, local_window_size=(32, 64), query_offset=64 - 129).count(0) == 1
    assert counts(implementation, 129, 64, local_window_size=(32, 64)).count(0) == 33
    assert counts(implementation, 1, 16, is_causal=True) == [1]
    assert counts(implementation, 1, 16, is_causal=True, query_offset=7) == [8]
    assert counts(implementation, 3, 16, is_causal=True, query_offset=jnp.array([13])) == [14, 15, 16]
    assert counts(implementation, 3, 4, is_causal=True, query_offset=2**27) == [4, 4, 4]


def test_chunks_and_prefixes(implementation: str) -> None:
    count = lambda mask, **options: counts(implementation, 8, 8, mask=mask, **options)  # noqa: E731
    assert count(masks.chunked(3)) == [3] * 6 + [2] * 2
    assert count(masks.chunked(3), is_causal=True) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert count(masks.chunked(3), query_offset=-2) == [0, 0, 3, 3, 3, 3, 3, 3]
    assert count(masks.prefix_lm(3)) == [3, 3, 3, 4, 5, 6, 7, 8]
    assert count(masks.prefix_lm(0)) == count(masks.causal()) == list(range(1, 9))
    assert count(masks.prefix_lm(100)) == count(masks.everything()) == [8] * 8


@pytest.mark.case("B13")
def test_lengths_are_clamped_and_honoured_alone(implementation: str) -> None:
    count = lambda **options: counts(implementation, 5, 7, **options)  # noqa: E731
    for name, want in (("key_value_seq_lengths", [3] * 5), ("query_seq_lengths", [7, 7, 7, 0, 0])):
        assert count(**{name: jnp.array([3])}) == want
    assert count(key_value_seq_lengths=jnp.array([2**30])) == count(query_seq_lengths=jnp.array([100])) == [7] * 5
    assert count(key_value_seq_lengths=jnp.array([-1])) == count(query_seq_lengths=jnp.array([0])) == [0] * 5
    assert count(mask=masks.lengths(3, 2)) == [2, 2, 2, 0, 0]


@pytest.mark.case("B13")
def test_keys_behind_their_length_have_no_effect_to_the_bit(implementation: str) -> None:
    lengths = np.array([24, 61, 53, 0])
    call = inputs(batch=4, q_len=61, kv_len=61, heads=(4, 2), dims=(16, 16), dtype=jnp.bfloat16)
    options: Any = {"key_value_seq_lengths": lengths, "implementation": implementation}
    attend = jax.jit(lambda q, k, v: flash_attention(q, k, v, **options))
    behind = (np.arange(61) >= lengths[:, None])[..., None, None]
    want = attend(call["q"], call["k"], call["v"])
    for junk in (1e4, -3.0):
        k, v = (np.where(behind, junk, call[n].astype(np.float32)).astype(jnp.bfloat16) for n in "kv")
        got = attend(call["q"], k, v)
        np.testing.assert_array_equal(got, want)
    assert (np.asarray(want[3]) == 0).all()


@pytest.mark.case("A06", "B22")
def test_masked_keys_never_win(implementation: str) -> None:
    """Real logits of -20000 (A06), negative logits beside a masked key (B22): weight exactly 0, not exp(-1e4)."""
    q, k, v = (jnp.array(x, jnp.float32).reshape(1, 2, 1, 1) for x in ([-20000, -20000], [1, 0], [1, 100]))
    only_first = {
        "mask": {"mask": jnp.array([True, False])},
        "lengths": {"key_value_seq_lengths": jnp.array([1])},
        "segments": {"segment_ids": (jnp.array([[1, 1]]), jnp.array([[1, 2]]))},
        "bias": {"bias": jnp.array([0.0, -jnp.inf])},
        "predicate": {"mask": masks.predicate(lambda b, h, i, j: j < 1)},
    }
    for options in only_first.values():
        out = flash_attention(q, k, v, scale=1.0, implementation=implementation, **options)
        np.testing.assert_array_equal(out, jnp.ones_like(out))
    for options in ({"is_causal": True}, {"local_window_size": (0, 0)}):
        first = flash_attention(q[:, :1], k, v, scale=1.0, implementation=implementation, **options)
        assert first.item() == 1


@pytest.mark.case("B17")
def test_causal_and_a_mask_intersect(implementation: str) -> None:
    """Perturbing the last key changes the last row alone, whatever else is given."""
    call = inputs(q_len=6, kv_len=6, heads=(4, 2))
    company: list[Any] = [
        {}, {"mask": np.ones((1, 1, 6, 6), bool)}, {"bias": np.zeros((6, 6), np.float32)}, {"return_residual": True},
        {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, {"mask": masks.everything()},
    ]  # fmt: skip
    for options in company:
        attend = lambda k, v, o=options: jax.tree.leaves(  # noqa: E731
            flash_attention(call["q"], k, v, is_causal=True, implementation=implementation, **o)
        )[0]
        changed = (np.concatenate([call[n][:, :5], call[n][:, 5:] + 1], axis=1) for n in "kv")
        before, after = attend(call["k"], call["v"]), attend(*changed)
        np.testing.assert_array_equal(before[:, :5], after[:, :5])
        assert not np.allclose(before[:, 5], after[:, 5])


@pytest.mark.case("B15")
def test_segments(implementation: str) -> None:
    """Reordered ids, one id in two places, ids without partner, ids of different length for queries and keys."""
    rows = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [7, 3, 7, -1, 3, 3, 9, 7, 0]], np.int32)
    call = inputs(q_len=9, kv_len=9)
    check(call | {"segment_ids": rows, "is_causal": True}, implementation, jit=False)
    check(call | {"segment_ids": (rows, rows[:, ::-1].copy())}, implementation, jit=False)
    call = inputs(q_len=4, kv_len=9)
    check(call | {"segment_ids": (np.array([[1, 2, 5, 0], [7, 9, 9, 8]], np.int32), rows)}, implementation, jit=False)


def test_a_predicate_may_capture_arrays(implementation: str) -> None:
    table = jnp.asarray(np.random.default_rng(0).random((6, 5, 7)) < 0.6)
    call = inputs()
    ours = masks.predicate(lambda b, h, i, j: table[h, i, j])
    got = flash_attention(call["q"], call["k"], call["v"], mask=ours, implementation=implementation)
    want = flash_attention(call["q"], call["k"], call["v"], mask=table, implementation=implementation)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_masks_compose_and_pass_through_transformations(implementation: str) -> None:
    """`&` is intersection in any order; a Mask is a pytree that may be an argument of jit."""
    call = inputs(q_len=7, kv_len=7)
    a, b = masks.causal() & masks.sliding_window(3, None), masks.segments(np.array([[0, 0, 1, 1, 1, 2, 2]] * 2))
    attend = jax.jit(lambda m: flash_attention(call["q"], call["k"], call["v"], mask=m, implementation=implementation))
    np.testing.assert_array_equal(attend(a & b), attend(b & a))
    np.testing.assert_array_equal(attend(masks.everything() & a), attend(a))
    assert not np.allclose(attend(a & b), attend(a))
    ids = np.array([[0, 0, 1, 1, 1, 2, 2]] * 2)
    want = flash_attention(
        call["q"], call["k"], call["v"], is_causal=True, local_window_size=(3, -1), segment_ids=ids,
        implementation=implementation,
    )  # fmt: skip
    np.testing.assert_allclose(attend(a & b), want, rtol=1e-5, atol=1e-6)


def test_bad_masks_are_refused() -> None:
    bad: list[Any] = [
        lambda: masks.sliding_window(-2, 0), lambda: masks.sliding_window(0, 1.5), lambda: masks.sliding_window(True),
        lambda: masks.chunked(0), lambda: masks.chunked(2.0), lambda: masks.prefix_lm(1.5), lambda: masks.lengths(0.5),
        lambda: masks.lengths(None, np.array([1.0])), lambda: masks.segments(np.array([[0.0]])),
        lambda: masks.predicate(3), lambda: masks.predicate(lambda b, h, i, j: i - j),
    ]  # fmt: skip
    for make in bad:
        with pytest.raises(ValueError):
            make()
    with pytest.raises(TypeError):
        masks.causal() & np.ones((3, 3), bool)


def test_masks_are_composed_with_ampersands_alone() -> None:
    """`and` would silently be its second mask, `not` silently False."""
    for compose in (
        lambda: masks.causal() and masks.sliding_window(2, 2),
        lambda: masks.causal() or masks.everything(),
        lambda: not masks.causal(),
    ):
        with pytest.raises(TypeError, match="compose masks with `&`"):
            compose()
    with pytest.raises(TypeError, match=r"composes masks of pallas_flash.masks, and bool\[8, 8\] is none"):
        masks.causal() & jnp.ones((8, 8), bool)  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]
