"""vmap of one argument alone: the gradients of all others are the sums over the instances."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention
from tests.cases.common import case, close, dtype_of, inputs, not_reference
from tests.conftest import op_by_op

NAMES = ("value", "sinks", "dropout_key")  # what the output depends on, and lse or the largest logit does not


def instances(implementation: str) -> dict[str, Any]:
    """The array arguments, twice."""
    pairs = [inputs(implementation, seed) for seed in (0, 1)]
    arrays = {name: np.stack([pair[name[0]] for pair in pairs]) for name in ("query", "key", "value")}
    arrays["sinks"] = np.random.default_rng(0).normal(size=(2, 6)).astype(dtype_of(implementation))
    return {name: jnp.asarray(x) for name, x in arrays.items()} | {
        "dropout_key": jax.random.split(jax.random.key(0), 2)
    }


@case("G01", "G15")
@not_reference
@pytest.mark.parametrize("mapped", NAMES)
def test_one_argument_is_mapped(implementation: str, mapped: str) -> None:
    """A loss on the output, on lse and on the largest logit, whose cotangents must not count once an instance."""
    arrays = instances(implementation)
    arguments = {name: x if name == mapped else x[0] for name, x in arrays.items()}
    axes = {name: 0 if name == mapped else None for name in arrays}
    floats = [n for n in arrays if jnp.issubdtype(arrays[n].dtype, jnp.floating)]
    fixed = {name: x for name, x in arguments.items() if name not in floats}
    options: Any = {"dropout_rate": 0.3, "return_residual": True, "return_max_logit": True}

    def one(arguments: Any) -> Any:
        out, lse, largest = flash_attention(**arguments, **options, implementation=implementation)
        return (
            jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -9, lse, 0) ** 2) + jnp.sum(jnp.where(largest > -9, 1, 0))
        )

    def loop(chosen: Any) -> Any:
        whole = fixed | chosen
        rows = [whole | {mapped: whole[mapped][i]} for i in range(2)]
        return sum(one(row) for row in rows)

    together = lambda chosen: jax.vmap(one, (axes,))(fixed | chosen).sum()  # noqa: E731
    chosen = {name: arguments[name] for name in floats}
    with op_by_op(implementation):
        got, want = (jax.grad(function)(chosen) for function in (together, loop))
    for name in floats:
        close(got[name], want[name], implementation, factor=10)
    assert np.abs(np.float32(want["query"])).max() > 1e-2
