"""The kernels' own bodies in Pallas' GPU interpreter, with race detection, against the reference in float32.

It sees neither registers nor swizzles nor how TMA clips: test_lowering.py and the GPU suite see to those. The cases run
in a process of their own, `python -m tests.test_interpret`, as XLA reads NPROC when it starts: with fewer threads than
warpgroups the interpreter would wait for ever.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import elementwise, masks, reference
from pallas_flash.kernels import sm90
from pallas_flash.kernels.sm90.config import ForwardConfig
from pallas_flash.spec import AttentionSpec, Forward, Operands
from tests import interpreting

CAUSAL = masks.Band(None, 0)
SMALL = ForwardConfig(block_kv=64, num_ctas=2, head_group=2)


def operands_of(batch, q_len, kv_len, heads, kv_heads, dims, dtype=jnp.bfloat16, **more):
    rng = np.random.default_rng(0)
    head_dim, value_head_dim = dims
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(dtype))  # noqa: E731
    q = draw(batch, q_len, heads, head_dim)
    k, v = draw(batch, kv_len, kv_heads, head_dim), draw(batch, kv_len, kv_heads, value_head_dim)
    return Operands(q, k, v, **more)


def check(spec: AttentionSpec, operands: Operands, config: ForwardConfig = SMALL) -> None:
    operands = operands._replace(mask=operands.mask or ((),) * len(spec.mask))
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    assert sm90.unsupported(spec, operands) is None
    kernel = jax.jit(lambda operands: sm90.forward(spec, operands, config=config, interpret=interpret))
    got, got_max = jax.block_until_ready(kernel(operands))
    assert not races_found()
    want, want_max = in_float32(spec, operands)
    alive = np.isfinite(np.asarray(want.m))
    error = np.linalg.norm(got.out.astype(np.float32) - want.out) / np.linalg.norm(want.out)
    assert error < 3e-3, error
    np.testing.assert_array_equal(np.isfinite(got.m), alive)
    np.testing.assert_allclose(np.where(alive, got.m, 0), np.where(alive, want.m, 0), rtol=1e-6, atol=2e-5)
    if spec.return_max_logit:
        np.testing.assert_allclose(got_max, want_max, atol=2e-5)
    np.testing.assert_allclose(got.l, want.l, rtol=1e-4)
    assert np.all(np.asarray(got.out).swapaxes(1, 2)[~alive] == 0)


def in_float32(spec: AttentionSpec, operands: Operands) -> Forward:
    """What the kernel should return: compiled as a whole, as operations one by one take longer to compile than to
    compute."""

    @jax.jit
    def run(operands: Operands) -> Forward:
        exact = operands._replace(**{x: getattr(operands, x).astype(jnp.float32) for x in ("q", "k", "v")})
        return reference.forward(spec, exact)

    return run(operands)


def races_found() -> bool:
    """jax 0.12 raises on a race; 0.11.2 only notes it."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


rng = np.random.default_rng(1)
draw = lambda *shape: jnp.asarray(rng.random(shape))  # noqa: E731
SLOPES, TABLE = jnp.asarray(rng.normal(size=2), jnp.float32), jnp.asarray(rng.normal(size=(2, 9)), jnp.bfloat16)
IDS = jnp.asarray(np.sort(rng.integers(0, 3, (1, 160)), 1), jnp.int32)
FLAGS = jnp.asarray(rng.random(5) < 0.7)


def score_mod(function) -> dict[str, Any]:
    arguments = {"score": np.float32, **elementwise.PLACE}
    traced, captured = elementwise.trace("score_mod", function, arguments, np.float32)
    return {"spec": traced, "operands": captured}


@jax.jit
def slope(head):
    return 2 * SLOPES[head] * SLOPES[1]


