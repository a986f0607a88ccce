"""The compiled decoding kernels on a Hopper GPU, in all their shapes and cuts, against plain JAX in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import xla_decode
from pallas_flash.decode_spec import DecodeOperands, DecodeSpec
from pallas_flash.kernels.sm90 import decode
from pallas_flash.kernels.sm90.decode_config import DecodeConfig
from tests.test_gpu_decode import on_hopper as on_hopper
from tests.test_interpret_decode import ALIBI, FP8, operands_of, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]

SPEC = DecodeSpec(0.09)
of = functools.partial(functools.partial, operands_of)
LONG, RAGGED = [4096, 1, 2000, 0], [4096, 4095, 64, 300]

# (spec, what makes the operands); what stands behind the lengths is NaN
CALLS = {
    "grouped heads": (SPEC, of((4, 1, 4096, 32, 8, 128, 128), LONG)),
    "multi-query, 64": (SPEC, of((4, 1, 4096, 64, 1, 64, 64), RAGGED)),
    "192/128, float16": (SPEC, of((4, 2, 4096, 8, 4, 192, 128), RAGGED, jnp.float16)),
    "256, new tokens": (SPEC, of((4, 16, 4096, 4, 2, 256, 256), RAGGED)),
    "odd head dims, a length that is none of 8": (SPEC, of((2, 3, 1021, 6, 2, 72, 40), [1021, 600])),
    "a window, a soft cap, sinks": (
        DecodeSpec(0.09, window=1000, soft_cap=5.0),
        of((4, 5, 4096, 8, 2, 128, 128), LONG, sinks=jnp.linspace(-1, 3, 8)),
    ),
    "slopes, query lengths, a traced scale": (
        DecodeSpec(None, score_mod=ALIBI["spec"]),
        of(
            (2, 4, 1024, 6, 2, 128, 128), [1024, 70], q_lengths=jnp.array([4, 2]), scale=jnp.float32(0.1),
            score_mod=ALIBI["operands"],
        ),
    ),
    **{
        f"pages of {size}": (SPEC, of((4, 1, 4800, 16, 4, 128, 128), [4800, 1, 2000, 999], pages=size))
        for size in (8, 24, 64, 240)
    },
    "chunked prefill": (SPEC, of((2, 300, 2048, 8, 2, 128, 128), [2000, 300], pages=64)),
    **{
        f"{jnp.dtype(cache)}, {jnp.dtype(dtype)}, scales {scales}, pages {pages}, {head_dims}": (
            SPEC, of((4, 2, 4096, 16, 4, *head_dims), LONG, dtype, cache, scales, pages),
        )
        for cache, dtype, scales, pages, head_dims in (
            (jnp.int8, jnp.bfloat16, "tokens", None, (128, 128)), (jnp.int8, jnp.bfloat16, "all", 64, (64, 64)),
            (jnp.int8, jnp.float16, "all", None, (96, 32)), (jnp.int8, jnp.bfloat16, "tokens", 16, (256, 256)),
            (FP8, jnp.bfloat16, "tokens", 64, (128, 128)), (FP8, jnp.float16, None, None, (192, 128)),
        )
    },
}  # fmt: skip


def call_of(name: str) -> tuple[DecodeSpec, DecodeOperands]:
    spec, make = CALLS[name]
    return spec, make()


def expected(spec: DecodeSpec, operands: DecodeOperands):
    wide = lambda x: x if x.dtype in (jnp.int8, FP8) else x.astype(jnp.float32)  # noqa: E731
    with jax.default_matmul_precision("highest"):
        return xla_decode.decode(spec, operands._replace(**{x: wide(getattr(operands, x)) for x in "qkv"}))


@pytest.mark.parametrize("name", CALLS)
def test_sm90_equals_plain_jax(name):
    spec, operands = call_of(name)
    assert decode.unsupported(spec, operands) is None
    call = jax.jit(lambda operands: decode.decode(spec, operands))
    got, again, want = call(operands), call(operands), expected(spec, operands)
    real = np.ones(operands.q.shape[:2], bool)
    if operands.q_lengths is not None:
        real = np.arange(operands.q.shape[1]) < np.asarray(operands.q_lengths)[:, None]
    out, lse, want_out, want_lse = (np.asarray(x, np.float32)[real] for x in (*got, *want))
    assert relative_error(out, want_out) < 4e-3
    alive = np.isfinite(want_lse)
    assert np.all(lse[~alive] == -np.inf) and np.all(out[~alive] == 0)
    np.testing.assert_allclose(lse[alive], want_lse[alive], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(out, np.asarray(again.out, np.float32)[real])
    assert relative_error(np.roll(out, 1, axis=0), want_out) > 0.1  # the companion


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
@pytest.mark.parametrize("early", [False, True])
def test_any_number_of_splits_gives_the_same(splits, early):
    spec, operands = call_of("grouped heads")
    config = DecodeConfig(min_keys_per_split=64, early_combine=early)
    call = jax.jit(lambda operands: decode.decode(spec, operands, config=config, splits=splits))
    assert relative_error(call(operands).out, expected(spec, operands).out) < 4e-3
