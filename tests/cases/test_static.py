"""What holds before anything is computed: the choice of an implementation, its reasons, signature and packaging."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import empty_cache
from models.config import TransformerConfig
from pallas_flash import Cache, append_to_cache, dispatch, explain, flash_attention
from pallas_flash.kernels import sm90
from pallas_flash.validation import Arguments, canonicalise
from tests.cases.common import case

ROOT = Path(__file__).parent.parent.parent
X = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)
# Known GPUs and one that is not: capability, and the generation of kernels that is made for it alone.
CAPABILITIES = {
    "none": None, "T4": (7, 5), "A100": (8, 0), "RTX 4090": (8, 9), "H100": (9, 0), "B200": (10, 0),
    "RTX PRO 6000": (12, 0), "unknown": (13, 0),
}  # fmt: skip


def chosen(capability: tuple[int, int] | None, **arguments: Any) -> dispatch.Explanation:
    call = canonicalise(Arguments(**{"query": X, "key": X, "value": X} | arguments))
    return dispatch.explain(call.spec, call.operands, capability)


@case("K02", "K04")
@pytest.mark.parametrize("device", CAPABILITIES)
def test_every_device_has_an_implementation(device: str) -> None:
    """A pure function of the capability: Hopper has sm90; what has no kernel of its own still has something."""
    capability = CAPABILITIES[device]
    explanation = chosen(capability)
    assert (explanation.chosen == "sm90") == (capability == (9, 0))
    assert explanation.chosen in dispatch.names()
    assert chosen(capability, query=X.astype(np.float32), key=X.astype(np.float32), value=X.astype(np.float32)).chosen
    assert all(verdict.reason for verdict in explanation.verdicts)


@case("G11")
@pytest.mark.parametrize("device", ["none", "A100", "H100", "unknown"])
def test_the_gradient_traces_for_every_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No branch of the dispatch differentiates a kernel or needs the device at hand."""
    monkeypatch.setattr(dispatch, "compute_capability", lambda: CAPABILITIES[device])

    def loss(q: Any, bias: Any) -> Any:
        plain = flash_attention(q, X, X, is_causal=True)
        two_kernels = flash_attention(q, X, X, bias, deterministic=True)
        return (plain + two_kernels).astype(jnp.float32).sum()

    assert jax.eval_shape(jax.grad(loss), X, jnp.zeros((64, 64))).shape == X.shape


@case("K04", "K05", "E05")
def test_reasons_name_the_feature() -> None:
    """Per implementation, the one thing that ruled it out; an explicit name is refused with it."""
    wide = jnp.zeros((1, 64, 2, 320), jnp.bfloat16)
    reasons = {v.name: v.reason for v in chosen((9, 0), query=wide, key=wide, value=wide).verdicts}
    assert "320" in reasons["sm90"] and "256" in reasons["sm90"]
    with pytest.raises(NotImplementedError, match="'sm90' cannot compute this call: head dims 320"):
        flash_attention(wide, wide, wide, implementation="sm90")
    with pytest.raises(NotImplementedError, match="float32"):
        flash_attention(*[X.astype(np.float32)] * 3, implementation="sm90")
    with pytest.raises(NotImplementedError, match="'sm90' runs on NVIDIA GPUs only"):
        flash_attention(X, X, X, implementation="sm90")
    assert "needs an NVIDIA GPU of compute capability >= 9.0" in str(explain(X, X, X))


@case("E05")
def test_tiles_are_a_function_of_dtype_and_head_dims() -> None:
    """What the tables give fits into a Hopper CTA's shared memory; what does not fit is refused, never tried."""
    for head_dim in (16, 64, 72, 128, 192, 256):
        x = jnp.zeros((1, 64, 2, head_dim), jnp.bfloat16)
        call = canonicalise(Arguments(x, x, x, is_causal=True))
        config = sm90.forward_config(call.spec, call.operands)
        assert config is not None and sm90.forward_fits(config, call.spec, call.operands)
    for size in (99 * 1024, 163 * 1024):
        assert config.shared_bytes(256, 256, 2, hides_values=True) > size  # another GPU's memory needs other tiles


@case("K13", "K11")
def test_nothing_that_is_passed_is_a_hint() -> None:
    """No largest length, no number of splits: what a caller says of sizes cannot be wrong."""
    names = inspect.signature(flash_attention).parameters
    assert not [name for name in names if ("max" in name and name != "return_max_logit") or "split" in name]


@case("K08")
def test_the_range_of_jax_holds_what_is_tested() -> None:
    """The lowest version is that of `make test-oldest`; the tested one lies within."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = [line for line in project["dependencies"] if line.startswith("jax")]
    low, high = (bound.lstrip("<>=") for bound in requirement.removeprefix("jax").split(","))
    assert f"test {low}" in (ROOT / "Makefile").read_text()
    numbers = lambda version: [int(part) for part in version.split(".")]  # noqa: E731
    assert numbers(low) <= numbers(jax.__version__) < numbers(high)


@case("G13")
def test_a_donated_cache_is_not_copied() -> None:
    """A step that writes new keys and values into the cache aliases all of it, and the second step is right."""
    sizes = {"vocab_size": 8, "num_layers": 1, "hidden_dim": 16, "mlp_dim": 16}
    config = TransformerConfig(**sizes, num_q_heads=1, num_kv_heads=1, head_dim=8)
    cache = empty_cache(config, batch=2, capacity=32)
    new = jnp.ones((2, 1, 1, 8), cache.key.dtype)

    def step(cache: Cache, new: Any, offset: Any) -> Any:
        cache = append_to_cache(cache, new, 2 * new, offset + 1)
        out = flash_attention(new, cache.key, cache.value, is_causal=True, query_offset=offset)
        return out, cache

    compiled = jax.jit(step, donate_argnums=0).lower(cache, new, jnp.zeros(2, jnp.int32)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(cache))
    for offset in range(2):
        out, cache = compiled(cache, new, jnp.full(2, offset))
    np.testing.assert_array_equal(np.float32(out), 2)
    np.testing.assert_array_equal(np.float32(cache.value[:, :3, 0, 0]), [[2, 2, 0]] * 2)
