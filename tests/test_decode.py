"""flash_decode and paged_flash_decode against the formulas: features, lengths, junk, pages, quantised caches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import combine, flash_attention, flash_decode, paged_flash_decode, xla_decode
from tests.decoding import LAYOUTS, Sizes, check, decode, oracle, pages_of, random_call, small_chunks, with_junk

pytestmark = pytest.mark.usefixtures("many_chunks")

SINKS = np.array([-3, 0, 0.5, 2, 20, -1e4], np.float32)


@pytest.fixture(scope="module")
def many_chunks() -> Any:
    with small_chunks(8, block_q=16):
        yield


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_token": {"q_len": 1},
    "one_row_cache": {"q_len": 1, "kv_len": 4, "kv_lengths": np.array([1, 0, 4, 3], np.int32)},
    "window": {"local_window_size": 5},
    "window_0": {"local_window_size": 0, "q_len": 1},
    "cap_sinks_scale": {"logits_soft_cap": 2.0, "sinks": SINKS, "scale": 0.7},
    "traced_scale": {"scale": np.float32(-0.3), "sinks": SINKS, "local_window_size": 2},
    "scale_0": {"scale": 0.0},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s + 0.03 * (i - j) * (h + 1) - 0.1 * b, "logits_soft_cap": 3.0},
    "query_lengths": {"query_lengths": np.array([3, 0, 2, 1], np.int32), "sinks": SINKS, "local_window_size": 9},
    "fewer_keys_than_rows": {"kv_lengths": np.array([1, 2, 0, 3], np.int32), "q_len": 6},
    "beyond": {"kv_lengths": np.array([41, 2**30, -5, -(2**31)], np.int32)},
    "int64": {"kv_lengths": np.array([2**40, -(2**40), 9, 8]), "query_lengths": np.array([2**40, 1, -3, 2])},
    "bfloat16": {"dtype": jnp.bfloat16, "local_window_size": 20},
    "float16": {"dtype": np.float16, "sinks": SINKS.astype(np.float16)},
}


@pytest.mark.case("H08", "H09")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("feature", FEATURES)
def test_matches_the_formulas(feature: str, layout: str) -> None:
    """There is NaN behind every length, in unused pages and in page 0; the table has anything behind a length."""
    options = dict(FEATURES[feature])
    sizes = Sizes(**{name: options.pop(name) for name in Sizes._fields if name in options})
    check(random_call(sizes, **options), layout)


@pytest.mark.parametrize("seed", range(8))
def test_any_combination(seed: int) -> None:
    """Each feature with probability a half, in one layout or the other."""
    rng = np.random.default_rng(seed)
    flip, pick = (lambda: rng.random() < 0.5), lambda *values: values[rng.integers(len(values))]
    q_len = pick(1, 3, 5)
    options: dict[str, Any] = {"kv_lengths": rng.integers(-2, 45, 4).astype(np.int32)}
    if flip():
        options["local_window_size"] = pick(0, 1, 6, 30)
    if flip():
        options["query_lengths"] = rng.integers(0, q_len + 1, 4).astype(np.int32)
    if flip():
        options["sinks"] = SINKS
    if flip():
        options["logits_soft_cap"] = pick(0.7, 5.0)
    if flip():
        options["score_mod"] = pick(FEATURES["score_mod"]["score_mod"], lambda s, b, h, i, j: s * (1 + (i - j) % 3))
    if flip():
        options["scale"] = pick(0.3, np.float32(-0.4))
    check(random_call(Sizes(q_len), seed=seed, dtype=pick(np.float32, jnp.bfloat16), **options), pick(*LAYOUTS))


def test_the_check_finds_a_shifted_position() -> None:
    call = random_call()
    out, _ = decode(call)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(out, oracle(call | {"kv_lengths": call["kv_lengths"] - 1}).out, atol=1e-3)


@pytest.mark.parametrize("window", [None, 11])
def test_chunked_prefill(window: int | None) -> None:
    """More new tokens than one block of rows, ragged ones too."""
    lengths = np.array([40, 33, 3, 36], np.int32)
    call = random_call(Sizes(q_len=35), kv_lengths=lengths, query_lengths=np.array([35, 20, 3, 35], np.int32))
    check(call | ({} if window is None else {"local_window_size": window}), "pages")


def test_no_batch_dimension_and_several() -> None:
    call = random_call()
    want = decode(call)
    split = {name: x.reshape(2, 2, *x.shape[1:]) for name, x in call.items()}
    paged = pages_of(call)
    paged_split = paged | {
        n: paged[n].reshape(2, 2, *paged[n].shape[1:]) for n in ("query", "kv_lengths", "page_table")
    }
    for several in (decode(split), decode(paged_split)):
        for x, y in zip(several, want, strict=True):
            np.testing.assert_allclose(x.reshape(y.shape), y, atol=1e-6)
    one = {name: x[0] for name, x in call.items()}
    one_paged = paged | {name: paged[name][0] for name in ("query", "kv_lengths", "page_table")}
    for single in (decode(one), decode(one | {"kv_lengths": 40}), decode(one_paged)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[0], atol=1e-6), single, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_new_token_with_nan_reaches_only_those_behind_it(layout: str) -> None:
    """Its row of the value cache shares a tile with queries that may not read it."""
    call = random_call(Sizes(q_len=4), kv_lengths=np.array([40, 12, 17, 8], np.int32))
    call["value"][0, 38] = np.nan
    call["key"][1, 10] = np.inf
    out, _ = check_rows(call, layout)
    assert np.isnan(out[0, 2:]).all() and np.isfinite(out[0, :2]).all()
    assert np.isfinite(out[1, :2]).all() and np.isfinite(out[2:]).all()


def check_rows(call: Any, layout: str) -> Any:
    out, lse = decode(pages_of(call) if layout == "pages" else with_junk(call))
    want, finite = oracle(call), np.isfinite(out)
    np.testing.assert_allclose(np.where(finite, out, 0), np.where(finite, want.out, 0), atol=1e-5)
    return out, lse


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_any_junk_in_unused_places(junk: float) -> None:
    call = random_call(Sizes(q_len=2), seed=3)
    for other in (with_junk(call, junk), pages_of(call, junk=junk)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), decode(other), decode(call))


def test_pages_shared_between_sequences() -> None:
    call = pages_of(random_call(kv_lengths=np.array([40, 38, 37, 30], np.int32)))
    table = np.broadcast_to(call["page_table"][:1], call["page_table"].shape)
    out, _ = decode(call | {"page_table": table})
    keys, values = (call[name][table[0]].reshape(1, 40, 2, -1).repeat(4, 0) for name in ("key", "value"))
    want = oracle(call | {"key": keys, "value": values})
    np.testing.assert_allclose(out, want.out, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group", [(1, 1), (16, 1), (17, 1), (8, 8)])
def test_head_groups(group: tuple[int, int], layout: str) -> None:
    rng = np.random.default_rng(0)
    num_q_heads, num_kv_heads = group
    call = random_call()
    call |= {"query": rng.normal(size=(4, 3, num_q_heads, 8)).astype(np.float32)}
    call |= {n: rng.normal(size=(4, 40, num_kv_heads, 8)).astype(np.float32) for n in ("key", "value")}
    check(call, layout)


def test_large_values_of_the_cache_keep_their_accuracy() -> None:
    """Partial sums stay in float32: bfloat16 values of mean 8 lose no more than plain attention does (H07)."""
    call = random_call(Sizes(q_len=1), dtype=jnp.bfloat16)
    check(call | {"value": (call["value"] + 8).astype(jnp.bfloat16)}, "cache", factor=1.0)


def test_a_large_sink_beside_low_logits() -> None:
    """The sink joins once the maximum is known (H04)."""
    call = random_call(Sizes(q_len=1), sinks=np.array([20, 1e4, -1e4, 0, 3, -20], np.float32))
    call["key"][:, :20] *= -100
    check(call, "cache")
    check(call | {"kv_lengths": np.zeros(4, np.int32)}, "cache")


@pytest.mark.parametrize("batch, q_len, kv_len", [(0, 1, 40), (4, 0, 40), (4, 1, 0)])
def test_empty_arrays(batch: int, q_len: int, kv_len: int) -> None:
    call = {name: x[:batch] for name, x in random_call(Sizes(q_len, kv_len)).items()}
    out, lse = decode(call)
    assert out.shape == (batch, q_len, 6, 5) and (out == 0).all() and (lse == -np.inf).all()


def test_no_page_at_all() -> None:
    call = random_call(Sizes(q_len=1))
    none = {name: call[name].reshape(-1, 4, *call[name].shape[2:])[:0] for name in ("key", "value")}
    for max_pages, pages in ((3, none), (0, {n: call[n] for n in none})):
        out, lse = decode(call | pages | {"page_table": np.zeros((4, max_pages), np.int32)})
        assert (out == 0).all() and (lse == -np.inf).all()


def test_float64() -> None:
    with jax.enable_x64(True):
        check(random_call(dtype=np.float64, sinks=SINKS, local_window_size=7), "pages", jit=True)


def test_equals_flash_attention_with_an_offset() -> None:
    call = random_call(kv_lengths=np.array([40, 3, 17, 5], np.int32))
    q, k, v, lengths = call.values()
    options: Any = {"local_window_size": (6, 0), "return_residual": True, "is_causal": True}
    want = flash_attention(q, k, v, query_offset=lengths - 3, key_value_seq_lengths=lengths, **options)
    got = flash_decode(q, k, v, lengths, local_window_size=(6, 0), return_residual=True, implementation="xla")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got, want)


def test_parts_of_a_cache_combine() -> None:
    """One token against a cache of which each device holds a part: lengths clip, the residuals merge (I01, I04)."""
    call = random_call(Sizes(q_len=1))
    q, k, v, lengths = call.values()
    options: Any = {"return_residual": True, "implementation": "xla"}
    parts = (slice(i, i + 10) for i in range(0, 40, 10))
    got = combine(flash_decode(q, k[:, part], v[:, part], lengths - part.start, **options) for part in parts)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), tuple(got), decode(call))


def steps_taken(monkeypatch: Any, call: Any) -> int:
    """How many chunks the fallback visits."""
    steps, step = [], xla_decode._step
    monkeypatch.setattr(xla_decode, "_step", lambda *args: steps.append(0) or step(*args))
    decode(call)
    return len(steps)


@pytest.mark.parametrize(
    "lengths, window, chunks",
    [([40, 0, 17, 2], None, 5), ([9, 0, 3, 2], None, 2), ([0, 0, 0, 0], None, 0), ([40, 0, 17, 2], 3, 1)],
)
def test_the_work_follows_lengths_and_windows(monkeypatch: Any, lengths: Any, window: Any, chunks: int) -> None:
    """Chunks behind the longest sequence, and before each window, are not visited (J06, H11)."""
    call = random_call(Sizes(q_len=1), kv_lengths=np.array(lengths, np.int32), local_window_size=window)
    for each in (call, pages_of(call)):
        assert steps_taken(monkeypatch, each) == chunks


def test_memory_does_not_grow_with_the_cache() -> None:
    """No dense copy of the pages, no row of scores over all keys, also for a chunk of queries."""

    def temporary(num_pages: int) -> int:
        q = jax.ShapeDtypeStruct((1, 64, 4, 16), jnp.float32)
        pages = jax.ShapeDtypeStruct((num_pages, 64, 2, 16), jnp.float32)
        table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, num_pages), (1,)))
        function = jax.jit(lambda *args: paged_flash_decode(*args, implementation="xla"))
        return function.lower(q, pages, pages, table, lengths).compile().memory_analysis().temp_size_in_bytes

    assert temporary(4096) <= 1.1 * temporary(64) + 2**16
