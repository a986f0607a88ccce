"""append_to_cache, append_to_pages, quantise and the rotary embedding: the right rows, in place, and no others."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import (
    Cache,
    Rotary,
    append_to_cache,
    append_to_pages,
    apply_rotary,
    flash_decode,
    paged_flash_decode,
    quantise,
    reference_attention,
)

B, S, K, H, HV, PAGE = 3, 16, 2, 4, 6, 4
TABLE = np.array([[5, 2, 9, 0], [7, 1, 99, -1], [3, 4, 6, 8]])


def tokens(count: int, dtype: Any = np.float32, seed: int = 0, batch: int = B) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(batch, count, K, width)), dtype) for width in (H, HV))


def filled(shape: tuple[int, int], dtype: Any = np.float32) -> Cache:
    return Cache(*(jnp.full((*shape, K, width), 7, dtype) for width in (H, HV)))


def expected(cache: Any, new: Any, lengths: Any, counts: Any, place: Any) -> np.ndarray:
    """Row by row: token i of sequence b goes to place(b, row), if there is one."""
    cache = np.array(cache)
    for b in range(len(lengths)):
        for i in range(min(counts[b], new.shape[1])):
            where = place(b, int(lengths[b]) - int(counts[b]) + i)
            if where is not None:
                cache[where] = new[b, i]
    return cache


def in_cache(b: int, row: int) -> tuple[int, ...] | None:
    return (b, row) if 0 <= row < S else None


def in_pages(b: int, row: int) -> tuple[int, ...] | None:
    page = TABLE[b, row // PAGE] if 0 <= row < S else -1
    return (page, row % PAGE) if 0 <= page < 10 else None


# (lengths with the new tokens, how many of the 3 are real)
LENGTHS = [
    ([3, 8, 16], None),
    ([3, 8, 16], [0, 1, 2]),
    ([1, 2, 0], None),  # fewer rows than tokens: the first ones stand before the sequence
    ([17, 19, 30], None),  # beyond the capacity
    ([2**40, -(2**40), 5], [9, -9, 3]),
]


@pytest.mark.parametrize("lengths, counts", LENGTHS)
@pytest.mark.parametrize("paged", [False, True])
def test_new_rows_and_no_others(paged: bool, lengths: Any, counts: Any) -> None:
    key, value = tokens(3)
    clamped = [3] * B if counts is None else np.clip(counts, 0, 3)
    query_lengths = None if counts is None else np.array(counts)
    if paged:
        cache, place = filled((10, PAGE)), in_pages
        got = append_to_pages(cache, TABLE, key, value, np.array(lengths), query_lengths=query_lengths)
    else:
        cache, place = filled((B, S)), in_cache
        got = append_to_cache(cache, key, value, np.array(lengths), query_lengths=query_lengths)
    np.testing.assert_array_equal(got.key, expected(cache.key, key, lengths, clamped, place))
    np.testing.assert_array_equal(got.value, expected(cache.value, value, lengths, clamped, place))
    assert got.k_scale is None and got.v_scale is None


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, jnp.int8])
def test_a_donated_cache_is_written_in_place(dtype: Any, paged: bool) -> None:
    """Every byte of the result is the argument's own, and the program makes no second array of its shape (G13)."""
    shape = (10, PAGE) if paged else (B, S)
    shape = (shape[0], 256 * shape[1])
    scales = [jnp.zeros((*shape, K)), jnp.zeros((*shape, K))] if dtype == jnp.int8 else []
    cache = Cache(*filled(shape, dtype)[:2], *scales)
    new = tokens(2, np.float32 if dtype == jnp.int8 else dtype)

    def step(cache: Cache, key: Any, value: Any, lengths: Any) -> Cache:
        if paged:
            return append_to_pages(cache, TABLE, key, value, lengths, rotary=Rotary())
        return append_to_cache(cache, key, value, lengths, rotary=Rotary())

    compiled = jax.jit(step, donate_argnums=0).lower(cache, *new, jnp.array([3, 8, 9])).compile()
    memory, size = compiled.memory_analysis(), sum(x.nbytes for x in cache if x is not None)
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 2
    whole = ",".join(map(str, cache.key.shape))
    assert not re.search(rf"\[{whole}\]\S* (copy|convert)\(", compiled.as_text())
    pointer = cache.key.unsafe_buffer_pointer()
    written = compiled(cache, *new, jnp.array([3, 8, 9]))
    assert written.key.unsafe_buffer_pointer() == pointer and cache.key.is_deleted()


