"""What the tests of the operator share: the list of implementations, and one way to run a call and judge it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles

# A test that takes `implementation` runs once with each of these.
CPU_IMPLEMENTATIONS = ("reference", "xla")
GPU_IMPLEMENTATIONS: tuple[str, ...] = ()
IMPLEMENTATIONS = (
    *CPU_IMPLEMENTATIONS,
    *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_IMPLEMENTATIONS),
)

jax.config.update("jax_num_cpu_devices", 8)  # for shard_map; must be set before the first array is made

# The tests compile far longer than they compute: the compiler takes its time only where `fully_optimised` asks for it.
QUICK_COMPILE = "jax_disable_most_optimizations"
jax.config.update(QUICK_COMPILE, True)


@pytest.fixture
def fully_optimised() -> Iterator[None]:
    """Compile as users do."""
    jax.config.update(QUICK_COMPILE, False)
    yield
    jax.config.update(QUICK_COMPILE, True)


hypothesis.settings.register_profile(
    "operator",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("operator")

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "scale")

# The oracle's name of an argument: the operator's.
NAMES = {
    "bias": "bias",
    "scale": "scale",
    "is_causal": "is_causal",
    "q_lengths": "query_seq_lengths",
    "kv_lengths": "key_value_seq_lengths",
    "window": "local_window_size",
    "query_offset": "query_offset",
    "segment_ids": "segment_ids",
    "soft_cap": "logits_soft_cap",
    "sinks": "sinks",
    "rate": "dropout_rate",
}

Call = dict[str, Any]  # fields of oracles.Arguments


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        from tests.cases.common import implementations_of

        in_cases = "cases" in metafunc.definition.path.parts
        metafunc.parametrize("implementation", implementations_of(metafunc.definition) if in_cases else IMPLEMENTATIONS)


LONGEST = (
    "test_the_kernels_are_right_and_have_no_race",
    "test_two_processes_stop_together_and_go_on",
    "test_ranges_are_sound",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, lest one worker be alone with them at the end."""
    items.sort(key=lambda item: getattr(item, "originalname", None) not in LONGEST)


class Outputs(NamedTuple):
    """What a call returns, and its gradients by every floating argument under the oracle's names."""

    out: Any
    lse: Any
    max_logit: Any
    gradients: dict[str, Any]


def keywords(call: Call) -> dict[str, Any]:
    """The operator's keyword arguments for a call in the oracle's names (q, k, v and keep aside)."""
    from pallas_flash import masks

    result = {NAMES[name]: value for name, value in call.items() if name in NAMES and value is not None}
    parts = [
        make(call[name])
        for name, make in (("prefix", masks.prefix_lm), ("chunk", masks.chunked), ("predicate", masks.predicate))
        if call.get(name) is not None
    ]
    mask = call.get("mask")
    for part in parts:
        assert mask is None or isinstance(mask, masks.Mask)
        mask = part if mask is None else mask & part
    if mask is not None:
        result["mask"] = mask
    if call.get("score_mod") is not None:
        result["score_mod"] = call["score_mod"][0]
    return result


def attend(call: Call, implementation: str, **extra: Any) -> Any:
    """The operator on a call in the oracle's names."""
    from pallas_flash import flash_attention

    arguments = keywords(call) | extra
    return flash_attention(call["q"], call["k"], call["v"], implementation=implementation, **arguments)


def op_by_op(implementation: str) -> contextlib.AbstractContextManager[None]:
    """Run a CPU implementation operation by operation: hundreds of calls of one shape then compile next to nothing."""
    return jax.disable_jit() if implementation in CPU_IMPLEMENTATIONS else contextlib.nullcontext()


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | jax.Array)


def evaluate(
    call: Call, implementation: str, dout: Any = None, dlse: Any = None, *, jit: bool = True, **extra: Any
) -> Outputs:
    """Run forward and backward; arrays are traced, all else is static. Without dout there are no gradients."""
    call = {name: value for name, value in call.items() if name != "keep"}
    arrays = {name: value for name, value in call.items() if is_array(value)}
    tuples = {name: value for name, value in call.items() if isinstance(value, tuple) and is_array(value[0])}
    static = {name: value for name, value in call.items() if name not in arrays | tuples}
    floats = {name: arrays.pop(name) for name in DIFFERENTIABLE if name in arrays}

    def run(floats: Call, others: Call, cotangents: Any) -> Any:
        def forward(floats: Call) -> Any:
            options = {"return_residual": True, "return_max_logit": True} | extra
            out, lse, max_logit = attend(static | others | floats, implementation, **options)
            return (out, lse), max_logit

        if cotangents is None:
            return forward(floats), {}
        primals, pullback, max_logit = jax.vjp(forward, floats, has_aux=True)
        return (primals, max_logit), pullback(cotangents)[0]

    cotangents = None
    if dout is not None:
        dlse = np.zeros(dout.shape[:-1], np.float32) if dlse is None else dlse
        cotangents = (jnp.asarray(dout), jnp.asarray(dlse))
    floats = jax.tree.map(jnp.asarray, floats)
    if jit:
        results = jax.jit(run)(floats, arrays | tuples, cotangents)
    else:
        with op_by_op(implementation):
            results = run(floats, jax.tree.map(jnp.asarray, arrays | tuples), cotangents)
    ((out, lse), max_logit), gradients = results
    return Outputs(out, lse, max_logit, gradients)


