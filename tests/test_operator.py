"""The operator against the float64 oracle over random combinations of all its arguments, forward and backward."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import Call, check, dropout_keep, inputs, small_tiles

LENGTHS = (1, 2, 5, 17, 63, 65)
HEADS = ((1, 1), (6, 3), (12, 2), (4, 1))
DIMS = ((8, 8), (7, 4), (4, 9), (16, 1))
DTYPES = (np.float32, jnp.bfloat16, np.float16)

# Functions that NumPy evaluates on arrays and JAX on scalars alike; with the derivative of each score_mod.
PREDICATES = (
    lambda b, h, i, j: (i * 3 + j * 5 + h + 2 * b) % 4 != 0,
    lambda b, h, i, j: (i - j) * (i - j) <= 30 * (h + 1),
)
SCORE_MODS = (
    (lambda s, b, h, i, j: s - 0.05 * (h + 1) * abs(i - j), lambda s, b, h, i, j: 1 + 0 * s),
    (lambda s, b, h, i, j: s + 0.1 * s * s + 0.2 * b, lambda s, b, h, i, j: 1 + 0.2 * s),
)

NO_SHRINKING = (Phase.explicit, Phase.generate)  # a failing call is printed as it came: each step would compile anew


@st.composite
def calls(draw: Any) -> Call:
    """A call in the oracle's names, every argument present or absent by chance."""
    flip = lambda: draw(st.booleans())  # noqa: E731
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, q_len, kv_len = pick(1, 2, 3), pick(*LENGTHS), pick(*LENGTHS)
    heads, dtype = pick(*HEADS), pick(*DTYPES)
    sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "heads": heads, "dims": pick(*DIMS)}
    call = inputs(int(rng.integers(2**32)), **sizes, dtype=dtype)
    full = (batch, heads[0], q_len, kv_len)
    some_shape = lambda: tuple(n if flip() else 1 for n in full)  # noqa: E731
    lengths = lambda n: rng.integers(0, n + 1, batch).astype(np.int32)  # noqa: E731

    if flip():
        call["bias"] = rng.normal(size=some_shape()).astype(pick(dtype, np.float32))
    if flip():
        call["scale"] = pick(0.3, np.float32(-0.4), np.float32(1.1))
    if flip():
        call["is_causal"] = True
    if flip():
        call["q_lengths"] = lengths(q_len)
    if flip():
        call["kv_lengths"] = lengths(kv_len)
    if flip():
        call["window"] = pick(0, 2, 40, (3, 0), (0, 9), (None, 4), (-1, 2), (20, -1), (100, 1))
    if flip():
        call["query_offset"] = pick(3, kv_len - q_len, lengths(kv_len))
    if flip():
        q_ids, kv_ids = (np.sort(rng.integers(0, 3, (batch, n)), axis=1).astype(np.int32) for n in (q_len, kv_len))
        call["segment_ids"] = kv_ids if q_len == kv_len else (q_ids, kv_ids)
    if flip():
        call |= draw(st.sampled_from([{"prefix": lengths(kv_len)}, {"chunk": 9}, {"predicate": pick(*PREDICATES)}]))
    elif flip():
        call["mask"] = rng.random(some_shape()) < 0.8
    if flip():
        call["soft_cap"] = pick(0.7, 5.0)
    if flip():
        call["sinks"] = rng.normal(size=heads[0]).astype(pick(dtype, np.float32))
    if flip():
        call["score_mod"] = pick(*SCORE_MODS)
    if flip():
        call["rate"] = pick(0.1, 0.9)
        call["keep"] = dropout_keep(full, call["rate"], call.get("query_offset", 0))
    return call


@settings(max_examples=20, phases=NO_SHRINKING)
@given(call=calls())
def test_any_combination_matches_the_oracle(implementation: str, call: Call) -> None:
    check(call, implementation)


@settings(max_examples=10, phases=NO_SHRINKING)
@given(call=calls())
def test_any_combination_in_many_tiles_matches_the_oracle(call: Call) -> None:
    with small_tiles():
        check(call, "xla", seed=1)
