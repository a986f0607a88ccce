"""NaN and infinity behind a boundary: exactly as if zeros stood there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases.common import also_interpreted, case, evaluate, inputs, on_cpu, same_gradients
from tests.conftest import Call, cotangents_of


def fill(array: Any, where: Any, value: float) -> Any:
    return np.where(where, value, array.astype(np.float32)).astype(array.dtype)


@case("A09")
@pytest.mark.parametrize("q_len", [pytest.param(1, marks=pytest.mark.gpu), 5])
def test_a_cache_behind_its_lengths(implementation: str, q_len: int) -> None:
    """Lengths within a tile, on its end, and of the whole cache; junk in k, in v, in both; one and several queries."""
    kv_len, lengths = (7, np.array([3, 7])) if on_cpu(implementation) else (200, np.array([128, 90]))
    call = inputs(implementation, q_len=q_len, kv_len=kv_len)
    call |= {"kv_lengths": lengths, "is_causal": True, "query_offset": lengths - q_len}
    behind = (np.arange(kv_len) >= lengths[:, None])[..., None, None]
    dout, _ = cotangents_of(call)
    zeros = {name: fill(call[name], behind, 0) for name in "kv"}
    want = evaluate(call | zeros, implementation, dout)
    for junk in ({"k": np.nan}, {"v": np.nan}, {"k": np.inf, "v": -np.inf}):
        filled = {name: fill(call[name], behind, value) for name, value in junk.items()}
        got = evaluate(call | zeros | filled, implementation, dout)
        np.testing.assert_array_equal(got.out, want.out)
        for name in "qkv":
            np.testing.assert_array_equal(got.gradients[name], want.gradients[name])
    for name in "kv":
        assert (want.gradients[name][np.broadcast_to(behind, want.gradients[name].shape)] == 0).all()


# Ways in which only the last row may read the last key.
LAST_KEY: dict[str, Call] = {
    "causal": {"is_causal": True, "query_offset": 2},
    "mask": {"mask": np.tri(5, 7, 2, dtype=bool)},
    "segments": {"segment_ids": (np.array([[0, 0, 0, 0, 1]] * 2), np.array([[0] * 6 + [1]] * 2))},
}


@case("A11")
@also_interpreted
@pytest.mark.parametrize("way", LAST_KEY)
def test_nan_reaches_those_who_read_it_and_no_other(implementation: str, way: str) -> None:
    call = inputs(implementation) | LAST_KEY[way]
    want = evaluate(call, implementation).out
    for names in ("v", "kv"):
        junk = {name: fill(call[name], (np.arange(7) == 6)[:, None, None], np.nan) for name in names}
        out = evaluate(call | junk, implementation).out
        np.testing.assert_array_equal(out[:, :4], want[:, :4])
        assert np.isnan(out[:, 4]).all()


@case("A11")
def test_nan_in_masked_places_of_a_bias(implementation: str) -> None:
    call = inputs(implementation)
    mask = np.tri(5, 7, 2, dtype=bool)
    bias = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    dout, _ = cotangents_of(call)
    want = evaluate(call | {"mask": mask, "bias": bias}, implementation, dout)
    got = evaluate(call | {"mask": mask, "bias": np.where(mask, bias, np.nan)}, implementation, dout)
    np.testing.assert_array_equal(got.out, want.out)
    same_gradients(got, want, implementation)


@case("A16")
def test_rows_behind_the_lengths_are_written(implementation: str) -> None:
    """Lengths of queries and keys, 0 and all among them: zeros, -inf, zero gradients, also in a sum over ALL rows."""
    size, batch = (7, 2) if on_cpu(implementation) else (200, 3)
    call = inputs(implementation, batch=batch, q_len=size - 2, kv_len=size)
    dout, dlse = cotangents_of(call)
    for q_lengths, kv_lengths in (([3, 0, size], [5, size, 0]), ([size, 1, 0], [0, 2, 0])):
        lengths = {"q_lengths": np.array(q_lengths[:batch]), "kv_lengths": np.array(kv_lengths[:batch])}
        first, again = (evaluate(call | lengths, implementation, dout, dlse) for _ in range(2))
        live_q = (np.arange(size - 2) < lengths["q_lengths"][:, None]) & (lengths["kv_lengths"][:, None] > 0)
        live_kv = (np.arange(size) < lengths["kv_lengths"][:, None]) & (lengths["q_lengths"][:, None] > 0)
        assert (first.out[~live_q] == 0).all() and (first.lse[~live_q] == -np.inf).all()
        for name, live in (("q", live_q), ("k", live_kv), ("v", live_kv)):
            gradient = first.gradients[name]
            assert (gradient[~live] == 0).all() and np.isfinite(gradient.sum(1)).all() and (gradient[live] != 0).any()
        np.testing.assert_array_equal(again.out, first.out)
        np.testing.assert_array_equal(again.gradients["v"], first.gradients["v"])
