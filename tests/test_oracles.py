"""The oracle itself: its gradients against finite differences, its answers where they are known, and the budget."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles

B, T, S, N, K, H, HV = 2, 5, 7, 6, 3, 4, 3


def make_inputs(seed: int = 0, dtype: Any = np.float64) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, HV)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def options() -> dict[str, dict[str, Any]]:
    """Every option at least once, alone and in company."""
    rng = np.random.default_rng(1)
    mod = (lambda s, b, h, i, j: s + 0.1 * s**2 - 0.2 * (h + 1) * abs(i - j), lambda s, b, h, i, j: 1 + 0.2 * s)
    bias = rng.normal(size=(N, 1, S))
    infinite = np.where(rng.random((B, 1, T, S)) < 0.3, -np.inf, 0.5)
    return {
        "nothing": {},
        "bias": {"bias": bias, "scale": 0.7},
        "bias of -inf": {"bias": infinite, "sinks": rng.normal(size=N)},
        "mask": {"mask": rng.random((B, 1, T, S)) < 0.6},
        "causal offset": {"is_causal": True, "query_offset": np.array([2, -1])},
        "lengths": {"q_lengths": np.array([3, 0]), "kv_lengths": np.array([7, 2]), "sinks": rng.normal(size=N)},
        "window": {"window": (1, 2), "soft_cap": 0.8, "bias": bias},
        "segments": {"segment_ids": (rng.integers(0, 3, (B, T)), rng.integers(0, 3, (B, S)))},
        "prefix": {"prefix": np.array([3, 1]), "score_mod": mod, "soft_cap": 1.5},
        "chunk": {"chunk": 3, "query_offset": 2},
        "predicate": {"predicate": lambda b, h, i, j: (i + j + h + b) % 2 == 0, "sinks": rng.normal(size=N)},
        "dropout": {"keep": rng.random((B, N, T, S)) < 0.7, "rate": 0.3, "sinks": rng.normal(size=N), "bias": bias},
    }


def loss(inputs: dict[str, Any], dout: Any, dlse: Any) -> float:
    result = oracles.attention(**inputs)
    return float((result.out * dout).sum() + (np.where(np.isfinite(result.lse), result.lse, 0) * dlse).sum())


@pytest.mark.parametrize("name", options())
def test_gradients_match_central_differences(name: str) -> None:
    rng = np.random.default_rng(2)
    inputs = {"scale": H**-0.5} | make_inputs() | options()[name]
    dout, dlse = rng.normal(size=(B, T, N, HV)), rng.normal(size=(B, T, N))
    for argument, gradient in oracles.gradients(**inputs, dout=dout, dlse=dlse).items():
        value = np.asarray(inputs[argument])
        assert gradient.shape == value.shape
        for _ in range(3):
            direction = rng.normal(size=value.shape)
            step = 1e-5 * direction
            with_step = [loss(inputs | {argument: value + sign * step}, dout, dlse) for sign in (1, -1)]
            want = (with_step[0] - with_step[1]) / 2e-5
            np.testing.assert_allclose((gradient * direction).sum(), want, rtol=1e-7, atol=1e-8)


def test_known_answers() -> None:
    """Counting keys with q = 0 and v one-hot by key; the sink alone; the mask that beats the soft cap."""
    q, k, v = np.zeros((1, 4, 1, 2)), np.ones((1, 4, 1, 2)), np.eye(4)[None, :, None]
    assert np.allclose(np.exp(oracles.attention(q, k, v, is_causal=True).lse)[0, :, 0], [1, 2, 3, 4])
    assert np.allclose(np.exp(oracles.attention(q, k, v, window=(1, 0)).lse)[0, :, 0], [1, 2, 2, 2])
    assert np.allclose(np.exp(oracles.attention(q, k, v, window=(1, -1), query_offset=2).lse)[0, :, 0], [3, 2, 1, 0])
    dead = oracles.attention(q, k, v, kv_lengths=0, sinks=np.array([2.5]))
    assert (dead.out == 0).all() and (dead.lse == 2.5).all() and (dead.max_logit == -np.inf).all()
    assert (oracles.attention(q, k, v, kv_lengths=0).lse == -np.inf).all()
    capped = oracles.attention(q + 9, k, v, is_causal=True, soft_cap=0.5)
    assert (capped.out[0, 0, 0] == [1, 0, 0, 0]).all() and np.allclose(capped.max_logit, 0.5)


def test_junk_in_masked_places_has_no_effect() -> None:
    inputs, rng = make_inputs(), np.random.default_rng(3)
    lengths = {"q_lengths": np.array([3, 5]), "kv_lengths": np.array([4, 7]), "bias": rng.normal(size=(B, N, T, S))}
    dout = rng.normal(size=(B, T, N, HV))
    junk = {name: x.copy() for name, x in inputs.items()}
    junk["q"][0, 3:], junk["k"][0, 4:], junk["v"][0, 4:] = np.nan, np.inf, np.nan
    junk_bias, junk_dout = lengths["bias"].copy(), dout.copy()
    junk_bias[0, :, :, 4:], junk_dout[0, 3:] = np.nan, np.nan
    want = oracles.gradients(**inputs, **lengths, dout=dout)
    got = oracles.gradients(**junk, **(lengths | {"bias": junk_bias}), dout=junk_dout)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
    assert (got["k"][0, 4:] == 0).all() and (got["q"][0, 3:] == 0).all() and (got["bias"][0, :, 3:] == 0).all()
    seen = oracles.attention(**junk).out  # without lengths the junk is read, and that must show
    assert np.isnan(seen[0]).all() and np.isfinite(seen[1]).all()


def test_a_sink_of_minus_infinity_is_none() -> None:
    """Also of rows without keys, whose log-sum-exp is -inf as well."""
    inputs, lengths = make_inputs(), {"q_lengths": np.array([3, 0]), "kv_lengths": np.array([7, 2])}
    cotangents = {"dout": np.ones((B, T, N, HV)), "dlse": np.ones((B, T, N))}
    want = oracles.gradients(**inputs, **lengths, **cotangents)
    got = oracles.gradients(**inputs, **lengths, **cotangents, sinks=np.full(N, -np.inf))
    assert (got.pop("sinks") == 0).all()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_magnitudes_measure_rounding_errors() -> None:
    """Errors of plain attention are a few units of rounding of the magnitudes; so the floor hides no larger ones."""
    for extra in options().values():
        inputs = make_inputs(dtype=np.float32) | extra
        cotangents = {"dout": np.ones((B, T, N, HV)), "dlse": np.ones((B, T, N))}
        magnitudes = oracles.rounding_magnitudes(**inputs, **cotangents)
        exact, rough = (
            oracles.gradients(**inputs, **cotangents, arithmetic=a)
            for a in (oracles.FLOAT64, oracles.plain(np.float32))
        )
        for name, want in exact.items():
            unit = np.finfo(np.float32).eps * np.linalg.norm(magnitudes[name])
            assert oracles.error(rough[name], want)[0] <= 4 * unit


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_plain_attention_errs_as_jax_does(dtype: Any) -> None:
    """The budget is honest: plain attention in NumPy and jax.nn's own make errors of one size."""
    rng = np.random.default_rng(4)
    q, k, v, dout = (rng.normal(size=(2, 65, 4, 16)).astype(dtype) for _ in range(4))
    attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="xla")  # noqa: E731
    out, pullback = jax.vjp(attend, *map(jnp.asarray, (q, k, v)))
    ours = [oracles.attention(q, k, v, arithmetic=oracles.plain(dtype)).out]
    ours += [oracles.gradients(q, k, v, dout=dout, arithmetic=oracles.plain(dtype))[n] for n in "qkv"]
    truth = [oracles.attention(q, k, v).out] + [oracles.gradients(q, k, v, dout=dout)[n] for n in "qkv"]
    for theirs, mine, want in zip([out, *pullback(jnp.asarray(dout))], ours, truth, strict=True):
        ratio = oracles.error(theirs, want)[0] / oracles.error(mine, want)[0]
        assert 1 / 3 < ratio < 3


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_budget_rejects_what_is_wrong(dtype: Any) -> None:
    inputs, mask = make_inputs(dtype=dtype), np.random.default_rng(5).random((B, 1, T, S)) < 0.6
    want = oracles.attention(**inputs, mask=mask).out
    plain = oracles.attention(**inputs, mask=mask, arithmetic=oracles.plain(dtype)).out
    oracles.assert_within_budget(plain, want, plain)
    wrong = [np.zeros_like(want), np.roll(want, 1, axis=1), oracles.attention(**inputs).out]
    wrong += [np.where(np.arange(T)[:, None, None] == 2, np.nan, want), np.roll(want, 1, axis=2), want * (1 + 2e-2)]
    for got in wrong:
        with pytest.raises(AssertionError):
            oracles.assert_within_budget(got, want, plain)
    with pytest.raises(AssertionError, match="shape"):
        oracles.assert_within_budget(want[:1], want, plain)
