"""What is kept between forward and backward, and how much memory both use: nothing of size T * S."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention, masks
from tests.conftest import CPU_IMPLEMENTATIONS, IMPLEMENTATIONS

SAVING = [name for name in IMPLEMENTATIONS if name != "reference"]
B, T, S, N, K, H, HV = 2, 83, 101, 4, 2, 8, 6

FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal window": {"is_causal": True, "local_window_size": (9, 0), "query_offset": 3},
    "bias": {"bias": jnp.zeros((1, N, 1, S))},
    "sinks": {"sinks": jnp.zeros(N), "scale": jnp.float32(0.3)},
    "mask": {"mask": jnp.ones((B, 1, 1, S), bool)},
    "lengths": {"query_seq_lengths": jnp.array([5, 83]), "key_value_seq_lengths": jnp.array([5, 83])},
    "segments": {"segment_ids": (jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32))},
    "offset": {"query_offset": jnp.array([1, 2]), "is_causal": True},
    "prefix, chunks, predicate": {
        "mask": masks.prefix_lm(jnp.array([3, 4])) & masks.chunked(16) & masks.predicate(lambda b, h, i, j: i != j)
    },
    "score_mod and soft cap": {"score_mod": lambda s, b, h, i, j: s * jnp.exp(-0.1 * h), "logits_soft_cap": 5.0},
    "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.PRNGKey(0)},
}  # fmt: skip

TENSORS = {
    "query": jnp.zeros((B, T, N, H), jnp.bfloat16),
    "key": jnp.zeros((B, S, K, H), jnp.bfloat16),
    "value": jnp.zeros((B, S, K, HV), jnp.bfloat16),
}


def saved(function: Any, arguments: Any) -> list[jax.ShapeDtypeStruct]:
    """The arrays that the pullback of `function` holds on to."""
    return jax.tree.leaves(jax.eval_shape(lambda arguments: jax.vjp(function, arguments)[1], arguments))


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Array arguments and static ones."""
    has_arrays = lambda value: any(hasattr(x, "dtype") for x in jax.tree.leaves(value)) and not callable(value)  # noqa: E731
    arrays = {name: value for name, value in options.items() if has_arrays(value)}
    return arrays, {name: value for name, value in options.items() if name not in arrays}


def describe(arrays: Any) -> Counter[str]:
    return Counter(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(arrays))


def unexpected(leaves: list[Any], arguments: dict[str, Any]) -> dict[str, int]:
    """Float arrays that are neither operands nor O, m, l, and anything as large as the scores."""
    tensors = [jax.tree.leaves(arguments), jnp.zeros((B, T, N, HV), jnp.bfloat16), *[jnp.zeros((B, N, T))] * 2]
    allowed = describe(tensors)
    floats = describe([x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)])
    large = describe([x for x in leaves if x.size >= T * S])
    return dict(floats - allowed) | dict(large - allowed)


@pytest.mark.case("J05")
@pytest.mark.parametrize("saving", SAVING)
@pytest.mark.parametrize("feature", FEATURES)
def test_only_operands_and_o_m_l_are_kept(saving: str, feature: str) -> None:
    arrays, static = split(FEATURES[feature])
    arguments = TENSORS | arrays
    attend = lambda a: flash_attention(**a, **static, return_residual=True, implementation=saving)  # noqa: E731
    for function in (attend, jax.jit(attend)):
        leaves = saved(function, arguments)
        assert unexpected(leaves, arguments) == {}
        kept = describe([x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)])
        assert kept[f"float32[{B}, {N}, {T}]"] == 2  # m and l
        assert kept[f"bfloat16[{B}, {T}, {N}, {HV}]"] == 1  # O


def test_the_reference_keeps_the_scores() -> None:
    """The companion: what the test above looks for is there in standard attention."""
    attend = lambda a: flash_attention(**a, implementation="reference")  # noqa: E731
    assert unexpected(saved(attend, TENSORS), TENSORS)


def temp_bytes(implementation: str, length: int, *, backward: bool, **options: Any) -> int:
    shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, implementation=implementation, **options)

    def both(q: Any, k: Any, v: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1](q)

    compiled = jax.jit(both if backward else attend).lower(shape, shape, shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.usefixtures("fully_optimised")
@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_xla_is_linear(backward: bool) -> None:
    """Temp memory at T = 1k, 2k, 4k, 8k lies on a line; at 8k it is under 1/20 of standard attention's."""
    lengths = (1024, 2048, 4096, 8192)
    used = [temp_bytes("xla", length, backward=backward, is_causal=True) for length in lengths]
    for shorter, longer in itertools.pairwise(used):
        assert longer <= 2.1 * shorter, used
    assert used[3] - used[2] <= 2.2 * (used[2] - used[1]) + 2**16, used
    standard = temp_bytes("reference", 8192, backward=backward, is_causal=True)
    assert used[3] * 20 < standard
    quadratic = [temp_bytes("reference", length, backward=backward) for length in (1024, 2048)]
    assert quadratic[1] > 3 * quadratic[0]  # the companion


@pytest.mark.case("J02", "J03")
@pytest.mark.usefixtures("fully_optimised")
def test_operands_that_broadcast_are_not_materialised() -> None:
    """A bias [T, S], a mask [B, S] and segment ids: no buffer is as large as the scores, nor half (J02, J03)."""
    batch, length, heads = 8, 1024, 4
    scores = 4 * batch * heads * length**2
    x = jax.ShapeDtypeStruct((batch, length, heads, 8), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 1, length, length), jnp.float32)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    mask = jax.ShapeDtypeStruct((batch, 1, 1, length), jnp.bool_)

    def both(q: Any, k: Any, v: Any, bias: Any, ids: Any, mask: Any) -> Any:
        attend = lambda q, bias: flash_attention(  # noqa: E731
            q, k, v, bias=bias, segment_ids=ids, mask=mask, implementation="xla"
        )
        return jax.vjp(attend, q, bias)[1](q)

    compiled = jax.jit(both).lower(x, x, x, bias, ids, mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 2


def test_every_cpu_implementation_is_covered() -> None:
    assert set(CPU_IMPLEMENTATIONS) == {"reference", "xla"}
    assert np.prod((T, S)) > max(x.size for x in TENSORS.values()) / 2
