"""The Hopper decoding kernels in Pallas' GPU interpreter, with race detection, against plain JAX in float32.

How and why in a process of its own: test_interpret.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import elementwise, xla_decode
from pallas_flash.combine import Partial
from pallas_flash.decode_spec import DecodeOperands, DecodeSpec
from pallas_flash.kernels.sm90 import decode
from pallas_flash.kernels.sm90.decode_config import DecodeConfig
from tests import interpreting
from tests.test_interpret import races_found

SMALL = DecodeConfig(min_keys_per_split=64)
FP8 = jnp.float8_e4m3fn
TOLERANCE = 3e-3  # of weights in bfloat16


def operands_of(sizes, lengths, dtype=jnp.bfloat16, cache=None, scales=None, pages=None, **more) -> DecodeOperands:
    """sizes: batch, new tokens, capacity, query heads, key heads, head dims. scales: "tokens", "all" or None. pages:
    their size. What stands behind a length, in pages of nobody, and in their scales is NaN."""
    rng = np.random.default_rng(0)
    batch, q_len, capacity, heads, kv_heads, head_dim, value_head_dim = sizes
    cache = cache or dtype
    spread = 40 if cache == jnp.int8 else 1
    k, v = (rng.normal(size=(batch, capacity, kv_heads, dim)) * spread for dim in (head_dim, value_head_dim))
    k_scale, v_scale = (rng.uniform(0.5, 1.5, (batch, capacity, kv_heads)) / spread for _ in range(2))
    table = None
    behind = np.arange(capacity) >= np.clip(lengths, 0, capacity)[:, None]
    for array in (k, v, k_scale, v_scale):
        array[behind] = np.nan
    if pages:
        table, (k, v, k_scale, v_scale) = _as_pages(rng, pages, lengths, (k, v, k_scale, v_scale))
    if scales == "all":
        of_page = np.where(np.isnan(k_scale).all(1, keepdims=True), np.nan, 1 / spread)
        k_scale, v_scale = 0.5 * of_page, 1.5 * of_page
    if scales is not None:
        more |= {"k_scale": jnp.asarray(k_scale, jnp.float32), "v_scale": jnp.asarray(v_scale, jnp.float32)}
    whole = lambda x: np.clip(np.nan_to_num(x, nan=77), -127, 127) if cache == jnp.int8 else x  # noqa: E731
    held = lambda x: jnp.asarray(whole(x).astype(cache))  # noqa: E731
    q = jnp.asarray(rng.normal(size=(batch, q_len, heads, head_dim)).astype(dtype))
    return DecodeOperands(q, held(k), held(v), jnp.array(lengths, jnp.int32), table, **more)


def _as_pages(rng, size, lengths, arrays):
    batch, capacity = arrays[0].shape[:2]
    count = capacity // size
    order = rng.permutation(batch * count + 2)[: batch * count].reshape(batch, count)
    pools = [np.full((batch * count + 2, size, *x.shape[2:]), np.nan) for x in arrays]
    for pool, x in zip(pools, arrays, strict=True):
        pool[order] = x.reshape(batch, count, size, *x.shape[2:])
    used = np.arange(count) < -(-np.array(lengths) // size)[:, None]
    return jnp.asarray(np.where(used, order, 10**6), jnp.int32), pools


def relative_error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@functools.cache
def kernel(spec: DecodeSpec, config: DecodeConfig, splits: int | None) -> Callable[[DecodeOperands], Partial]:
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return jax.jit(lambda operands: decode.decode(spec, operands, config=config, splits=splits, interpret=interpret))


def run(spec: DecodeSpec, operands: DecodeOperands, config: DecodeConfig = SMALL, splits: int | None = None) -> Partial:
    result = jax.block_until_ready(kernel(spec, config, splits)(operands))
    assert not races_found()
    return result


def check(spec: DecodeSpec, operands: DecodeOperands, splits: int, config: DecodeConfig = SMALL) -> None:
    assert decode.unsupported(spec, operands) is None
    got = run(spec, operands, config, splits)
    wide = lambda x: x if x.dtype in (jnp.int8, FP8) else x.astype(jnp.float32)  # noqa: E731
    exact = operands._replace(**{x: wide(getattr(operands, x)) for x in "qkv"})
    want = jax.jit(lambda operands: xla_decode.decode(spec, operands))(exact)
    real = np.ones(operands.q.shape[:2], bool)
    if operands.q_lengths is not None:
        real = np.arange(operands.q.shape[1]) < operands.q_lengths[:, None]
    out, lse = np.asarray(got.out, np.float32)[real], np.asarray(got.lse)[real]
    want_out, want_lse = np.asarray(want.out)[real], np.asarray(want.lse)[real]
    assert relative_error(out, want_out) < TOLERANCE
    alive = np.isfinite(want_lse)
    np.testing.assert_array_equal(np.isfinite(lse), alive)
    np.testing.assert_allclose(lse[alive], want_lse[alive], rtol=1e-5, atol=2e-5)
    assert np.all(lse[~alive] == -np.inf) and np.all(out[~alive] == 0)


def score_mod(function) -> dict[str, Any]:
    traced, captured = elementwise.trace("score_mod", function, {"score": np.float32, **elementwise.PLACE}, np.float32)
    return {"spec": traced, "operands": captured}


SLOPES = jnp.asarray(2.0 ** -np.arange(1, 7), jnp.float32)
ALIBI = score_mod(lambda s, b, h, q, k: s + SLOPES[h] * (k - q) + 0.1 * b)

# (spec, operands, splits)
CASES = {
    "three splits, one length 0, one beyond the capacity": (
        DecodeSpec(0.125), operands_of((3, 1, 300, 4, 2, 64, 64), [300, 0, 999]), 3,
    ),
    "new tokens, query lengths, a window, slopes, sinks, no key for some": (
        DecodeSpec(0.125, window=90, score_mod=ALIBI["spec"]),
        operands_of(
            (2, 5, 256, 6, 2, 64, 40), [256, 3], q_lengths=jnp.array([4, 5]), sinks=jnp.linspace(-1, 1, 6),
            score_mod=ALIBI["operands"],
        ),
        2,
    ),
    "pages of 24, a soft cap, sinks, float16, a traced scale below 0, odd head dims": (
        DecodeSpec(None, soft_cap=3.0),
        operands_of(
            (2, 2, 120, 2, 2, 24, 72), [99, 24], jnp.float16, pages=24, sinks=jnp.array([0.5, -jnp.inf]),
            scale=jnp.float32(-0.2),
        ),
        1,
    ),
    "pages of 16, several tiles of rows": (
        DecodeSpec(0.125), operands_of((2, 40, 256, 4, 2, 64, 64), [250, 41], pages=16), 2,
    ),
    "int8, scales by token": (
        DecodeSpec(0.125), operands_of((2, 2, 200, 4, 2, 64, 64), [200, 70], cache=jnp.int8, scales="tokens"), 2,
    ),
    "int8, more rows than a warp has": (
        DecodeSpec(0.125), operands_of((1, 5, 200, 8, 2, 64, 64), [200], cache=jnp.int8, scales="tokens"), 1,
    ),
    "int8, a scale for each sequence, float16": (
        DecodeSpec(0.125), operands_of((2, 1, 128, 4, 2, 32, 64), [128, 70], jnp.float16, jnp.int8, "all"), 1,
    ),
    "float8 in pages of 32, scales by token, a window": (
        DecodeSpec(0.125, window=100),
        operands_of((2, 2, 256, 4, 2, 64, 64), [250, 70], cache=FP8, scales="tokens", pages=32), 2,
    ),
    "float8 in pages of 128, a scale for each": (
        DecodeSpec(0.125, soft_cap=5.0),
        operands_of((2, 1, 256, 4, 2, 64, 64), [220, 33], cache=FP8, scales="all", pages=128), 1,
    ),
}  # fmt: skip


def check_that_hidden_junk_stays_hidden() -> None:
    """NaN in a value that the last tokens read and the first do not: those become NaN, these are as without."""
    spec = DecodeSpec(0.125, window=50)
    clean = operands_of((1, 4, 128, 2, 1, 64, 64), [100])
    dirty = clean._replace(v=clean.v.at[:, 98, :, 3].set(jnp.nan).at[:, 46, :, 5].set(jnp.inf).at[:, 20].set(jnp.nan))
    want, got = (run(spec, operands, splits=1) for operands in (clean, dirty))
    np.testing.assert_array_equal(got.lse, want.lse)
    np.testing.assert_array_equal(got.out[:, 1], want.out[:, 1])  # position 97 sees keys 47 to 97, not 46 and 98
    assert np.isnan(np.asarray(got.out[:, [0, 2, 3]], np.float32)).all()
    shorter = xla_decode.decode(spec, clean._replace(kv_lengths=jnp.array([99])))
    assert relative_error(want.out, shorter.out) > 10 * TOLERANCE  # no formality: one key less would be noticed


def check_that_hidden_junk_stays_hidden_in_8_bits() -> None:
    """Likewise in float8, where each warp looks at its own keys."""
    spec = DecodeSpec(0.125, window=50)
    clean = operands_of((1, 4, 256, 2, 1, 64, 64), [228], cache=FP8)
    dirty = clean._replace(v=clean.v.at[:, 226, :, 3].set(jnp.nan).at[:, 20].set(jnp.nan))
    config = DecodeConfig(block_kv=128)
    want, got = (run(spec, operands, config, splits=1) for operands in (clean, dirty))
    np.testing.assert_array_equal(got.lse, want.lse)
    np.testing.assert_array_equal(got.out[:, :2], want.out[:, :2])  # positions 224 and 225
    assert np.isnan(np.asarray(got.out[:, 2:, :, 3], np.float32)).all()


MORE_CHECKS = (
    check_that_hidden_junk_stays_hidden_in_8_bits,
    check_that_hidden_junk_stays_hidden,
)


def checks() -> dict[str, Any]:
    return {name: (check, *case) for name, case in CASES.items()} | {f.__name__: (f,) for f in MORE_CHECKS}


def test_the_kernels_are_right_and_have_no_race():
    interpreting.assert_all_pass("tests.test_interpret_decode", len(CASES) + len(MORE_CHECKS))


if __name__ == "__main__":
    interpreting.main(checks())
