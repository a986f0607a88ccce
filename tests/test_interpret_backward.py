"""The backward kernels' own bodies in Pallas' GPU interpreter, with race detection, against gradients in float32.

test_interpret.py says what that can see, and why the cases run in a process of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks, xla
from pallas_flash.kernels.sm90 import backward_pass
from pallas_flash.kernels.sm90.backward_config import BackwardConfig
from pallas_flash.kernels.sm90.backward_queries_config import QueriesConfig
from pallas_flash.spec import AttentionSpec, Cotangents, Gradients, Operands, Residuals
from tests import interpreting
from tests.test_interpret import bias_of, operands_of, races_found, score_mod

CAUSAL = masks.Band(None, 0)
COLUMNS = BackwardConfig()
BY_ROWS = BackwardConfig(block_q=128)
TURNS = {"own_outputs": True, "late_dq": True, "take_turns": True}
LATE = BackwardConfig(block_q=128, num_ctas=2, head_group=2, **TURNS)
SHARED = BackwardConfig(block_kv=64, dout_stages=1)
QUERIES = QueriesConfig(num_ctas=2, head_group=2)
TOLERANCE = 4e-3  # of bfloat16, relative to the gradient's norm

rng = np.random.default_rng(1)
DOCUMENTS = jnp.asarray(np.sort(rng.integers(0, 3, (1, 128)), 1), jnp.int32)
TABLE = jnp.asarray(rng.integers(1, 4, 5))
SIGMOID = score_mod(lambda s, b, h, q, k: TABLE[(q + k) % 5] * s / (1 + jnp.exp(-s)))
STRIPES = masks.predicate(lambda b, h, q, k: (q // 3 + k) % 5 != 0)


def both(
    spec: AttentionSpec, operands: Operands, config: BackwardConfig, queries_config: QueriesConfig | None = None
) -> tuple[Gradients, Gradients]:
    """The kernel's gradients, and those in float32."""
    operands = operands._replace(mask=operands.mask or ((),) * len(spec.mask))
    residuals, cotangents, want = in_float32(spec, operands)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    configs: Any = {"config": config, "queries_config": queries_config}
    kernel = jax.jit(lambda *arrays: backward_pass.backward(spec, *arrays, **configs, interpret=interpret))
    got = jax.block_until_ready(kernel(operands, residuals, cotangents))
    assert not races_found()
    return got, want


def in_float32(spec: AttentionSpec, operands: Operands) -> tuple[Residuals, Cotangents, Gradients]:
    """What a backward pass is given, and what it should return: compiled as a whole, as operations one by one take
    longer to compile than to compute."""
    rng = np.random.default_rng(1)
    dout = rng.normal(size=(*operands.q.shape[:3], operands.v.shape[-1])).astype(operands.q.dtype)
    batch, q_len, heads, _ = operands.q.shape
    cotangents = Cotangents(jnp.asarray(dout), jnp.asarray(rng.normal(size=(batch, heads, q_len)), jnp.float32))

    @jax.jit
    def run(operands: Operands, cotangents: Cotangents) -> tuple[Residuals, Gradients]:
        exact = operands._replace(**{x: getattr(operands, x).astype(jnp.float32) for x in ("q", "k", "v")})
        residuals = xla.forward(spec, exact).residuals
        want = xla.backward(spec, exact, residuals, cotangents._replace(out=cotangents.out.astype(jnp.float32)))
        return residuals._replace(out=residuals.out.astype(operands.q.dtype)), want

    residuals, want = run(operands, cotangents)
    return residuals, cotangents, want


def errors(got: Gradients, want: Gradients) -> dict[str, float]:
    """Relative errors, by field."""
    error = {}
    for name, x, y in zip(Gradients._fields, got, want, strict=True):
        assert (x is None) == (y is None), name
        if y is not None and name != "score_mod":
            norm = np.linalg.norm(np.asarray(y, np.float32))
            error[name] = float(np.linalg.norm(np.asarray(x, np.float32) - np.asarray(y, np.float32)) / max(norm, 1e-9))
    return error


def check(spec: AttentionSpec, operands: Operands, *configs: Any) -> None:
    found = errors(*both(spec, operands, *configs))
    assert max(found.values()) < TOLERANCE, found


