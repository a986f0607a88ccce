"""Queries without a key give 0, lse -inf and zero gradients, and spoil nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention
from tests import oracles
from tests.cases.common import (
    also_interpreted,
    case,
    check,
    close,
    evaluate,
    inputs,
    not_reference,
    on_cpu,
    same_gradients,
)
from tests.conftest import Call, attend, cotangents_of, op_by_op

T, S = 5, 7


def one_row_masked() -> Any:
    mask = np.ones((2, 1, T, S), bool)
    mask[1, :, 2] = False
    return mask


# Ways in which row 2 of batch element 1 loses its keys.
WAYS: dict[str, Call] = {
    "mask": {"mask": one_row_masked()},
    "bias": {"bias": np.where(one_row_masked(), 0.5, -np.inf).astype(np.float32)},
    "causal and key lengths": {"is_causal": True, "query_offset": np.array([0, -3]), "kv_lengths": np.array([7, 4])},
    "window and segments": {
        "window": (0, 0),
        "segment_ids": (np.array([[0] * T, [0, 0, 1, 0, 0]]), np.zeros((2, S), np.int32)),
    },
    "query lengths": {"q_lengths": np.array([5, 2])},
}


@case("A01", "A15")
@pytest.mark.parametrize("way", WAYS)
def test_a_dead_row_reaches_nothing(implementation: str, way: str) -> None:
    """All other results are those of a call whose loss never sees the row; NaN may stand in its cotangent."""
    call = inputs(implementation) | WAYS[way]
    outputs = check(call, implementation)
    assert (np.asarray(outputs.out)[1, 2] == 0).all() and (np.asarray(outputs.lse)[1, 2] == -np.inf).all()
    assert (np.asarray(outputs.gradients["q"])[1, 2] == 0).all()
    dout, dlse = cotangents_of(call)
    quiet, loud = (np.array(dout), np.array(dout))
    quiet[1, 2], loud[1, 2] = 0, np.nan
    want, got = (evaluate(call, implementation, x, dlse) for x in (quiet, loud))
    assert all(np.isfinite(x).all() for x in got.gradients.values())
    same_gradients(got, want, implementation)
    if way == "bias":
        assert (got.gradients["bias"][1, 0, 2] == 0).all()


@case("A02")
@also_interpreted
def test_a_head_that_reads_nothing(implementation: str) -> None:
    """Head 1 of 6 masked as a whole, whether or not lse is asked for; the others are as if it had not been."""
    call = inputs(implementation)
    masked = call | {"mask": (np.arange(6) != 1)[:, None, None]}
    outputs = check(masked, implementation)
    others = np.array([0, 2, 3, 4, 5])
    assert (np.asarray(outputs.out)[:, :, 1] == 0).all() and (np.asarray(outputs.lse)[:, :, 1] == -np.inf).all()
    unmasked = evaluate(call, implementation)
    close(np.asarray(outputs.out)[:, :, others], unmasked.out[:, :, others], implementation)
    close(np.asarray(outputs.lse)[:, :, others], unmasked.lse[:, :, others], implementation)
    with op_by_op(implementation):
        np.testing.assert_array_equal(attend(masked, implementation), outputs.out)


@case("A08")
@not_reference
def test_fewer_keys_than_queries_bottom_right(implementation: str) -> None:
    """Rows [76, 34, 146] of 3 sequences with one key each; loud inputs; the diagonal at the lengths' end."""
    sizes: Any = {"batch": 3, "q_len": 146, "kv_len": 3, "heads": (2, 1), "dims": (16, 16), "dtype": np.float16}
    call = inputs(implementation, **sizes)
    call["q"] = call["q"] * 3
    lengths = np.array([76, 34, 146], np.int32)
    call |= {"is_causal": True, "q_lengths": lengths, "kv_lengths": np.ones(3, np.int32), "query_offset": 1 - lengths}
    outputs = check(call, implementation, jit=True)
    dead = np.arange(146) != lengths[:, None] - 1  # only the last real query stands at the key
    assert (np.asarray(outputs.gradients["q"])[dead] == 0).all()
    assert all(np.isfinite(np.float32(g)).all() for g in outputs.gradients.values())


@case("A08")
@not_reference
def test_one_key_takes_all_the_weight(implementation: str) -> None:
    """300 draws of one query and one key: P = 1, dq and dk 0 to rounding, dv = dout."""
    sizes: Any = {"batch": 300, "q_len": 1, "kv_len": 1, "heads": (1, 1), "dims": (16, 16), "dtype": np.float16}
    call = {name: 3 * x for name, x in inputs(implementation, **sizes).items()}
    dout, _ = cotangents_of(call)
    outputs = evaluate(call, implementation, dout, jit=True)
    np.testing.assert_array_equal(outputs.out, np.float32(call["v"]))
    np.testing.assert_array_equal(outputs.gradients["v"], np.float32(dout))
    for name in "qk":
        assert np.abs(outputs.gradients[name]).max() < 1e-2


@case("A17")
@not_reference
def test_bands_over_regions(implementation: str) -> None:
    """Local, strided and block-wise regions: empty, full and partial tiles, and keys that no query reads."""
    size = 48 if on_cpu(implementation) else 1024
    row, key = np.ogrid[: 3 * size, : 3 * size]
    local = (row < size) & (abs(row - key) < 9)
    strided = (row >= size) & (row < 2 * size) & ((row - key) % 16 == 0) & (key < 2 * size)
    block = (row >= 2 * size) & (key >= 2 * size + size // 2)
    mask = local | strided | block
    sizes = {"batch": 1, "q_len": 3 * size, "kv_len": 3 * size, "heads": (1, 1), "dims": (16, 16)}
    outputs = check(inputs(implementation, **sizes) | {"mask": mask}, implementation, jit=True)
    unread = ~mask.any(0)
    assert unread.any() and not unread.all()
    for name in "kv":
        gradient = np.asarray(outputs.gradients[name])[0]
        assert (gradient[unread] == 0).all() and (gradient[~unread] != 0).any(-1).all()


@case("H16", "A16")
@not_reference
def test_padding_elements_of_a_batch(implementation: str) -> None:
    """One query each over a cache, three of eight with nothing in it, in a scan: exactly 0 and -inf there."""
    call = inputs(implementation, batch=8, q_len=1, kv_len=24, heads=(4, 2))
    lengths = np.array([3, 0, 24, 7, 0, 0, 1, 24])

    def step(carry: Any, extra: Any) -> Any:
        options: Any = {"key_value_seq_lengths": lengths + extra * (lengths > 0), "return_residual": True}
        return carry, flash_attention(*(call[n] for n in "qkv"), **options, implementation=implementation)

    out, lse = jax.lax.scan(step, 0, jnp.arange(2))[1]
    dead = lengths == 0
    assert (out[:, dead] == 0).all() and (lse[:, dead] == -np.inf).all()
    close(out[0], oracles.attention(**call, kv_lengths=lengths).out, implementation)
    assert np.isfinite(np.float32(out)).all() and np.isfinite(lse[:, ~dead]).all()
