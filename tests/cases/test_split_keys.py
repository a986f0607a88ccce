"""Decoding over keys that are split among CTAs, and over pages: every number of splits gives the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash.decode_validation import DecodeArguments, canonicalise
from pallas_flash.kernels.sm90 import decode as sm90_decode
from tests import oracles
from tests.cases.common import case
from tests.decoding import Call, Sizes, decode, oracle, pages_of, random_call, with_junk

SIZES = Sizes(1, 512, (4, 2), (64, 64))
LENGTHS = np.array([512, 0, 300, 65], np.int32)
# The compiled kernel, and its body in the interpreter.
KERNEL = [
    pytest.param(None, id="sm90", marks=pytest.mark.gpu),
    pytest.param("interpreted", marks=pytest.mark.interpreted),
]


def split(call: Call, splits: int, interpreted: str | None) -> Any:
    """(out, lse) by the Hopper kernel with this number of splits."""
    interpret = None
    if interpreted is not None:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams()
    arrays = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    checked = canonicalise(DecodeArguments(**arrays))
    assert sm90_decode.unsupported(checked.spec, checked.operands) is None
    return sm90_decode.decode(checked.spec, checked.operands, splits=splits, interpret=interpret)


def judge(call: Call, splits: int, interpreted: str | None, factor: float = 2.0) -> None:
    want, plain = (oracle(call, arithmetic) for arithmetic in (oracles.FLOAT64, oracles.plain(jnp.bfloat16)))
    got = split(with_junk(call), splits, interpreted)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    for name, floor in (("out", eps), ("lse", 1e-3)):
        exact, rough = getattr(want, name), getattr(plain, name)
        oracles.assert_within_budget(getattr(got, name), exact, rough, factor=factor, floor=floor, name=name)


@case("H03")
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("interpreted", KERNEL)
def test_a_sink_counts_once_however_many_splits(splits: int, interpreted: str | None) -> None:
    """With a window the first splits are empty, and one length is 0."""
    sinks = np.array([3, -2, 0.5, 20], np.float32)
    options: dict[str, Any] = {"sinks": sinks, "logits_soft_cap": 5.0, "local_window_size": 100}
    judge(random_call(SIZES, dtype=jnp.bfloat16, kv_lengths=LENGTHS, **options), splits, interpreted)


@case("H06")
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("q_len", [1, 2, 5])
@pytest.mark.parametrize("interpreted", KERNEL)
def test_every_sequence_has_its_own_result(q_len: int, splits: int, interpreted: str | None) -> None:
    judge(random_call(SIZES._replace(q_len=q_len), dtype=jnp.bfloat16, kv_lengths=LENGTHS), splits, interpreted)


@case("H07")
@pytest.mark.parametrize("splits", [1, 4, 16])
@pytest.mark.parametrize("interpreted", KERNEL)
def test_splits_cost_no_accuracy(splits: int, interpreted: str | None) -> None:
    """Values far from 0: partial results that were rounded to 16 bits would show."""
    call = random_call(SIZES, dtype=jnp.bfloat16, kv_lengths=LENGTHS)
    call["value"] = (call["value"].astype(np.float32) + 8).astype(jnp.bfloat16)
    judge(call, splits, interpreted, factor=1.1)


@case("F07")
@pytest.mark.parametrize("decoder", ["xla", pytest.param("sm90", marks=pytest.mark.gpu)])
def test_batch_mates_do_not_change_a_bit(decoder: str) -> None:
    """By their lengths, 0 among them. How many there are may: splits, and XLA's products, follow the shapes."""
    dtype, sizes = (
        (np.float32, Sizes(1, 640, (4, 2), (64, 64)))
        if decoder == "xla"
        else (jnp.bfloat16, SIZES._replace(kv_len=640))
    )
    call = random_call(sizes, dtype=dtype, kv_lengths=np.array([333, 640, 1, 64], np.int32))
    want = decode(call, decoder, jit=True)
    for others in ([0, 0, 0], [17, 600, 333], [640, 640, 640]):
        call["kv_lengths"] = np.array([333, *others], np.int32)
        got = decode(call, decoder, jit=True)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), got, want)


@case("E14")
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (16, 1)])
@pytest.mark.parametrize("decoder", ["xla", pytest.param("sm90", marks=pytest.mark.gpu)])
def test_every_number_of_pages_and_tail(heads: tuple[int, int], decoder: str) -> None:
    """1 to 33 pages of 16 tokens, the last of them with 1, 15 or 16: all in one batch of ragged lengths."""
    lengths = np.array([16 * pages - missing for pages in range(1, 34) for missing in (15, 1, 0)], np.int32)
    dtype = np.float32 if decoder == "xla" else jnp.bfloat16
    rng = np.random.default_rng(0)
    for q_len in (1, 2):
        shapes = {"query": (q_len, heads[0], 16), "key": (33 * 16, heads[1], 16), "value": (33 * 16, heads[1], 16)}
        call: Call = {name: rng.normal(size=(len(lengths), *s)).astype(dtype) for name, s in shapes.items()}
        call["kv_lengths"] = lengths
        got, _ = decode(pages_of(call, page_size=16), decoder, jit=True)
        want, plain = (oracle(call, arithmetic).out for arithmetic in (oracles.FLOAT64, oracles.plain(dtype)))
        floor = 4e-6 if decoder == "xla" else float(jnp.finfo(dtype).eps)
        oracles.assert_within_budget(got, want, plain, factor=2.0, floor=floor, name="out")