CASES = {
    "causal, grouped heads, 128": (
        AttentionSpec(0.1, (CAUSAL,)),
        operands_of(1, 320, 192, 2, 1, (128, 128)),
        COLUMNS,
    ),
    "causal, three heads a key head, persistent, dQ late, dK in the place of dS": (
        AttentionSpec(0.1, (CAUSAL,)),
        operands_of(1, 192, 192, 3, 1, (128, 128)),
        BackwardConfig(num_ctas=1, **TURNS),
    ),
    "soft cap, sinks, float16, persistent, cut-off keys and queries": (
        AttentionSpec(0.125, soft_cap=3.0),
        operands_of(1, 133, 200, 2, 2, (64, 64), jnp.float16, sinks=jnp.array([0.5, -jnp.inf])),
        LATE,
    ),
    "cut-off queries, whole keys, no mask": (
        AttentionSpec(0.125),
        operands_of(1, 100, 128, 2, 1, (64, 64)),
        LATE,
    ),
    "window, dead rows, head dims": (
        AttentionSpec(0.125, (masks.Band(20, -3),), q_offset=-10),
        operands_of(1, 200, 260, 1, 1, (24, 72)),
        LATE,
    ),
    "traced scale < 0 and offsets, prefix, chunks, lengths": (
        AttentionSpec(
            None, (masks.PrefixLM(), masks.Chunked(100), masks.QueryLengths(), masks.KeyValueLengths()),
            q_offset=None, kv_offset=None,
        ),
        operands_of(
            2, 128, 192, 1, 1, (64, 64), scale=jnp.float32(-0.1), q_offset=jnp.array([0, 50]),
            kv_offset=jnp.array([20, -10]),
            mask=((jnp.array([30, 150]),), (), (jnp.array([70, 128]),), (jnp.array([150, 192]),)),
        ),
        BY_ROWS,
    ),
    "shared keys: score_mod, soft cap, segments, dropout": (
        AttentionSpec(0.1, (masks.Segments(),), kv_offset=9, soft_cap=4.0, score_mod=SIGMOID["spec"], dropout_rate=0.2),
        operands_of(
            1, 128, 128, 1, 1, (200, 136), mask=((DOCUMENTS, DOCUMENTS),), score_mod=SIGMOID["operands"],
            origin=jnp.array([3, 5]),
            dropout_key=jnp.array([7, 2**32 - 5], jnp.uint32),
        ),
        SHARED,
    ),
    "dropout, a predicate, a dense mask": (
        AttentionSpec(0.125, (*STRIPES.parts, masks.Dense()), dropout_rate=0.2),
        operands_of(
            1, 128, 128, 1, 1, (64, 64), mask=(*STRIPES.arrays, (jnp.asarray(rng.random((1, 1, 128, 128)) < 0.8),)),
            dropout_key=jnp.array([1, 2], jnp.uint32),
        ),
        BY_ROWS,
    ),
    "shared keys: causal, grouped heads": (
        AttentionSpec(0.07, (CAUSAL,)),
        operands_of(1, 100, 128, 2, 1, (192, 128)),
        dataclasses.replace(SHARED, num_ctas=1),
    ),
    "two kernels: causal, grouped heads, a bias of all queries and keys": (
        AttentionSpec(0.1, (CAUSAL,)),
        operands_of(1, 136, 128, 2, 1, (64, 128), bias=bias_of(1, 2, 136, 128)),
        COLUMNS,
        QUERIES,
    ),
    "two kernels: window, dead rows, traced scale, a bias of queries": (
        AttentionSpec(None, (masks.Band(20, -3),), q_offset=-10),
        operands_of(
            1, 136, 120, 1, 1, (24, 72), jnp.float16, scale=jnp.float32(0.1), bias=bias_of(1, 1, 136, 1)
        ),
        dataclasses.replace(BY_ROWS),
        QueriesConfig(compute_wgs=3, value_stages=1),
    ),
    "two kernels: soft cap, dropout, segments, a bias of keys": (
        AttentionSpec(0.1, (masks.Segments(),), soft_cap=4.0, dropout_rate=0.2),
        operands_of(
            1, 128, 128, 2, 1, (64, 64), mask=((DOCUMENTS, DOCUMENTS),), bias=bias_of(1, 1, 1, 128),
            dropout_key=jnp.array([7, 2**32 - 5], jnp.uint32),
        ),
        BY_ROWS,
        QueriesConfig(block_kv=128),
    ),
    "two kernels: shared keys, cut-off keys, a bias that heads share": (
        AttentionSpec(0.07),
        operands_of(1, 64, 100, 2, 2, (192, 128), bias=bias_of(1, 1, 64, 100)),
        SHARED,
        QueriesConfig(compute_wgs=1, overlap=False),
    ),
}  # fmt: skip


