"""The portable kernels' own bodies in Pallas' GPU interpreter, against the reference and gradients in float32.

test_interpret.py says what that can see, and why the cases run in a process of their own. It does not see the
instructions that `sm80/instructions.py` stands in for: ldmatrix, mma.sync and cp.async.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks, reference, xla
from pallas_flash.kernels import sm80
from pallas_flash.kernels.sm80 import backward_pass
from pallas_flash.kernels.sm80.backward_pass import Configs
from pallas_flash.kernels.sm80.config import ForwardConfig, KeysConfig, QueriesConfig
from pallas_flash.spec import AttentionSpec, Cotangents, Gradients, Operands
from tests import interpreting, test_interpret, test_interpret_backward
from tests.test_interpret import CAUSAL, operands_of, races_found
from tests.test_interpret_backward import TOLERANCE, errors, in_float32

SMALL = ForwardConfig(block_q=64)
LARGE = ForwardConfig(num_stages=2, rescale_threshold=4.0)
HELD = ForwardConfig(block_q=64, num_stages=3, q_in_registers=True)
PAIR = KeysConfig(part_q=32, fused=True, warpgroups=2)

# Of the cases of the Hopper kernels, those that reach a path of their own here.
FORWARD = {
    "causal, grouped heads": LARGE,
    "window, dead rows, a sink of -inf": HELD,
    "everything": LARGE,
}
BACKWARD = {
    "causal, grouped heads, 128": Configs(QueriesConfig(), KeysConfig(part_q=32, fused=True)),
    "soft cap, sinks, float16, persistent, cut-off keys and queries": Configs(
        QueriesConfig(), KeysConfig(block_kv=128, part_q=32, fused=True)
    ),
    "traced scale < 0 and offsets, prefix, chunks, lengths": Configs(
        QueriesConfig(), KeysConfig(block_q=128, part_q=64, num_stages=1, fused=True)
    ),
    "shared keys: score_mod, soft cap, segments, dropout": Configs(QueriesConfig(), PAIR),
    "shared keys: causal, grouped heads": Configs(QueriesConfig(), dataclasses.replace(PAIR, num_stages=1)),
    "two kernels: window, dead rows, traced scale, a bias of queries": Configs(
        QueriesConfig(block_q=128, block_kv=32, num_stages=1), KeysConfig(block_kv=128, block_q=32)
    ),
    "two kernels: shared keys, cut-off keys, a bias that heads share": Configs(
        QueriesConfig(block_kv=32), KeysConfig(num_stages=1, apart=True)
    ),
}


def check_forward(spec: AttentionSpec, operands: Operands, config: ForwardConfig) -> None:
    operands = operands._replace(mask=operands.mask or ((),) * len(spec.mask))
    assert sm80.unsupported(spec, operands) is None
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    kernel = jax.jit(lambda operands: sm80.forward(spec, operands, config=config, interpret=interpret))
    got, got_max = jax.block_until_ready(kernel(operands))
    assert not races_found()
    want, want_max = test_interpret.in_float32(spec, operands)
    alive = np.isfinite(np.asarray(want.m))
    assert np.linalg.norm(got.out.astype(np.float32) - want.out) < 3e-3 * np.linalg.norm(want.out)
    np.testing.assert_array_equal(np.isfinite(got.m), alive)
    np.testing.assert_allclose(np.where(alive, got.m, 0), np.where(alive, want.m, 0), rtol=1e-6, atol=2e-5)
    if spec.return_max_logit:
        np.testing.assert_allclose(got_max, want_max, atol=2e-5)
    np.testing.assert_allclose(got.l, want.l, rtol=1e-4)
    assert np.all(np.asarray(got.out).swapaxes(1, 2)[~alive] == 0)


def both(spec: AttentionSpec, operands: Operands, configs: Configs) -> tuple[Gradients, Gradients]:
    """The kernels' gradients, and those in float32."""
    operands = operands._replace(mask=operands.mask or ((),) * len(spec.mask))
    residuals, cotangents, want = in_float32(spec, operands)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    kernel = jax.jit(lambda *arrays: backward_pass.backward(spec, *arrays, configs=configs, interpret=interpret))
    got = jax.block_until_ready(kernel(operands, residuals, cotangents))
    assert not races_found()
    return got, want


def check_backward(spec: AttentionSpec, operands: Operands, configs: Configs) -> None:
    found = errors(*both(spec, operands, configs))
    assert max(found.values()) < TOLERANCE, found