ALIBI = score_mod(lambda s, b, h, q, k: s + SLOPES[h] * jnp.abs(q - k) / 20 + slope(h))
RELATIVE = score_mod(lambda s, b, h, q, k: 3 * jnp.tanh(s + TABLE[h, jnp.clip(q - k, -4, 4) + 4].astype(jnp.float32)))
SAME_DOCUMENT = masks.predicate(lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) | (k % 7 == h))
SOME_FLAGS = masks.predicate(lambda b, h, q, k: FLAGS[(q // 3 + k) % 5] | (k == q))


def bias_of(*shape, dtype=jnp.float32):
    """Every fifth row, or column, or element, is -inf; every seventh as small as can be without being that."""
    bias = rng.normal(size=shape).ravel()
    bias[::5], bias[3::7] = -np.inf, -3e38
    return jnp.asarray(bias.reshape(shape).astype(dtype))


CASES = {
    "causal, grouped heads": (AttentionSpec(0.125, (CAUSAL,)), operands_of(1, 256, 256, 2, 1, (64, 64)), SMALL),
    "three warpgroups, shared buffer, seldom rescaled": (
        AttentionSpec(0.5, (CAUSAL,)),
        operands_of(1, 200, 320, 1, 1, (64, 64)),
        dataclasses.replace(SMALL, compute_wgs=3, out_has_own_buffer=False, rescale_threshold=4.0),
    ),
    "no turns, different head dims, one query": (
        AttentionSpec(0.125),
        operands_of(1, 1, 133, 2, 2, (24, 40)),
        dataclasses.replace(SMALL, take_turns=False),
    ),
    "window, dead rows, a sink of -inf": (
        AttentionSpec(0.125, (masks.Band(20, -3),), q_offset=-10),
        operands_of(1, 200, 160, 1, 1, (64, 64), sinks=jnp.array([-jnp.inf])),
        SMALL,
    ),
    "soft cap, sinks, float16": (
        AttentionSpec(0.125, (CAUSAL,), soft_cap=3.0),
        operands_of(1, 128, 128, 2, 2, (64, 64), jnp.float16, sinks=jnp.array([0.5, -1.0])),
        SMALL,
    ),
    "traced scale < 0 and offsets, prefix, chunks, query lengths": (
        AttentionSpec(
            None, (masks.PrefixLM(), masks.Chunked(100), masks.QueryLengths()), q_offset=None, kv_offset=None
        ),
        operands_of(
            2, 128, 192, 1, 1, (64, 64), scale=jnp.float32(-0.1), q_offset=jnp.array([0, 50]),
            kv_offset=jnp.array([20, -10]), mask=((jnp.array([30, 150]),), (), (jnp.array([70, 128]),)),
        ),
        SMALL,
    ),
    "lengths, one of them 0": (
        AttentionSpec(0.125, (masks.QueryLengths(), CAUSAL, masks.KeyValueLengths())),
        operands_of(3, 64, 133, 1, 1, (64, 64), mask=((jnp.array([64, 30, 5]),), (), (jnp.array([133, 0, 7]),))),
        SMALL,
    ),
    "segments, causal, the maximum beside sinks": (
        AttentionSpec(0.125, (masks.Segments(), CAUSAL), return_max_logit=True),
        operands_of(1, 160, 160, 2, 1, (64, 64), mask=((IDS, IDS), ()), sinks=jnp.array([3.0, -2.0])),
        SMALL,
    ),
    "unsorted segments, a dense mask, a bias for each pair, soft cap": (
        AttentionSpec(0.125, (masks.Segments(), masks.Dense()), soft_cap=3.0),
        operands_of(
            1, 77, 133, 2, 1, (64, 64), bias=bias_of(1, 2, 77, 133, dtype=jnp.bfloat16),
            mask=(((draw(1, 77) < 0.5).astype(int), (draw(1, 133) < 0.5).astype(int)), (draw(1, 1, 77, 133) < 0.8,)),
        ),
        SMALL,
    ),
    "a bias for each query, seldom rescaled, dense mask for each key": (
        AttentionSpec(2.0, (masks.Dense(),)),
        operands_of(1, 64, 133, 1, 1, (64, 64), bias=bias_of(1, 1, 64, 1), mask=((draw(1, 1, 1, 133) < 0.8,),)),
        dataclasses.replace(SMALL, rescale_threshold=4.0),
    ),
    "a bias for each key, dropout, traced offsets": (
        AttentionSpec(0.125, (CAUSAL,), q_offset=None, kv_offset=7, dropout_rate=0.3),
        operands_of(
            2, 64, 100, 1, 1, (64, 64), bias=bias_of(2, 1, 1, 100), q_offset=jnp.array([60, -10]),
            origin=jnp.array([3, 5]), dropout_key=jnp.array([7, 2**32 - 5], jnp.uint32),
        ),
        SMALL,
    ),
    "slopes, a predicate over documents": (
        AttentionSpec(0.125, (CAUSAL, *SAME_DOCUMENT.parts), score_mod=ALIBI["spec"]),
        operands_of(1, 128, 128, 2, 1, (64, 64), score_mod=ALIBI["operands"], mask=((), *SAME_DOCUMENT.arrays)),
        SMALL,
    ),
    "everything": (
        AttentionSpec(
            None, (masks.Band(100, 3), *SOME_FLAGS.parts, masks.Segments()), soft_cap=5.0, score_mod=RELATIVE["spec"],
            dropout_rate=0.1, return_max_logit=True,
        ),
        operands_of(
            1, 100, 160, 2, 1, (40, 72), scale=jnp.float32(0.2), score_mod=RELATIVE["operands"],
            bias=bias_of(1, 1, 100, 160), mask=((), *SOME_FLAGS.arrays, (IDS[:, :100], IDS)),
            sinks=jnp.array([0.5, -1.0]), dropout_key=jnp.array([1, 2], jnp.uint32),
        ),
        SMALL,
    ),
}  # fmt: skip


def check_that_hidden_junk_stays_hidden() -> None:
    """NaN and Inf in rows of v: a query that may read one becomes NaN, all others are as without."""
    clean = operands_of(1, 192, 192, 2, 1, (64, 64), mask=((),))
    spec, config = AttentionSpec(0.125, (masks.Band(30, 0),)), dataclasses.replace(SMALL, block_kv=96)
    junk = clean.v.at[:, 5, :, 3].set(jnp.nan).at[:, 100, :, 60].set(-jnp.inf)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    kernel = jax.jit(lambda operands: sm90.forward(spec, operands, config=config, interpret=interpret).residuals)
    run = lambda v: jax.block_until_ready(kernel(clean._replace(v=v)))  # noqa: E731
    want, got = run(clean.v), run(junk)
    assert not races_found()
    position = np.arange(192)
    reads = np.any([(position >= row) & (position <= row + 30) for row in (5, 100)], axis=0)
    np.testing.assert_array_equal(got.out[:, ~reads], want.out[:, ~reads])
    assert np.isnan(got.out.astype(np.float32))[:, reads].all()
    np.testing.assert_array_equal(got.l, want.l)


def check_that_a_wrong_mask_is_noticed() -> None:
    """The comparison is no formality: a band that is one key too wide fails it."""
    wide = AttentionSpec(0.125, (masks.Band(None, 1),))
    operands = operands_of(1, 64, 64, 1, 1, (64, 64), mask=((),))
    config = dataclasses.replace(SMALL, compute_wgs=1)
    got = sm90.forward(wide, operands, config=config, interpret=plgpu.InterpretGPUParams()).residuals
    want = reference.forward(dataclasses.replace(wide, mask=(CAUSAL,)), operands).residuals
    assert float(jnp.abs(got.out - want.out).max()) > 0.1


def check_that_a_race_is_noticed() -> None:
    """Two warpgroups that write the same buffer, with nothing between them."""

    def body(out, buffer):
        buffer[...] = jnp.full((128,), lax.axis_index("wg"), jnp.float32)
        plgpu.commit_smem()
        out[lax.axis_index("wg")] = buffer[...]

    racing = plgpu.kernel(
        body,
        out_type=jnp.zeros((2, 128), jnp.float32),
        scratch_types=(plgpu.SMEM((128,), jnp.float32),),
        num_threads=2,
        thread_name="wg",
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    try:
        np.asarray(racing())
    except Exception as error:
        assert "race" in str(error).lower(), error
    else:
        assert races_found()


MORE_CHECKS = (check_that_hidden_junk_stays_hidden, check_that_a_wrong_mask_is_noticed, check_that_a_race_is_noticed)


def checks() -> dict[str, Any]:
    return {name: (check, *case) for name, case in CASES.items()} | {f.__name__: (f,) for f in MORE_CHECKS}


def test_the_kernels_are_right_and_have_no_race():
    interpreting.assert_all_pass("tests.test_interpret", len(CASES) + len(MORE_CHECKS))


if __name__ == "__main__":
    interpreting.main(checks())