def check_that_a_wrong_mask_is_noticed() -> None:
    """The comparison is no formality: a band that is one key too wide fails it."""
    operands = operands_of(1, 64, 64, 1, 1, (64, 64), mask=((),))
    spec = AttentionSpec(0.125, (CAUSAL,))
    want = both(spec, operands, BY_ROWS)[1]
    got = both(dataclasses.replace(spec, mask=(masks.Band(None, 1),)), operands, BY_ROWS)[0]
    assert min(errors(got, want)[x] for x in ("q", "k", "v")) > 10 * TOLERANCE


def check_that_padding_stays_hidden() -> None:
    """NaN behind the lengths of queries and keys, in their cotangents too, changes nothing; NaN in the cotangent of a
    query reaches it and the keys that it reads."""
    spec = AttentionSpec(0.125, (masks.QueryLengths(), masks.KeyValueLengths(), CAUSAL))
    lengths = ((jnp.array([90]),), (jnp.array([70]),), ())
    operands = operands_of(1, 128, 192, 1, 1, (64, 64), mask=lengths)
    behind = lambda array, length: array.at[:, length:].set(jnp.nan)  # noqa: E731
    padded = operands._replace(q=behind(operands.q, 90), k=behind(operands.k, 70), v=behind(operands.v, 70))
    residuals = xla.forward(spec, operands).residuals
    dout = jnp.asarray(np.random.default_rng(1).normal(size=(1, 128, 1, 64)), jnp.bfloat16)
    dlse = jnp.zeros((1, 1, 128), jnp.float32)
    interpret = plgpu.InterpretGPUParams()
    kernel = jax.jit(lambda *arrays: backward_pass.backward(spec, *arrays, config=BY_ROWS, interpret=interpret))
    run = lambda operands, dout: kernel(operands, residuals, Cotangents(dout, dlse))  # noqa: E731
    want, got = run(operands, dout), run(padded, behind(dout, 90))
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    poisoned = run(operands, dout.at[0, 80, 0, 5].set(jnp.nan))
    assert [int(jnp.isnan(x).any(-1).sum()) for x in (poisoned.q, poisoned.k, poisoned.v)] == [1, 70, 70]


def check_that_rows_nobody_reads_stay_hidden() -> None:
    """Keys behind the last query of a causal call, with a sink; and what a score_mod gives behind the last query."""

    def run(spec: AttentionSpec, operands: Operands, exact: Operands, config: Any) -> list[Any]:
        dout = operands.q
        cotangents = Cotangents(dout, jnp.zeros((1, 1, dout.shape[1])))
        residuals, interpret = xla.forward(spec, exact).residuals, plgpu.InterpretGPUParams()
        if config is None:
            return list(xla.backward(spec, exact, residuals, cotangents)[:3])
        return list(
            backward_pass.backward(spec, operands, residuals, cotangents, config=config, interpret=interpret)[:3]
        )

    spec = AttentionSpec(0.125, (CAUSAL,))
    operands = operands_of(1, 64, 100, 1, 1, (64, 64), mask=((),), sinks=jnp.array([0.5]))
    junk = operands._replace(k=operands.k.at[:, 64:].set(jnp.nan), v=operands.v.at[:, 64:].set(jnp.nan))
    for got, want in zip(*(run(spec, each, operands, BY_ROWS) for each in (junk, operands)), strict=True):
        np.testing.assert_array_equal(got, want)
    root = score_mod(lambda s, b, h, q, k: s * jnp.sqrt((100 - q).astype(jnp.float32)) / 10)
    spec, operands = AttentionSpec(0.125, score_mod=root["spec"]), operands_of(1, 100, 64, 1, 1, (64, 64))
    for got, want in zip(*(run(spec, operands, operands, config) for config in (BY_ROWS, None)), strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(want), atol=5e-2)


MORE_CHECKS = (
    check_that_a_wrong_mask_is_noticed,
    check_that_rows_nobody_reads_stay_hidden,
    check_that_padding_stays_hidden,
)


def checks() -> dict[str, Any]:
    return {name: (check, *case) for name, case in CASES.items()} | {f.__name__: (f,) for f in MORE_CHECKS}


def test_the_kernels_are_right_and_have_no_race():
    interpreting.assert_all_pass("tests.test_interpret_backward", len(CASES) + len(MORE_CHECKS))


if __name__ == "__main__":
    interpreting.main(checks())