def test_batch_dimensions_and_vmap() -> None:
    key, value = tokens(2, batch=4)
    lengths = jnp.array([2, 5, 9, 16])
    cache = Cache(*(jnp.zeros((4, S, K, width)) for width in (H, HV)))
    want = append_to_cache(cache, key, value, lengths)
    square = lambda tree: jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), tree)  # noqa: E731
    arguments = (cache, key, value, lengths)
    for got in (append_to_cache(*square(arguments)), jax.vmap(append_to_cache)(*square(arguments))):
        jax.tree.map(np.testing.assert_array_equal, got, square(want))
    single = append_to_cache(*jax.tree.map(lambda x: x[1], arguments))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[1]), single, want)
    jax.tree.map(np.testing.assert_array_equal, append_to_cache(tuple(cache[:2]), key, value, 5).key[0, 3:5], key[0])


@pytest.mark.parametrize(
    "rotary", [Rotary(), Rotary(500.0, interleaved=True), Rotary(dim=2), Rotary(frequencies=(1.0, 0.3))]
)
def test_rotary(rotary: Rotary) -> None:
    """By the formula, in complex numbers; scores depend on distances; keys in a cache stand at their rows."""
    x, _ = tokens(5)
    positions = np.array([0, 1, 7, 300, 4000])
    dim = rotary.dim or H
    pairs = np.asarray(x[..., :dim], np.float64)
    pairs = pairs.reshape(B, 5, K, dim // 2, 2) if rotary.interleaved else np.stack(np.split(pairs, 2, -1), -1)
    frequencies = rotary.frequencies or [rotary.base ** (-2 * i / dim) for i in range(dim // 2)]
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * positions[:, None, None] * np.asarray(frequencies))
    parts = [turned.real, turned.imag]
    want = np.stack(parts, -1).reshape(B, 5, K, dim) if rotary.interleaved else np.concatenate(parts, -1)
    got = apply_rotary(x, jnp.asarray(positions), rotary)
    np.testing.assert_allclose(got[..., :dim], want, atol=2e-3)
    np.testing.assert_array_equal(got[..., dim:], x[..., dim:])
    assert apply_rotary(x.astype(jnp.bfloat16), jnp.asarray(positions), rotary).dtype == jnp.bfloat16

    lengths = jnp.array([5, 16, 9])
    cache = append_to_cache(filled((B, S)), x, tokens(5)[1], lengths, rotary=rotary)
    rows = lengths[:, None] - 5 + jnp.arange(5)
    np.testing.assert_array_equal(cache.key[jnp.arange(B)[:, None], rows], apply_rotary(x, rows, rotary))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rotary(0.0),
        lambda: Rotary(float("nan")),
        lambda: Rotary(dim=3),
        lambda: Rotary(dim=0),
        lambda: Rotary(dim=2.0),
        lambda: Rotary(dim=True),
        lambda: Rotary("x"),
        lambda: Rotary(1e39),
        lambda: Rotary(interleaved=1),
        lambda: Rotary(frequencies=(1.0, float("nan"))),
        lambda: Rotary(frequencies=1.0),
        lambda: apply_rotary(jnp.ones((5, 1, 4), int), jnp.arange(5)),
        lambda: apply_rotary(jnp.ones((5, 1, 4)), jnp.ones(5, bool)),
        lambda: apply_rotary(jnp.ones((5, 1, 4)), jnp.arange(5), "x"),
        lambda: Rotary(dim=4, frequencies=(1.0,)),
        lambda: apply_rotary(jnp.ones((5, 1, 4)), jnp.arange(4)),
        lambda: apply_rotary(jnp.ones((5, 1, 4)), jnp.arange(5), Rotary(dim=6)),
        lambda: apply_rotary(jnp.ones((5, 1, 3)), jnp.arange(5)),
    ],
)
def test_wrong_rotary_arguments_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"base|dim|interleaved|frequencies|positions|rotary|x must"):
        make()


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantise(dtype: Any) -> None:
    x = np.random.default_rng(0).normal(size=(5, 7, 64)) * np.logspace(-20, 20, 5)[:, None, None]
    x[0, 0] = 0
    x = jnp.asarray(x, jnp.float32)
    values, scale = jax.jit(lambda x: quantise(x, dtype))(x)
    assert values.dtype == dtype and scale.dtype == jnp.float32 and scale.shape == (5, 7)
    back = values.astype(jnp.float32) * scale[..., None]
    largest = jnp.abs(x).max(-1, keepdims=True)
    allowed = largest / 253 if dtype == jnp.int8 else jnp.abs(x) / 15 + largest / 2**17
    assert (jnp.abs(back - x) <= allowed).all() and (back[0, 0] == 0).all()
    for junk in (jnp.nan, jnp.inf):
        values, scale = quantise(x.at[1, 2, 3].set(junk), dtype)
        assert jnp.isnan(values.astype(jnp.float32)[1, 2] * scale[1, 2]).any() and jnp.isfinite(scale).sum() == 34
    saturated, _ = quantise(jnp.array([1.0, 1e6, -1e6, jnp.inf, jnp.nan]), dtype, scale=jnp.float32(0.5))
    limit, nan = (127, 0) if dtype == jnp.int8 else (448, jnp.nan)
    np.testing.assert_array_equal(saturated.astype(jnp.float32), [2, limit, -limit, limit, nan])


