"""A large negative number is a number: only False and -inf mean "not allowed"."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases.common import also_interpreted, case, check, close, dtype_of, evaluate, inputs, not_reference, on_cpu
from tests.conftest import Call, cotangents_of


@case("A04")
@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, float(jnp.finfo(jnp.bfloat16).min)])
def test_the_lowest_number_is_no_mask(implementation: str, lowest: float) -> None:
    """A row of it is the mean of v; keys of it beside others have no weight; all is finite."""
    call = inputs(implementation)
    bias = np.zeros((5, 7), np.float32)
    bias[2], bias[3, 4:] = lowest, lowest
    outputs = evaluate(call | {"bias": bias}, implementation, cotangents_of(call)[0])
    close(outputs.out[:, 2], np.repeat(np.float32(call["v"]).mean(1), 2, axis=1), implementation)
    first_keys = evaluate(call | {"kv_lengths": np.array([4, 4])}, implementation).out
    close(outputs.out[:, 3], first_keys[:, 3], implementation)
    assert all(np.isfinite(g).all() for g in outputs.gradients.values())


# Each hides key 1 of two, whose score is 20,000 above that of the other.
HIDING: dict[str, Call] = {
    "mask": {"mask": np.array([True, False])},
    "bias": {"bias": np.array([0, -np.inf], np.float32)},
    "causal": {"is_causal": True},
    "window": {"window": (0, 0)},
    "lengths": {"kv_lengths": np.array([1])},
    "segments": {"segment_ids": (np.array([[0]]), np.array([[0, 1]]))},
}


@case("A06")
@pytest.mark.parametrize("way", HIDING)
def test_a_masked_key_never_wins(implementation: str, way: str) -> None:
    dtype = dtype_of(implementation)
    call: Call = {"q": np.full((1, 1, 1, 1), -20_000, dtype), "k": np.array([1, 0], dtype).reshape(1, 2, 1, 1)}
    call |= {"v": np.array([1, 100], dtype).reshape(1, 2, 1, 1), "scale": 1.0}
    assert evaluate(call | HIDING[way], implementation).out.item() == 1.0


@case("B22")
def test_a_masked_key_has_no_score_at_all(implementation: str) -> None:
    """All scores about -5: a key whose score became 0 would take nearly all the weight."""
    call = inputs(implementation)
    call |= {"bias": np.full((5, 7), -5, np.float32), "mask": np.arange(7) != 3}
    call["v"][:, 3] = 1000
    outputs = check(call, implementation)
    assert np.abs(np.float32(outputs.out)).max() < 10
    assert (np.asarray(outputs.gradients["v"])[:, 3] == 0).all()


@case("A12")
@pytest.mark.parametrize("dtype", [pytest.param(jnp.bfloat16, marks=pytest.mark.gpu), np.float16])
@also_interpreted
@not_reference
def test_two_masks_of_the_lowest_number_sum_to_minus_infinity(implementation: str, dtype: Any) -> None:
    """Left padding plus causal, each as finfo.min: -inf where both apply, and rows of it alone are dead."""
    call = inputs(implementation, dtype=dtype)
    causal, padded = np.tri(5, 7, dtype=bool), np.arange(7) < np.array([3, 0])[:, None]
    lowest = np.asarray(jnp.finfo(dtype).min).astype(dtype)
    with np.errstate(over="ignore"):
        bias = (~causal * lowest + padded[:, None, None, :] * lowest).astype(dtype)
    assert (bias == -np.inf).any()
    outputs = check(call | {"bias": bias}, implementation)
    assert not np.isnan(np.float32(outputs.out)).any()
    dead = call | {"bias": np.where(np.arange(5)[:, None] < 2, -np.inf, bias).astype(dtype)}
    outputs = check(dead, implementation)
    assert (np.asarray(outputs.out)[:, :2] == 0).all() and (np.asarray(outputs.lse)[:, :2] == -np.inf).all()


@case("A14")
@not_reference
def test_a_zero_cotangent_gives_zeros(implementation: str) -> None:
    """Through a causal bias of float16's lowest number, at a length that no tile divides, three times over."""
    q_len, kv_len = (5, 7) if on_cpu(implementation) else (200, 200)
    call = inputs(implementation, q_len=q_len, kv_len=kv_len, dtype=np.float16)
    call |= {"bias": np.where(np.tri(q_len, kv_len, dtype=bool), 0, np.finfo(np.float16).min).astype(np.float16)}
    call |= {"sinks": np.ones(6, np.float32), "scale": np.float32(0.4)}
    for _ in range(3):
        gradients = evaluate(call, implementation, np.zeros((2, q_len, 6, 6), np.float16)).gradients
        assert all((gradient == 0).all() for gradient in gradients.values())
