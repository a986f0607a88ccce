"""What using the package costs beside computing: importing it, and compiling again."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention, flash_decode, masks
from tests.conftest import inputs

ROOT = Path(__file__).parent.parent
IMPORT_SECONDS = 0.2
ATTEMPTS = 3  # a busy machine makes one slow


def import_seconds(statement: str) -> float:
    """Processor time of an import in a fresh interpreter that has JAX already."""
    clock = "time.process_time()"
    program = f"import time, jax, jax.numpy; start = {clock}; {statement}; print({clock} - start)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    return float(run.stdout)


def test_importing_takes_little_beside_jax() -> None:
    attempts = (import_seconds("import pallas_flash") for _ in range(ATTEMPTS))
    assert any(seconds < IMPORT_SECONDS for seconds in attempts)


def test_a_slow_import_is_noticed() -> None:
    """The companion: were the package to import Flax and Pallas, it would take longer than is allowed anywhere."""
    assert import_seconds("import pallas_flash.flax, jax.experimental.pallas.mosaic_gpu") > IMPORT_SECONDS


def compilations(caplog: pytest.LogCaptureFixture, function: Callable[[], Any]) -> int:
    """How many programs XLA compiles while `function` runs."""
    caplog.clear()
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        function()
    return sum(record.message.startswith("Finished XLA compilation") for record in caplog.records)


def arrays(seed: int) -> dict[str, Any]:
    """Every array argument, with values by the seed."""
    rng = np.random.default_rng(seed)
    call = {name: jnp.asarray(x) for name, x in inputs(seed).items()}
    slopes = jnp.asarray(rng.normal(size=6), jnp.float32)
    return {
        "query": call["q"], "key": call["k"], "value": call["v"],
        "bias": jnp.asarray(rng.normal(size=(5, 7)), jnp.float32), "scale": jnp.float32(rng.random()),
        "sinks": jnp.asarray(rng.normal(size=6), jnp.float32), "query_offset": jnp.asarray(rng.integers(0, 3, 2)),
        "query_seq_lengths": jnp.asarray(rng.integers(0, 6, 2)), "dropout_key": jax.random.key(seed),
        "key_value_seq_lengths": jnp.asarray(rng.integers(0, 8, 2)),
        "segment_ids": tuple(jnp.asarray(rng.integers(0, 2, (2, n))) for n in (5, 7)),
        "mask": masks.prefix_lm(jnp.asarray(rng.integers(0, 7, 2))) & masks.predicate(lambda b, h, i, j: slopes[h] < 2),
        "score_mod": lambda s, b, h, i, j: s * slopes[h],
    }  # fmt: skip


def test_other_values_compile_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Called without jit, with functions written anew each time; and in a jitted step with its gradient."""
    options: Any = {"dropout_rate": 0.2, "is_causal": True, "return_residual": True, "implementation": "xla"}

    def eager(seed: int) -> None:
        flash_attention(**arrays(seed), **options)

    @jax.jit
    def gradient(arguments: Any) -> Any:
        loss = lambda q: flash_attention(**arguments | {"query": q}, **options)[0].sum()  # noqa: E731
        return jax.grad(loss)(arguments["query"])

    def step(seed: int) -> None:
        gradient({name: value for name, value in arrays(seed).items() if name != "score_mod"})

    for call in (eager, step):
        assert compilations(caplog, lambda call=call: call(0)) > 0
        assert compilations(caplog, lambda call=call: [call(1), call(2)]) == 0
    assert compilations(caplog, lambda: flash_attention(**arrays(0), **options | {"dropout_rate": 0.3})) > 0


@jax.custom_jvp
def steep(x: Any) -> Any:
    return x * 2.0


steep.defjvp(lambda primals, tangents: (steep(*primals), tangents[0] * 7.0))


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return x * 2.0


doubled.defvjp(lambda x: (doubled(x), None), lambda _, cotangent: (cotangent * 5.0,))


def attend_with(table: jax.Array) -> None:
    q, k, v = (jnp.asarray(x, jnp.float32) for x in inputs(0).values())
    mask = masks.predicate(lambda b, h, i, j: table[h] + j > i)
    options: Any = {"mask": mask, "score_mod": lambda s, b, h, i, j: s * table[h], "implementation": "xla"}
    jax.grad(lambda q: flash_attention(q, k, v, **options).sum())(q)


def decode_with(table: jax.Array) -> None:
    q, k, v = (jnp.asarray(x, jnp.float32) for x in inputs(0).values())
    flash_decode(q, k, v, jnp.int32(6), score_mod=lambda s, b, h, i, j: s * table[h])


@pytest.mark.parametrize("call", [attend_with, decode_with])
def test_captured_arrays_are_let_go(call: Callable[[Any], None]) -> None:
    """Programs are kept for the next call, the arrays of this one are not."""
    table = jnp.arange(1.0, 7.0)
    captured = weakref.ref(table)
    call(table)
    del table
    gc.collect()
    assert captured() is None


@pytest.mark.parametrize("call", [attend_with, decode_with])
def test_no_tracer_leaks(call: Callable[[Any], None]) -> None:
    jax.clear_caches()
    with jax.checking_leaks():
        jax.jit(call)(jnp.arange(1.0, 7.0))


WITH_DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu, "log_sigmoid": jax.nn.log_sigmoid, "custom_jvp": steep, "custom_vjp": doubled,
}  # fmt: skip  # log_sigmoid has logaddexp inside softplus inside


def gradient_with(function: Callable[[Any], Any]) -> Any:
    """By a score_mod and a mask that are written anew."""
    q, k, v = (jnp.asarray(x, jnp.float32) for x in inputs(0).values())
    mask = masks.predicate(lambda b, h, i, j: function(i - j + 2.0) > 0)
    mod = lambda s, b, h, i, j: function(s) + j  # noqa: E731
    loss = lambda q: flash_attention(q, k, v, mask=mask, score_mod=mod, implementation="xla").sum()  # noqa: E731
    return jax.grad(loss)(q)


@pytest.mark.parametrize("name", WITH_DERIVATIVES)
def test_functions_with_their_own_derivative_compile_once(caplog: pytest.LogCaptureFixture, name: str) -> None:
    gradient_with(WITH_DERIVATIVES[name])
    assert compilations(caplog, lambda: gradient_with(WITH_DERIVATIVES[name])) == 0


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_other_derivatives_of_equal_functions_are_other_programs(kind: str) -> None:
    """Also where both rules come from the same line."""

    def scaled(factor: float) -> Any:
        if kind == "custom_jvp":
            function = jax.custom_jvp(lambda x: x * 2.0)
            function.defjvp(lambda primals, tangents: (primals[0] * 2.0, tangents[0] * factor))
        else:
            function = jax.custom_vjp(lambda x: x * 2.0)
            function.defvjp(lambda x: (x * 2.0, None), lambda _, cotangent: (cotangent * factor,))
        return gradient_with(function)

    np.testing.assert_allclose(scaled(7.0), scaled(1.0) * 7.0, rtol=1e-5)
