"""No argument depends on another for being honoured: every subset of the masking arguments, every pair of the others,
and every broadcast pattern of bias and mask."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.conftest import Call, check, cotangents_of, dropout_keep, evaluate, inputs, judge, small_tiles

B, T, S, N, K = 2, 37, 41, 2, 1
SIZES: Call = {"batch": B, "q_len": T, "kv_len": S, "heads": (N, K), "dims": (4, 3)}


def masking() -> dict[str, Call]:
    rng = np.random.default_rng(0)
    return {
        "mask": {"mask": rng.random((B, 1, T, S)) < 0.8},
        "is_causal": {"is_causal": True},
        "query lengths": {"q_lengths": np.array([30, 0], np.int32)},
        "key lengths": {"kv_lengths": np.array([17, 41], np.int32)},
        "window": {"window": (9, 4)},
        "segments": {"segment_ids": tuple(np.arange(n)[None].repeat(B, 0).astype(np.int32) // 13 for n in (T, S))},
        "bias": {"bias": rng.normal(size=(1, N, T, S)).astype(np.float32)},
    }


def others() -> dict[str, Call]:
    rng = np.random.default_rng(1)
    mod = (lambda s, b, h, i, j: s - 0.1 * (h + 1) * abs(i - j) + b, lambda s, b, h, i, j: 1 + 0 * s)
    return {
        "sinks": {"sinks": rng.normal(size=N).astype(np.float32)},
        "soft cap": {"soft_cap": 0.7},
        "score_mod": {"score_mod": mod},
        "dropout": {"rate": 0.4, "keep": dropout_keep((B, N, T, S), 0.4)},
        "prefix": {"prefix": np.array([20, 3], np.int32)},
        "chunked": {"chunk": 10},
        "predicate": {"predicate": lambda b, h, i, j: (i + j + b + h) % 3 != 0},
        "window": {"window": (5, 0)},
        "offset": {"query_offset": np.array([4, -6], np.int32)},
        "scale": {"scale": np.float32(0.9)},
    }


def union(parts: Any) -> Call:
    return {name: value for part in parts for name, value in part.items()}


@pytest.mark.case("B04")
@pytest.mark.parametrize("size", range(len(masking()) + 1))
def test_every_subset_of_the_masking_arguments(implementation: str, size: int) -> None:
    parts = masking()
    for subset in itertools.combinations(parts, size):
        call = inputs(**SIZES) | union(parts[name] for name in subset)
        dout, _ = cotangents_of(call)
        judge(evaluate(call, implementation, dout, jit=False), call, dout)


def test_every_masking_argument_changes_the_result(implementation: str) -> None:
    """The companion: to each of the full set, the result without it is refused."""
    parts = masking()
    call = inputs(**SIZES) | union(parts.values())
    for name in parts:
        without = inputs(**SIZES) | union(part for other, part in parts.items() if other != name)
        with pytest.raises(AssertionError):
            judge(evaluate(without, implementation, jit=False), call)


@pytest.mark.parametrize("first", others())
def test_every_pair_of_the_other_arguments(implementation: str, first: str) -> None:
    parts = others()
    names = list(parts)
    for second in names[names.index(first) :]:
        call = inputs(**SIZES) | parts[first] | parts[second]
        if "keep" in call:
            call["keep"] = dropout_keep((B, N, T, S), 0.4, call.get("query_offset", 0))
        check(call, implementation, jit=False)


def test_every_argument_at_once_in_many_tiles() -> None:
    """`xla` cut into tiles, one by one and all together."""
    mask = masking()["mask"]["mask"]
    everything = union([*(part for name, part in masking().items() if name != "mask"), *others().values()])
    everything["keep"] = dropout_keep((B, N, T, S), 0.4, everything["query_offset"])
    with small_tiles():
        for part in (*masking().values(), *others().values()):
            check(inputs(**SIZES) | part, "xla", jit=False)
        check(inputs(**SIZES) | everything, "xla")
        some = {name: everything[name] for name in ("bias", "is_causal", "sinks", "soft_cap", "kv_lengths")}
        check(inputs(**SIZES) | some | {"mask": mask}, "xla", jit=False)


PATTERNS = list(itertools.product((False, True), repeat=4))

# The sizes at which a wrong axis broadcasts in silence, and sizes that are all different.
DANGEROUS: dict[str, Call] = {
    "all different": {"batch": 2, "q_len": 5, "kv_len": 7, "heads": (6, 3)},
    "T = S, B = K": {"batch": 2, "q_len": 5, "kv_len": 5, "heads": (4, 2)},
    "B = N, T = N": {"batch": 4, "q_len": 4, "kv_len": 6, "heads": (4, 2)},
    "B = N / K, S = N": {"batch": 3, "q_len": 5, "kv_len": 6, "heads": (6, 2)},
}


@pytest.mark.case("B24")
@pytest.mark.parametrize("sizes", DANGEROUS)
def test_every_broadcast_of_bias_and_mask(implementation: str, sizes: str) -> None:
    call = inputs(**DANGEROUS[sizes])
    batch, q_len, heads = call["q"].shape[:3]
    full = (batch, heads, q_len, call["k"].shape[1])
    rng = np.random.default_rng(2)
    for pattern, other in zip(PATTERNS, PATTERNS[::-1], strict=True):
        shapes = (tuple(n if p else 1 for n, p in zip(full, ps, strict=True)) for ps in (pattern, other))
        bias_shape, mask_shape = shapes
        bias = rng.normal(size=bias_shape).astype(np.float32)
        outputs = check(call | {"bias": bias, "mask": rng.random(mask_shape) < 0.7}, implementation, jit=False)
        assert outputs.gradients["bias"].shape == bias_shape


def test_broadcasts_in_many_tiles() -> None:
    call = inputs(**SIZES)
    with small_tiles():  # once: in small tiles, and after them, all is compiled anew
        for pattern in (PATTERNS[0], PATTERNS[6], PATTERNS[10], PATTERNS[15]):
            rng = np.random.default_rng(3)
            bias_shape = tuple(n if p else 1 for n, p in zip((B, N, T, S), pattern, strict=True))
            mask_shape = tuple(1 if p else n for n, p in zip((B, N, T, S), pattern, strict=True))
            arrays = {"bias": rng.normal(size=bias_shape).astype(np.float32), "mask": rng.random(mask_shape) < 0.7}
            check(call | arrays, "xla", jit=False)


def test_lower_ranks_align_right(implementation: str) -> None:
    call, rng = inputs(), np.random.default_rng(4)
    (_, q_len, heads, _), kv_len = call["q"].shape, call["k"].shape[1]
    for shape in ((kv_len,), (q_len, 1), (heads, 1, kv_len)):
        bias = rng.normal(size=shape).astype(np.float32)
        check(call | {"bias": bias, "mask": rng.random(shape) < 0.7}, implementation, jit=False)