def judge(
    outputs: Outputs, call: Call, dout: Any = None, dlse: Any = None, *, factor: float = 2.0, slack: float = 1.0
) -> None:
    """Assert that everything in `outputs` is within the error budget of plain attention in the dtype of q, k, v, and
    has the dtype it should have. slack: how much wider than usual the part of the budget is that rounding alone fills.
    """
    dtype = np.dtype(call["q"].dtype)
    want, plain = (oracles.attention(**call, arithmetic=a) for a in (oracles.FLOAT64, oracles.plain(dtype)))
    magnitudes = oracles.rounding_magnitudes(**call, dout=dout, dlse=dlse)
    finite_lse = np.where(np.isfinite(want.lse), np.abs(want.lse), 0)
    magnitudes |= {"lse": 1 + finite_lse, "max_logit": 1 + finite_lse.max(1, initial=0)}
    largest = 1 + finite_lse.max(initial=0)

    def compare(name: str, got: Any, want: Any, plain: Any, of: Any) -> None:
        assert got.dtype == of, f"{name} has dtype {got.dtype}"
        (computed, stored), (_, stored_result) = map(oracles.rounding_units, (dtype, of))
        floor = 4 * computed * largest
        if name not in ("lse", "max_logit"):
            floor += max(stored, stored_result) / 4
        oracles.assert_within_budget(got, want, plain, factor=factor, floor=slack * floor * magnitudes[name], name=name)

    statistics_dtype = oracles.plain(dtype).compute
    compare("out", outputs.out, want.out, plain.out, dtype)
    compare("lse", outputs.lse, want.lse, plain.lse, statistics_dtype)
    if outputs.max_logit is not None:
        compare("max_logit", outputs.max_logit, want.max_logit, plain.max_logit, statistics_dtype)
    if outputs.gradients:
        exact, rough = (
            oracles.gradients(**call, dout=dout, dlse=dlse, arithmetic=a)
            for a in (oracles.FLOAT64, oracles.plain(dtype))
        )
        assert set(outputs.gradients) >= {"q", "k", "v"}
        for name, gradient in outputs.gradients.items():
            compare(f"{name}", gradient, exact[name], rough[name], call[name].dtype)


def check(
    call: Call, implementation: str, *, seed: int = 0, jit: bool = True, factor: float = 2.0, slack: float = 1.0
) -> Outputs:
    """Run the call forward and backward with random cotangents of out and lse, and judge the results."""
    dout, dlse = cotangents_of(call, seed)
    extra = {"dropout_key": jax.random.key(KEY_SEED)} if call.get("rate") else {}
    outputs = evaluate(call, implementation, dout, dlse, jit=jit, **extra)
    judge(outputs, call, dout, dlse, factor=factor, slack=slack)
    return outputs


KEY_SEED = 7


def cotangents_of(call: Call, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng([seed, 1])
    shape = (*call["q"].shape[:3], call["v"].shape[-1])
    dout = rng.normal(size=shape).astype(call["q"].dtype)
    return dout, rng.normal(size=shape[:3]).astype(oracles.plain(call["q"].dtype).compute)


def dropout_keep(shape: tuple[int, ...], rate: float, query_offset: Any = 0, implementation: str = "reference") -> Any:
    """The keep mask [B, N, T, S] of a call with KEY_SEED, recovered with uniform weights and v = identity."""
    from pallas_flash import flash_attention

    batch, num_heads, q_len, kv_len = shape
    q = jnp.zeros((batch, q_len, num_heads, 1))
    k = jnp.zeros((batch, kv_len, 1, 1))
    v = jnp.broadcast_to(jnp.eye(kv_len)[:, None], (batch, kv_len, 1, kv_len))
    key = jax.random.key(KEY_SEED)
    options = {"dropout_rate": rate, "dropout_key": key, "query_offset": query_offset}
    out = flash_attention(q, k, v, **options, implementation=implementation)
    return np.asarray(out).transpose(0, 2, 1, 3) > 0


def inputs(
    seed: int = 0,
    *,
    batch: int = 2,
    q_len: int = 5,
    kv_len: int = 7,
    heads: tuple[int, int] = (6, 3),
    dims: tuple[int, int] = (8, 6),
    dtype: Any = np.float32,
) -> Call:
    """Random q, k, v, in sizes that are all different unless told otherwise."""
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (batch, q_len, heads[0], dims[0]),
        "k": (batch, kv_len, heads[1], dims[0]),
        "v": (batch, kv_len, heads[1], dims[1]),
    }
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


@contextlib.contextmanager
def small_tiles(size: int = 16) -> Iterator[None]:
    """Let `xla` cut the scores into tiles of this size, so that small calls have many of them."""
    from pallas_flash import xla

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "MIN_BLOCK", size)
        patch.setattr(xla, "MAX_BLOCK", size)
        jax.clear_caches()
        yield
    jax.clear_caches()
