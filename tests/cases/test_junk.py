"""NaN and infinity behind a boundary: exactly as if zeros stood there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases.common import also_interpreted, case, evaluate, inputs
from tests.conftest import Call, cotangents_of


def fill(array: Any, where: Any, value: float) -> Any:
    return np.where(where, value, array.astype(np.float32)).astype(array.dtype)


@case("A09")
@pytest.mark.parametrize("junk", [np.nan, np.inf])
@pytest.mark.parametrize("q_len", [1, 6])
def test_a_cache_behind_its_lengths(implementation: str, junk: float, q_len: int) -> None:
    """Lengths within a tile, on its end, and of the whole cache; junk in k, in v, in both; one and several queries."""
    call = inputs(implementation, batch=4, q_len=q_len, kv_len=40, heads=(2, 2))
    lengths = np.array([16, 30, 40, 1])
    call |= {"kv_lengths": lengths, "is_causal": True, "query_offset": lengths - q_len}
    behind = (np.arange(40) >= lengths[:, None])[..., None, None]
    dout, _ = cotangents_of(call)
    zeros = {name: fill(call[name], behind, 0) for name in "kv"}
    want = evaluate(call | zeros, implementation, dout)
    for names in ("k", "v", "kv"):
        got = evaluate(call | zeros | {n: fill(call[n], behind, junk) for n in names}, implementation, dout)
        np.testing.assert_array_equal(got.out, want.out)
        for name in "qkv":
            np.testing.assert_array_equal(got.gradients[name], want.gradients[name])
    for name in "kv":
        assert (want.gradients[name][np.broadcast_to(behind, want.gradients[name].shape)] == 0).all()


# Ways in which only the last row may read the last of 6 keys.
LAST_KEY: dict[str, Call] = {
    "causal": {"is_causal": True},
    "mask": {"mask": np.tri(6, dtype=bool)},
    "segments": {"segment_ids": np.array([[0, 0, 0, 0, 0, 1]] * 2)},
}


@case("A11")
@also_interpreted
@pytest.mark.parametrize("way", LAST_KEY)
def test_nan_reaches_those_who_read_it_and_no_other(implementation: str, way: str) -> None:
    call = inputs(implementation, q_len=6, kv_len=6, heads=(2, 1)) | LAST_KEY[way]
    want = evaluate(call, implementation).out
    for names in ("v", "kv"):
        junk = {name: fill(call[name], (np.arange(6) == 5)[:, None, None], np.nan) for name in names}
        out = evaluate(call | junk, implementation).out
        np.testing.assert_array_equal(out[:, :5], want[:, :5])
        assert np.isnan(out[:, 5]).all()


@case("A11")
def test_nan_in_masked_places_of_a_bias(implementation: str) -> None:
    call = inputs(implementation)
    mask = np.tri(5, 7, 2, dtype=bool)
    bias = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    dout, _ = cotangents_of(call)
    want = evaluate(call | {"mask": mask, "bias": bias}, implementation, dout)
    got = evaluate(call | {"mask": mask, "bias": np.where(mask, bias, np.nan)}, implementation, dout)
    np.testing.assert_array_equal(got.out, want.out)
    for name, gradient in want.gradients.items():
        np.testing.assert_array_equal(got.gradients[name], gradient)


@case("A16")
def test_rows_behind_the_lengths_are_written(implementation: str) -> None:
    """Lengths of queries and keys, 0 and all among them: zeros, -inf, zero gradients, also in a sum over ALL rows."""
    call = inputs(implementation, batch=3, q_len=40, kv_len=40, heads=(2, 1))
    q_lengths, kv_lengths = np.array([5, 0, 40]), np.array([9, 40, 0])
    call |= {"q_lengths": q_lengths, "kv_lengths": kv_lengths}
    dout, dlse = cotangents_of(call)
    first = evaluate(call, implementation, dout, dlse)
    live_q = (np.arange(40) < q_lengths[:, None]) & (kv_lengths[:, None] > 0)
    live_kv = (np.arange(40) < kv_lengths[:, None]) & (q_lengths[:, None] > 0)
    assert (first.out[~live_q] == 0).all() and (first.lse[~live_q] == -np.inf).all()
    for name, live in (("q", live_q), ("k", live_kv), ("v", live_kv)):
        gradient = first.gradients[name]
        assert (gradient[~live] == 0).all() and np.isfinite(gradient.sum(1)).all() and (gradient[live] != 0).any()
    for _ in range(2):
        again = evaluate(call, implementation, dout, dlse)
        np.testing.assert_array_equal(again.out, first.out)
        np.testing.assert_array_equal(again.gradients["v"], first.gradients["v"])
