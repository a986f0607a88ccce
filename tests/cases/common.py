"""What the cases share: the implementations that run them, the dtype that each computes in, and how they are judged."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests import conftest, interpreted
from tests.conftest import CPU_IMPLEMENTATIONS, Call, Outputs

case = pytest.mark.case
also_interpreted = pytest.mark.also_interpreted
not_reference = pytest.mark.not_reference  # sizes of their own cost a second to compile, and are tiles' affair

KERNELS = ("sm90", "sm80")  # in bfloat16, on a GPU
# Of the budget, as in tests/test_gpu.py: the kernels' delta comes from the rounded output; and of what rounding alone
# fills: their exponentials are the hardware's.
KERNEL_FACTOR, KERNEL_SLACK = 3.0, 8.0


def implementations_of(test: Any) -> list[Any]:
    names: list[Any] = [name for name in CPU_IMPLEMENTATIONS if not test.get_closest_marker(f"not_{name}")]
    names += [pytest.param(name, marks=pytest.mark.gpu) for name in KERNELS]
    if test.get_closest_marker("also_interpreted"):
        names.append(pytest.param(interpreted.NAME, marks=pytest.mark.interpreted))
    return names


def dtype_of(implementation: str) -> Any:
    return np.float32 if on_cpu(implementation) else jnp.bfloat16


def inputs(implementation: str, seed: int = 0, **sizes: Any) -> Call:
    """Random q, k, v in a dtype that the implementation takes: [2, 5, 6, 8], [2, 7, 3, 8], [2, 7, 3, 6] by default.

    Most cases have these sizes: run operation by operation, a second call of one size compiles nothing."""
    return conftest.inputs(seed, **{"dtype": dtype_of(implementation)} | sizes)


def on_cpu(implementation: str) -> bool:
    return implementation in CPU_IMPLEMENTATIONS


def check(call: Call, implementation: str, *, seed: int = 0, jit: bool = False) -> Outputs:
    """Forward and backward for random cotangents, within the error budget of plain attention in the same dtype."""
    factor, slack = (2.0, 1.0) if on_cpu(implementation) else (KERNEL_FACTOR, KERNEL_SLACK)
    return conftest.check(call, implementation, seed=seed, jit=jit, factor=factor, slack=slack)


def evaluate(
    call: Call, implementation: str, dout: Any = None, dlse: Any = None, *, jit: bool = False, **extra: Any
) -> Outputs:
    """Forward, and with `dout` backward too, as NumPy arrays in float32."""
    outputs = conftest.evaluate(call, implementation, dout, dlse, jit=jit, **extra)
    to_float = lambda x: np.asarray(x).astype(np.float32)  # noqa: E731
    return Outputs(*map(to_float, outputs[:3]), {name: to_float(x) for name, x in outputs.gradients.items()})


def close(got: Any, want: Any, implementation: str, *, factor: float = 1.0) -> None:
    """Equal to rounding in the dtype that the implementation computes in."""
    tolerance = factor * (2e-5 if dtype_of(implementation) == np.float32 else 2e-2)
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=tolerance, atol=tolerance)


def same_gradients(got: Outputs, want: Outputs, implementation: str) -> None:
    """The same bits; but the kernels add up the gradient of a bias that heads share in any order."""
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        if name == "bias" and not on_cpu(implementation):
            np.testing.assert_allclose(got.gradients[name], gradient, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(got.gradients[name], gradient, err_msg=name)


def counting(implementation: str, q_len: int, kv_len: int, batch: int = 1, heads: tuple[int, int] = (1, 1)) -> Call:
    """Equal scores and values one-hot by key: the result is 1 / count on each key that a query reads."""
    dtype = dtype_of(implementation)
    q, k = np.zeros((batch, q_len, heads[0], 8), dtype), np.zeros((batch, kv_len, heads[1], 8), dtype)
    return {
        "q": q,
        "k": k,
        "v": np.broadcast_to(np.eye(kv_len)[:, None], (batch, kv_len, heads[1], kv_len)).astype(dtype),
    }


def keys_read(call: Call, implementation: str) -> np.ndarray:
    """Of a `counting` call, how many keys each query of head 0 reads, [B, T]; that all weigh the same is checked."""
    weights = evaluate(call, implementation).out[:, :, 0]
    number = (weights > 0).sum(-1)
    want = np.where(weights > 0, 1 / np.maximum(number, 1)[..., None], 0)
    np.testing.assert_allclose(weights, want, rtol=1e-6 if on_cpu(implementation) else 1e-2)
    return number
