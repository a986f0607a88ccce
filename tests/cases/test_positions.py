"""Which key a query may read: the diagonal, the edges of windows, lengths, segments."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from tests.cases.common import (
    also_interpreted,
    case,
    check,
    counting,
    evaluate,
    inputs,
    keys_read,
    not_reference,
)
from tests.conftest import Call, cotangents_of

SIZE = 16  # queries and keys of the cases that count keys

CAUSAL = list(range(1, SIZE + 1))
COUNTS: dict[str, tuple[Call, list[int]]] = {
    "causal": ({"is_causal": True}, CAUSAL),
    "bottom right, twice as many queries": ({"is_causal": True, "query_offset": -8}, [0] * 8 + CAUSAL[:8]),
    "one token far down": ({"is_causal": True, "query_offset": 9}, [10, 11, 12, 13, 14, 15] + [16] * 10),
    "(3, 0) without causal": ({"window": (3, 0)}, [1, 2, 3] + [4] * 13),
    "(3, 5) and causal": ({"window": (3, 5), "is_causal": True}, [1, 2, 3] + [4] * 13),
    "(1, 0)": ({"window": (1, 0)}, [1] + [2] * 15),
    "(2, 0)": ({"window": (2, 0)}, [1, 2] + [3] * 14),
    "(0, 0)": ({"window": (0, 0)}, [1] * 16),
    "(1, 1)": ({"window": (1, 1)}, [2] + [3] * 14 + [2]),
    "1": ({"window": 1}, [2] + [3] * 14 + [2]),
    "(15, 0)": ({"window": (15, 0)}, CAUSAL),
    "(16, 0)": ({"window": (16, 0)}, CAUSAL),
    "(None, 0)": ({"window": (None, 0)}, CAUSAL),
    "(10**6, 0)": ({"window": (10**6, 0)}, CAUSAL),
    "(0, 15)": ({"window": (0, 15)}, CAUSAL[::-1]),
    "wider than the keys, moved": ({"window": (2, 19), "query_offset": -6}, [14, 15] + [16] * 7 + CAUSAL[14:7:-1]),
    "behind every key": ({"window": (3, 0), "query_offset": 40}, [0] * 16),
    "chunks": ({"chunk": 5}, [5] * 15 + [1]),
    "prefix": ({"prefix": np.array([4])}, [4, 4, 4, *range(4, 17)]),
    "lengths": ({"q_lengths": np.array([5]), "kv_lengths": np.array([7])}, [7] * 5 + [0] * 11),
    "segments": ({"segment_ids": np.repeat(np.arange(4), 4)[None]}, [4] * 16),
    "a segment in two places": ({"segment_ids": np.array([[1, 1, 2, 2] * 4])}, [8] * 16),
}


@case("B02", "B05", "B06", "B08", "B09", "B15", "B19")
@not_reference
def test_keys_are_counted_right(implementation: str) -> None:
    """Equal scores: 1 / count stands on every key that is read, so that one key too many or too few shows."""
    call = counting(implementation, SIZE, SIZE)
    for name, (options, want) in COUNTS.items():
        assert keys_read(call | options, implementation).tolist() == [want], name
    exact = evaluate(call | {"window": (0, 0)}, implementation).out[0, :, 0]
    np.testing.assert_array_equal(exact, np.eye(SIZE))


@case("B20", "H01", "H15")
@not_reference
def test_one_query_over_a_cache_of_each_length(implementation: str) -> None:
    """64 sequences: v = 1 gives 1, lse is the logarithm of the length, and only lengths of 0 give 0 and -inf."""
    lengths = np.random.default_rng(0).integers(1, 300, 64)
    lengths[:9] = [1, 0, 255, 256, 257, 300, 127, 128, 129]
    lengths[10] = 0
    call = inputs(implementation, batch=64, q_len=1, kv_len=300, heads=(4, 2))
    behind = (np.arange(300) >= lengths[:, None])[..., None, None]
    call |= {"q": call["q"] * 0, "kv_lengths": lengths}
    call["v"] = np.where(behind, 1e4, 1).astype(call["v"].dtype) * np.ones_like(call["v"])
    outputs = evaluate(call, implementation, jit=True)
    np.testing.assert_allclose(
        outputs.out, np.broadcast_to((lengths > 0)[:, None, None, None], outputs.out.shape), 1e-6
    )
    with np.errstate(divide="ignore"):
        want = np.broadcast_to(np.log(lengths)[:, None, None], outputs.lse.shape)
    np.testing.assert_allclose(outputs.lse, want, rtol=1e-6, atol=1e-6)


@case("B13")
@also_interpreted
def test_lengths_are_honoured_alone_and_together(implementation: str) -> None:
    call = inputs(implementation)
    q_lengths, kv_lengths = {"q_lengths": np.array([3, 5])}, {"kv_lengths": np.array([0, 4])}
    for lengths in (kv_lengths, q_lengths, q_lengths | kv_lengths, {"kv_lengths": np.array([7, 2**30])}):
        check(call | lengths, implementation)


@case("B15")
def test_segments_mean_equal_ids_and_nothing_else(implementation: str) -> None:
    """Ids of different lengths, in any order, 0 among them; causal and windows go by the row, not by the segment."""
    call = inputs(implementation)
    ids = (np.array([[1, 2, 1, 0, 0], [3, 3, 5, 5, 9]]), np.array([[0, 1, 1, 2, 0, 1, 7], [5, 3, 3, 5, 5, 3, 0]]))
    for more in ({}, {"is_causal": True, "query_offset": 2}, {"window": (2, 1)}):
        check(call | {"segment_ids": ids} | more, implementation)


@case("H12", "C08", "E03")
def test_new_tokens_stand_at_the_end_of_the_cache(implementation: str) -> None:
    """Lengths count the new tokens: row i of 5 stands at length - 5 + i, before the first key too; and windows."""
    call = inputs(implementation)
    for lengths in (np.array([7, 3]), np.array([0, 5])):
        for window in (None, (1, 0)):
            options = {"is_causal": True, "window": window, "query_offset": lengths - 5, "kv_lengths": lengths}
            outputs = check(call | options, implementation)
            dead = np.arange(5) < 5 - lengths[:, None]
            assert (np.asarray(outputs.out)[dead] == 0).all()


# Ways to take another path through the code; each must leave causal what it is.
BESIDE_CAUSAL: dict[str, Call] = {
    "dropout": {"rate": 0.1},
    "a mask": {"mask": np.ones((5, 7), bool)},
    "a bias": {"bias": np.ones((5, 7), np.float32)},
    "a window": {"window": (6, 6)},
    "lengths": {"kv_lengths": np.array([7, 6])},
    "sinks": {"sinks": np.ones(6, np.float32)},
    "a soft cap": {"soft_cap": 2.0},
    "segments": {"segment_ids": (np.zeros((2, 5), np.int32), np.zeros((2, 7), np.int32))},
}


@case("B17")
@pytest.mark.parametrize("beside", BESIDE_CAUSAL)
@not_reference
def test_causal_holds_beside_everything_else(implementation: str, beside: str) -> None:
    """Other keys and values from row 3 on leave the rows before it as they are, to the bit, and change row 3."""
    call = inputs(implementation) | {"is_causal": True} | BESIDE_CAUSAL[beside]
    extra: Any = {"dropout_key": jax.random.key(0)} if "rate" in call else {}
    changed = {name: call[name] + (np.arange(7) >= 3)[:, None, None].astype(call[name].dtype) for name in "kv"}
    dout, _ = cotangents_of(call)
    dout[:, 3:] = 0
    before, after = (evaluate(call | other, implementation, dout, **extra) for other in ({}, changed))
    np.testing.assert_array_equal(before.out[:, :3], after.out[:, :3])
    assert (before.out[:, 3] != after.out[:, 3]).any()
    np.testing.assert_array_equal(before.gradients["q"][:, :3], after.gradients["q"][:, :3])


@case("I03")
@not_reference
def test_lse_is_the_same_with_and_without_a_gradient(implementation: str) -> None:
    call = inputs(implementation) | {"is_causal": True}
    with_gradient, without = evaluate(call, implementation, cotangents_of(call)[0]), evaluate(call, implementation)
    np.testing.assert_array_equal(with_gradient.lse, without.lse)
    np.testing.assert_array_equal(with_gradient.out, without.out)
