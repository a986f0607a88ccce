"""Scales, caps, sinks, biases and residuals: what is added to what, in which units, and how large it may be."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash.validation import Arguments, canonicalise
from tests.cases.common import also_interpreted, case, check, dtype_of, evaluate, inputs, not_reference
from tests.conftest import Call, dropout_keep


@case("D05")
@pytest.mark.parametrize("scale", [1.0, 0.05, np.float32(0.05)])
def test_the_scale_multiplies_the_product_alone(implementation: str, scale: float) -> None:
    """Not the bias, not the sinks."""
    bias = 3 * np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    check(
        inputs(implementation) | {"bias": bias, "sinks": np.arange(6, dtype=np.float32), "scale": scale}, implementation
    )


@case("D12")
def test_the_default_scale_is_by_the_head_dim_as_given() -> None:
    for head_dim in (1, 63, 72, 80, 96, 100, 128):
        x = jnp.zeros((1, 2, 1, head_dim), jnp.bfloat16)
        assert canonicalise(Arguments(x, x, x)).spec.scale == pytest.approx(head_dim**-0.5)


@case("D13")
@also_interpreted
@not_reference
def test_a_small_cap_leaves_masked_keys_dead(implementation: str) -> None:
    """tanh(-inf) = -1 would give the future more than half of row 0."""
    call = inputs(implementation) | {"is_causal": True}
    forbidden = np.where(np.arange(7) == 1, -np.inf, 0).astype(np.float32)
    for options in (
        {"soft_cap": 0.5},
        {"soft_cap": 1.0, "bias": forbidden},
        {"soft_cap": 0.5, "mask": np.arange(7) != 0},
    ):
        outputs = check(call | options, implementation)
        if "mask" in options:
            assert (np.asarray(outputs.out)[:, 0] == 0).all()
        else:
            np.testing.assert_allclose(np.float32(outputs.out)[0, 0, 0], np.float32(call["v"])[0, 0, 0], rtol=1e-2)


@case("D16")
def test_the_cap_comes_before_the_bias(implementation: str) -> None:
    call = inputs(implementation) | {"soft_cap": 5.0}
    bias = np.linspace(-16, 16, 35, dtype=np.float32).reshape(5, 7)
    outputs = check(call | {"bias": bias}, implementation)
    assert np.abs(np.asarray(outputs.lse)).max() > 10  # a bias inside the cap could not get there


@case("H04")
@pytest.mark.parametrize("sink", [20.0, 1e4, -1e4])
def test_a_sink_far_from_the_logits(implementation: str, sink: float) -> None:
    """Logits about -300 and about 0 in one row; the sink above, far above and far below them."""
    call = inputs(implementation) | {"sinks": np.full(6, sink, np.float32), "window": (1, 1)}
    bias = np.where(np.arange(7) % 2, -300, 0).astype(np.float32)
    outputs = check(call | {"bias": bias}, implementation)
    assert np.isfinite(np.float32(outputs.out)).all() and np.isfinite(np.asarray(outputs.lse)).all()


@case("I01", "C15", "C12", "C13", "I04")
@also_interpreted
@not_reference
def test_lse_is_natural_and_has_a_gradient(implementation: str) -> None:
    """float32, of the logits after scale, cap and bias, with the sink, without dropout; each row also by hand."""
    call: Call = inputs(implementation) | {
        "scale": 0.7,
        "soft_cap": 3.0,
        "sinks": np.linspace(-1, 1, 6, dtype=np.float32),
    }
    call["bias"] = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)
    call |= {"rate": 0.4, "keep": dropout_keep((2, 6, 5, 7), 0.4), "q_lengths": np.array([5, 3])}
    outputs = check(call, implementation)
    assert np.asarray(outputs.lse).dtype == np.float32
    q, k = (np.float64(call[name]) for name in "qk")
    scores = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, 2)) * 0.7
    logits = 3 * np.tanh(scores / 3) + call["bias"]
    sinks = np.broadcast_to(call["sinks"][:, None, None], (2, 6, 5, 1))
    want = np.log(np.exp(np.concatenate([logits, sinks], -1)).sum(-1)).swapaxes(1, 2)
    want[1, 3:] = call["sinks"]  # no key: the sink alone
    np.testing.assert_allclose(outputs.lse, want, rtol=2e-5, atol=2e-5)


@case("I04")
@not_reference
def test_chunks_merge_by_lse_in_float32(implementation: str) -> None:
    """7 chunks of one key each, of 16-bit inputs: merged in float32 they are the whole; with a rounded lse they are
    not."""
    dtype = jnp.bfloat16
    call = inputs(implementation, dtype=dtype)
    call["v"] = call["v"] + np.asarray(8, dtype)
    whole = evaluate(call, implementation)
    parts = [evaluate(call | {"mask": np.arange(7) == key}, implementation) for key in range(7)]
    out, lse = (np.stack([np.float64(getattr(part, name)) for part in parts]) for name in ("out", "lse"))

    def merged(lse: np.ndarray) -> np.ndarray:
        weights = np.exp(lse - lse.max(0))
        return (out * (weights / weights.sum(0))[..., None]).sum(0)

    exact = evaluate({name: np.float32(x) for name, x in call.items()}, "reference").out
    assert np.abs(merged(lse) - exact).max() < 2e-6 * np.abs(exact).max()
    assert np.abs(merged(np.float64(lse.astype(dtype))) - exact).max() > 1e-3
    np.testing.assert_allclose(whole.out, exact, rtol=1e-2)


@case("F01", "F02")
@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_dropout_has_one_mask_and_one_scale(implementation: str, rate: float) -> None:
    """Forward and backward with the mask that `reference` draws for this key and these places."""
    keep = dropout_keep((2, 6, 5, 7), rate)
    assert keep.any() and not keep.all()
    call = inputs(implementation) | {"rate": rate, "keep": keep, "is_causal": True, "query_offset": 0}
    check(call, implementation)


@case("C03")
@not_reference
def test_a_bias_of_another_dtype(implementation: str) -> None:
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        bias = np.random.default_rng(2).normal(size=(1, 6, 5, 7)).astype(dtype)
        gradients = check(inputs(implementation) | {"bias": bias}, implementation).gradients
        assert gradients["bias"].dtype == dtype and gradients["q"].dtype == dtype_of(implementation)