def check_that_warpgroups_may_share_keys() -> None:
    """With queries that do not fill the last one's tile, and keys that do not fill a block."""
    for head_dims, stages in (((64, 32), 2), ((64, 64), 1)):
        config = ForwardConfig(block_q=64, block_kv=32, num_stages=stages, warpgroups=2)
        check_forward(AttentionSpec(0.125), operands_of(1, 180, 140, 2, 1, head_dims), config)


def check_that_hidden_junk_stays_hidden() -> None:
    """NaN and Inf in rows of v: a query that may read one becomes NaN, all others are as without."""
    clean = operands_of(1, 192, 192, 2, 1, (64, 64), mask=((),))
    spec = AttentionSpec(0.125, (masks.Band(30, 0),))
    junk = clean.v.at[:, 5, :, 3].set(jnp.nan).at[:, 100, :, 60].set(-jnp.inf)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    config = ForwardConfig(block_kv=96)
    run = jax.jit(lambda v: sm80.forward(spec, clean._replace(v=v), config=config, interpret=interpret).residuals)
    want, got = run(clean.v), run(junk)
    position = np.arange(192)
    reads = np.any([(position >= row) & (position <= row + 30) for row in (5, 100)], axis=0)
    np.testing.assert_array_equal(got.out[:, ~reads], want.out[:, ~reads])
    assert np.isnan(got.out.astype(np.float32))[:, reads].all()
    np.testing.assert_array_equal(got.l, want.l)


def check_that_hidden_rows_reach_no_gradient() -> None:
    """NaN in queries, keys, values and cotangents of padding."""
    lengths = (jnp.array([50]),), (jnp.array([40]),)
    spec = AttentionSpec(0.125, (masks.QueryLengths(), CAUSAL, masks.KeyValueLengths()))
    clean = operands_of(1, 64, 64, 1, 1, (64, 64), mask=(lengths[0], (), lengths[1]))
    configs = Configs(QueriesConfig(), KeysConfig(fused=True))
    residuals = xla.forward(spec, clean).residuals
    dlse = jnp.zeros(residuals.m.shape, jnp.float32)
    interpret = plgpu.InterpretGPUParams()
    kernel = jax.jit(lambda *arrays: backward_pass.backward(spec, *arrays, configs=configs, interpret=interpret))

    def gradients(value: float) -> Gradients:
        pad = lambda x, length: x.at[:, length:].set(value)  # noqa: E731
        dirty = clean._replace(q=pad(clean.q, 50), k=pad(clean.k, 40), v=pad(clean.v, 40))
        cotangents = Cotangents(pad(jnp.ones_like(residuals.out), 50), dlse)
        return kernel(dirty, residuals, cotangents)

    for want, got in zip(gradients(0.0)[:3], gradients(jnp.nan)[:3], strict=True):
        np.testing.assert_array_equal(want, got)


def check_that_a_wrong_mask_is_noticed() -> None:
    """The comparisons are no formality: a band that is one key too wide fails them."""
    wide, operands = AttentionSpec(0.125, (masks.Band(None, 1),)), operands_of(1, 64, 64, 1, 1, (64, 64), mask=((),))
    got = sm80.forward(wide, operands, config=SMALL, interpret=plgpu.InterpretGPUParams()).residuals
    causal = AttentionSpec(0.125, (CAUSAL,))
    want = reference.forward(causal, operands).residuals
    assert float(jnp.abs(got.out - want.out).max()) > 0.1
    configs = Configs(QueriesConfig(), KeysConfig())
    found = errors(both(wide, operands, configs)[0], both(causal, operands, configs)[1])
    assert min(found[x] for x in ("q", "k", "v")) > 10 * TOLERANCE


MORE_CHECKS = (
    check_that_warpgroups_may_share_keys,
    check_that_hidden_junk_stays_hidden,
    check_that_hidden_rows_reach_no_gradient,
    check_that_a_wrong_mask_is_noticed,
)


def checks() -> dict[str, Any]:
    forward = {name: (check_forward, *test_interpret.CASES[name][:2], config) for name, config in FORWARD.items()}
    backward = {
        f"backward: {name}": (check_backward, *test_interpret_backward.CASES[name][:2], configs)
        for name, configs in BACKWARD.items()
    }
    return forward | backward | {f.__name__: (f,) for f in MORE_CHECKS}


def test_the_kernels_are_right_and_have_no_race():
    interpreting.assert_all_pass("tests.test_interpret_sm80", len(FORWARD) + len(BACKWARD) + len(MORE_CHECKS))


if __name__ == "__main__":
    interpreting.main(checks())