WRONG_OPTIONS = [
    {"dtype": jnp.int4}, {"dtype": "nosuch"}, {"dtype": None}, {"scale": jnp.ones(3)}, {"scale": 1},
    {"scale": jnp.ones((1, 1, 1))}, {"dtype": np.int16}, {"scale": np.float32}, {"scale": np.ones((), ">f4")},
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_wrong_arguments_of_quantise_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        quantise(jnp.ones((5, 7)), **options)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_a_quantised_cache_step_by_step(dtype: Any, paged: bool) -> None:
    """Append and decode, token after token, against attention over the exact keys and values."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(B, S, K, width)), jnp.float32) for width in (H, HV))
    query = jnp.asarray(rng.normal(size=(B, 1, 4, H)), jnp.float32)
    table = jnp.asarray(rng.permutation(12).reshape(B, 4))
    shape = (12, PAGE) if paged else (B, S)
    cache = Cache(*filled(shape, dtype)[:2], *(jnp.full((*shape, K), jnp.nan) for _ in range(2)))
    length = jnp.zeros(B, jnp.int32)
    for start, stop in ((0, 11), (11, 12), (12, 13)):
        length += stop - start
        new = k[:, start:stop], v[:, start:stop]
        append = (lambda *x: append_to_pages(x[0], table, *x[1:])) if paged else append_to_cache
        cache = append(cache, *new, length)
        scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        if paged:
            out = paged_flash_decode(query, cache.key, cache.value, table, length, **scales)
        else:
            out = flash_decode(query, cache.key, cache.value, length, **scales)
        want = reference_attention(query, k, v, key_value_seq_lengths=length)
        np.testing.assert_allclose(out, want, atol=0.02 if dtype == jnp.int8 else 0.15)


def test_a_scale_of_all_rows_stays() -> None:
    key, value = tokens(2)
    scale = jnp.array([0.1, 0.01, 10.0])[:, None, None] * jnp.ones((1, K))
    cache = Cache(*filled((B, S), jnp.int8)[:2], scale, scale)
    got = append_to_cache(cache, key, value, 4)
    np.testing.assert_array_equal(got.k_scale, scale)
    np.testing.assert_array_equal(got.key[:, 2:4], jnp.clip(jnp.round(key / scale[..., None]), -127, 127))
    pages = Cache(*filled((3, PAGE), jnp.int8)[:2], scale, scale)
    got = append_to_pages(pages, jnp.array([[2], [0], [1]]), key, value, 4)
    want = jnp.clip(jnp.round(value / scale[jnp.array([2, 0, 1])][..., None]), -127, 127)
    np.testing.assert_array_equal(got.value[jnp.array([2, 0, 1]), 2:4], want)
    float8 = append_to_cache(filled((B, S), jnp.float8_e4m3fn), key * 1e4, value, 4)
    assert jnp.isfinite(float8.key.astype(jnp.float32)).all() and jnp.abs(float8.key.astype(jnp.float32)).max() == 448


INT8 = Cache(*filled((B, S), jnp.int8)[:2], jnp.ones((B, S, K)), jnp.ones((B, S, K)))
WRONG = {
    "cache.key": {"cache": Cache(jnp.ones(3), jnp.ones((B, S, K, HV)))},
    "cache.value": {"cache": Cache(jnp.ones((B, S, K, H)), jnp.ones((B, S, K, HV), jnp.int8))},
    "cache.k_scale": {"cache": INT8._replace(k_scale=None)},
    "cache.v_scale": {"cache": INT8._replace(v_scale=jnp.ones((B, 2, K)))},
    "key must be float32 as the cache": {"key": tokens(2, jnp.bfloat16)[0]},
    r"key must be of shape \[3, 'T', 2, 4\]": {"key": tokens(2)[1]},
    "key must be a floating": {"key": jnp.ones((B, 2, K, H), jnp.int8)},
    "value must be as many tokens": {"value": tokens(3)[1]},
    "kv_lengths": {"kv_lengths": jnp.ones(2, jnp.int32)},
    "kv_lengths must": {"kv_lengths": 1.5},
    "kv_lengths must be of": {"kv_lengths": jax.ShapeDtypeStruct((B,), jnp.int32)},
    "kv_lengths must be within 64 bits": {"kv_lengths": 2**70},
    "query_lengths": {"query_lengths": "two"},
    "rotary": {"rotary": 10_000.0},
    "key must have heads of at least 6 features": {"rotary": Rotary(dim=6)},
    "key must be a floating-point array": {"key": [[1.0], [1.0, 2.0]]},
    "cache must be a Cache or a tuple": {"cache": None},
    r"cache must be a Cache .*not \(float32": {"cache": (jnp.ones((B, S, K, H)),)},
    "cache must be a Cache": {"cache": (1,) * 5},
    r"cache must be a Cache .*not float32\[3, 2, 4\]": {"cache": jnp.ones((3, 2, 4))},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_of_append_are_refused_by_name(message: str) -> None:
    key, value = tokens(2)
    arguments = {"cache": filled((B, S)), "key": key, "value": value, "kv_lengths": 4} | WRONG[message]
    with pytest.raises(ValueError, match=message):
        append_to_cache(arguments.pop("cache"), **arguments)
    with pytest.raises(ValueError, match="page_table"):
        append_to_pages(filled((10, PAGE)), TABLE[:2], key, value, 4)
    for pages in (None, jnp.ones((10, PAGE, K, H)), (1, 2, 3, 4, 5), (jnp.ones(3), jnp.ones(3))):
        with pytest.raises(ValueError, match="pages"):
            append_to_pages(pages, TABLE, key, value, 4)


@pytest.mark.parametrize("convert", [np.asarray, lambda x: np.asarray(x).tolist()])
def test_array_likes_are_taken(convert: Any) -> None:
    key, value = tokens(2)
    caches = (filled((B, S)), append_to_cache), (filled((10, PAGE)), lambda x, *y: append_to_pages(x, TABLE, *y))
    for cache, append in caches:
        given = tuple(map(convert, cache[:2]))
        for got, want in zip(append(given, convert(key), convert(value), 4), append(cache, key, value, 4), strict=True):
            np.testing.assert_array_equal(got, want)
    x, positions = jnp.ones((5, 1, 4)), jnp.arange(5)
    np.testing.assert_array_equal(apply_rotary(convert(x), convert(positions)), apply_rotary(x, positions))
    assert Rotary(frequencies=convert([1.0, 0.5])) == Rotary(frequencies=(1.0, 0.5))
