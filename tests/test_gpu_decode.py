"""The compiled decoding kernels on an NVIDIA GPU, through the public operators, against the formulas."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import Cache, append_to_cache, append_to_pages
from tests import oracles
from tests.decoding import LAYOUTS, Call, Sizes, apply, decode, oracle, pages_of, quantised, random_call, with_junk

pytestmark = pytest.mark.gpu

LENGTHS = np.array([1100, 0, 517, 3], np.int32)
CALLS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "one token": (Sizes(1, 1152, (8, 2), (128, 128)), {}),
    "head dim 64, 4 tokens": (Sizes(4, 1152, (8, 8), (64, 64)), {}),
    "16 tokens, multi-query": (Sizes(16, 1152, (16, 1), (128, 128)), {}),
    "192/128": (Sizes(1, 1152, (4, 1), (192, 128)), {}),
    "256": (Sizes(2, 1152, (4, 2), (256, 256)), {"scale": 0.1}),
    "window": (Sizes(2, 1152, (8, 2), (128, 128)), {"local_window_size": 100}),
    "cap, sinks": (Sizes(1, 1152, (8, 2), (128, 128)), {"logits_soft_cap": 3.0, "sinks": np.ones(8, np.float32)}),
    "traced scale": (Sizes(1, 1152, (8, 2), (128, 128)), {"scale": np.float32(-0.2)}),
    "ragged tokens": (Sizes(5, 1152, (8, 2), (128, 128)), {"query_lengths": np.array([5, 2, 0, 3], np.int32)}),
    "score_mod": (Sizes(2, 1152, (8, 2), (64, 64)), {"score_mod": lambda s, b, h, i, j: s + 0.01 * (h + 1) * (j - i)}),
}  # fmt: skip


@pytest.fixture(scope="module")
def on_hopper() -> None:
    if jax.devices()[0].compute_capability.split(".")[0] != "9":
        pytest.skip("needs compute capability 9.0")


def judge(stored: Call, meant: Call, layout: str) -> None:
    """Within twice the error of plain attention in 16 bits; the same bits again; NaN wherever nobody may look."""
    dtype = stored["query"].dtype
    call = pages_of(stored, page_size=64) if layout == "pages" else with_junk(stored)
    got, again = (decode(call, "sm90", jit=True) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, got, again)
    want, plain = (oracle(meant, arithmetic) for arithmetic in (oracles.FLOAT64, oracles.plain(dtype)))
    eps = float(jnp.finfo(dtype).eps)
    for name, found, floor in zip(("out", "lse"), got, (eps, 1e-3), strict=True):
        oracles.assert_within_budget(found, getattr(want, name), getattr(plain, name), floor=floor, name=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_sm90_decodes(on_hopper: None, name: str, layout: str) -> None:
    sizes, options = CALLS[name]
    for dtype in (jnp.bfloat16, np.float16):
        call = random_call(sizes, dtype=dtype, **options | {"kv_lengths": LENGTHS})
        judge(call, call, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_sm90_decodes_quantised_caches(on_hopper: None, dtype: Any, layout: str) -> None:
    for q_len, per in ((1, "token"), (4, "token")) + (((1, "sequence"),) if layout == "cache" else ()):
        call = random_call(Sizes(q_len, 1152, (8, 2), (128, 128)), dtype=jnp.bfloat16, kv_lengths=LENGTHS)
        judge(*quantised(call, dtype, per), layout)


def test_sm90_prefills_in_chunks(on_hopper: None) -> None:
    lengths = np.array([1100, 300, 517, 600], np.int32)
    call = random_call(Sizes(300, 1152, (4, 2), (128, 128)), dtype=jnp.bfloat16, kv_lengths=lengths)
    judge(call, call, "pages")


def test_sm90_under_scan_and_vmap(on_hopper: None) -> None:
    call = random_call(Sizes(1, 1152, (8, 2), (128, 128)), dtype=jnp.bfloat16, kv_lengths=LENGTHS)
    arrays = {name: jnp.asarray(x) for name, x in call.items()}
    on_sm90 = partial(apply, decoder="sm90")
    both = jax.tree.map(lambda x: jnp.stack([x, x]), arrays)
    want = jax.jit(on_sm90)(arrays)
    for got in (jax.vmap(on_sm90)(both), jax.lax.scan(lambda c, x: (c, on_sm90(x)), 0, both)[1]):
        np.testing.assert_array_equal(got[1], want)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_caches_are_written_in_place(dtype: Any, paged: bool) -> None:
    shape = (64, 64, 4, 128)  # 64 sequences of 64 rows, or 64 pages
    scales = () if dtype == jnp.bfloat16 else (jnp.zeros(shape[:3]), jnp.zeros(shape[:3]))
    cache = Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), *scales)
    new = jnp.ones((64 if not paged else 8, 1, 4, 128), jnp.bfloat16)
    table = jnp.arange(64).reshape(8, 8)
    append = (lambda c, x: append_to_pages(c, table, x, x, 7)) if paged else (lambda c, x: append_to_cache(c, x, x, 7))
    compiled = jax.jit(append, donate_argnums=0).lower(cache, new).compile()
    memory, size = compiled.memory_analysis(), sum(x.nbytes for x in cache if x is not None)
    assert memory.alias_size_in_bytes == size and memory.temp_size_in_bytes < size / 8
