"""A cache of keys and values, and how new tokens get into it: in place, under jit with the cache donated."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import masks, partitioning
from pallas_flash.checks import Sizes, checked_array, per_batch, require
from pallas_flash.decode_validation import QUANTISED, page_table_of, quantisation_scale
from pallas_flash.rotary import Rotary, apply_rotary, rotated_features
from pallas_flash.spec import Array, described
from pallas_flash.splits import GATHERED, there
from pallas_flash.validation import DTYPES


class Cache(NamedTuple):
    """Keys and values of past tokens: rows of sequences [*B, S, K, H], or pages [P, page_size, K, H] of a pool."""

    key: Array
    value: Array
    k_scale: Array | None = (
        None  # float32 [*B, S, K] or [P, page_size, K]; or, for all rows of one, size 1 in place of S
    )
    v_scale: Array | None = None


def append_to_cache(
    cache: Cache | tuple[Any, ...],
    key: Array,
    value: Array,
    kv_lengths: Array,
    *,
    query_lengths: Array | None = None,
    rotary: Rotary | None = None,
) -> Cache:
    """Write the keys and values of new tokens into a cache, at the places where `flash_decode`, called with the same
    lengths, will look for them.

    `kv_lengths` counts the new tokens: token i of a sequence goes to row kv_lengths - query_lengths + i. Tokens from
    query_lengths on, and tokens whose row is not there (below 0 or beyond the capacity), are dropped: lengths are known
    on the device only, so nothing can be raised. All other rows stay what they are. Donate the cache, and it is written
    in place: `jax.jit(append_to_cache, donate_argnums=0)`.

    Args:
      cache: a `Cache`, or a tuple of its fields: key [*B, S, K, H], value [*B, S, K, Hv] in float16, bfloat16, float32,
        float64, int8 or float8_e4m3fn, and for the last two k_scale, v_scale.
      key: [*B, T, K, H], in the dtype of the cache, or floating where the cache is quantised.
      value: [*B, T, K, Hv], likewise.
      kv_lengths: int, [*B] or a scalar: the lengths after this call.
      query_lengths: int, [*B] or a scalar: how many of the T tokens are real, the first ones; T by default.
      rotary: rotate the keys by their positions, which are their rows. The queries are yours to rotate: `apply_rotary`.

    A quantised cache with one scale a token gets the new tokens' own (`quantise`). Where it has one for all rows of a
    sequence or page, that stays, and the new rows are rounded with it and saturate; NaN becomes 0 in int8 then. float8
    without scales saturates.

    Returns:
      the `Cache`, written.

    Raises:
      ValueError: an argument is wrong; the message names it, what came and what is wanted.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pallas_flash import Cache, Rotary, append_to_cache
      >>> append = jax.jit(append_to_cache, static_argnames="rotary", donate_argnums=0)
      >>> cache = Cache(jnp.zeros((2, 64, 4, 16)), jnp.zeros((2, 64, 4, 16)))
      >>> cache = append(cache, jnp.ones((2, 3, 4, 16)), jnp.ones((2, 3, 4, 16)), jnp.array([3, 20]), rotary=Rotary())
      >>> cache.value[:, :, 0, 0].sum(axis=1)
      Array([3., 3.], dtype=float32)
    """
    cache = _stored(cache, paged=False)
    lead = cache.key.shape[:-3]
    new = _new(cache, key, value, lead, rotary)
    sizes = _sizes(new.key, lead, cache.key.shape[-3])
    new = new._replace(**_lengths(sizes, kv_lengths, query_lengths))
    flat = Cache(*(None if x is None else x.reshape(sizes.batch, *x.shape[len(lead) :]) for x in cache))
    written = partitioning.differentiated_by_jax(_Append(rotary, paged=False), flat, new)
    return Cache(*(None if x is None else x.reshape(*lead, *x.shape[1:]) for x in written))


def append_to_pages(
    pages: Cache | tuple[Any, ...],
    page_table: Array,
    key: Array,
    value: Array,
    kv_lengths: Array,
    *,
    query_lengths: Array | None = None,
    rotary: Rotary | None = None,
) -> Cache:
    """`append_to_cache` into pages: row j of a sequence is row j % page_size of page page_table[j // page_size].

    The pages that new tokens fall into must be in the table and belong to one sequence each; tokens whose entry is out
    of range are dropped.

    Args:
      pages: a `Cache` of pages: key [P, page_size, K, H], value [P, page_size, K, Hv], scales [P, page_size | 1, K].
      page_table: int [*B, max_pages].
      key: [*B, T, K, H].
      value: [*B, T, K, Hv].

    All else, and what it returns and raises, is as in `append_to_cache`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pallas_flash import Cache, append_to_pages
      >>> append = jax.jit(append_to_pages, donate_argnums=0)
      >>> pages = Cache(jnp.zeros((9, 16, 4, 8)), jnp.zeros((9, 16, 4, 8)))
      >>> pages = append(pages, jnp.array([[3, 8], [7, -1]]), *jnp.ones((2, 2, 1, 4, 8)), jnp.array([17, 5]))
      >>> pages.key[8, 0, 0, 0], pages.key[7, 4, 0, 0]
      (Array(1., dtype=float32), Array(1., dtype=float32))
    """
    pages = _stored(pages, paged=True)
    key = checked_array("key", key, np.floating, "a floating-point array")
    lead = key.shape[:-3]
    new = _new(pages, key, value, lead, rotary)
    table = page_table_of(page_table, lead, "key")
    num_pages, page_size = pages.key.shape[:2]
    sizes = _sizes(new.key, lead, page_size * table.shape[1])
    new = new._replace(page_table=table, **_lengths(sizes, kv_lengths, query_lengths))
    if sizes.kv_len == 0 or num_pages == 0:
        return pages
    return partitioning.differentiated_by_jax(_Append(rotary, paged=True), pages, new)


def quantise(x: Array, dtype: Any = jnp.int8, *, scale: Array | None = None) -> tuple[Array, Array]:
    """Round x [..., H] to int8 or float8_e4m3fn with one factor for each vector: values [..., H], scale float32 [...].

    x is about values * scale[..., None]: to 1/254 of the vector's largest entry in int8, to 1/16 of each entry in
    float8. With a `scale` of yours, float32 broadcastable to [...], what is too large for it saturates, Inf too; NaN
    stays NaN in float8 and becomes 0 in int8, which has none. Without it, a vector with NaN or Inf stays one: its scale
    is NaN or Inf. float64 is rounded to float32 before: what is beyond that counts as Inf.

    Raises ValueError for another dtype, or a scale that does not fit.

    >>> import jax.numpy as jnp
    >>> from pallas_flash import quantise
    >>> values, scale = quantise(jnp.array([[1.0, -2.0, 0.5], [0, 0, 0]]))
    >>> values.dtype, values[0], scale[1]
    (dtype('int8'), Array([  64, -127,   32], dtype=int8), Array(0., dtype=float32))
    """
    x = checked_array("x", x, np.floating, "a floating-point array")
    require(x.ndim >= 1, "x", x, "of shape [..., H]")
    try:
        name = None if dtype is None else np.dtype(dtype).name
    except TypeError:
        name = None
    require(name in QUANTISED, "dtype", dtype, " or ".join(QUANTISED))
    dtype = np.dtype(dtype)
    largest = 127.0 if dtype == np.int8 else float(jnp.finfo(dtype).max)
    exact = x.astype(jnp.float32)
    if scale is None:
        scale = jnp.max(jnp.abs(exact), axis=-1, initial=0) / largest
    scale = checked_array("scale", scale, np.floating, "a floating-point array").astype(jnp.float32)
    fits = len(scale.shape) < x.ndim and all(
        n in (1, m) for n, m in zip(scale.shape[::-1], x.shape[-2::-1], strict=False)
    )
    require(fits, "scale", scale, f"broadcastable to {list(x.shape[:-1])}")
    scale = jnp.broadcast_to(scale, x.shape[:-1])
    values = jnp.clip(exact / jnp.where(scale == 0, 1, scale)[..., None], -largest, largest)
    return (jnp.round(values) if dtype == np.int8 else values).astype(dtype), scale


class _New(NamedTuple):
    """The new tokens with one batch dimension, and what says where they go."""

    key: Array  # [B, T, K, H]
    value: Array  # [B, T, K, Hv]
    kv_lengths: Array | None = None  # int32 [B]
    query_lengths: Array | None = None  # int32 [B]; None: T
    page_table: Array | None = None  # int32 [B, max_pages]; None: the cache is none of pages


@dataclasses.dataclass(frozen=True)
class _Append:
    """On arrays that are sharded (passes.py): the cache stays as it is, and what is new is brought to it."""

    rotary: Rotary | None
    paged: bool

    @property
    def names(self) -> dict[str, str]:
        return {field: f"{'pages' if self.paged else 'cache'}.{field}" for field in Cache._fields}

    def __call__(self, cache: Cache, new: _New) -> Cache:
        return _write(cache, new, _places(cache, new), self.rotary)

    def axes(self, cache: Cache, new: _New) -> tuple[tuple[Cache, _New], Cache]:
        rows, batch = ("ps", GATHERED) if self.paged else ("bs", "d")
        of_cache: Any = Cache(*map(there, (f"{rows}nh", f"{rows}nh", f"{rows}n", f"{rows}n"), cache))
        tokens = (f"{batch}_mh", f"{batch}_mh", batch, batch, f"{batch}_")
        of_new: Any = _New(*map(there, tokens, new))
        return (of_cache, of_new), of_cache

    def part(self, split: Any, first: Any, *arrays: Any) -> Cache:
        del split, first
        return self(*arrays)


class _Places(NamedTuple):
    """Where the new tokens of each sequence go, int32 [B, T] each. An index beyond the arrays is nowhere; no two places
    are equal, which spares a GPU its atomics."""

    position: Array
    row: Array  # of the sequence, or of the page
    page: Array | None = None


def _stored(cache: Any, *, paged: bool) -> Cache:
    """The fields of a cache as arrays."""
    argument, rows = ("pages", "[P, page_size, K, ") if paged else ("cache", "[*B, S, K, ")
    wanted = "a Cache or a tuple of its fields (key, value, k_scale, v_scale), the scales None or left out"
    require(isinstance(cache, tuple | list) and 2 <= len(cache) <= 4, argument, cache, wanted)
    dtypes = (*DTYPES, *QUANTISED)
    fields = Cache(*cache)
    k, v = (checked_array(f"{argument}.{n}", getattr(fields, n), np.number, "an array") for n in ("key", "value"))
    fits = (k.ndim == 4 if paged else k.ndim >= 3) and k.dtype.name in dtypes
    require(fits, f"{argument}.key", k, f"{rows}H], one of {', '.join(dtypes)}")
    fits = v.ndim == k.ndim and v.shape[:-1] == k.shape[:-1] and v.dtype == k.dtype
    require(fits, f"{argument}.value", v, f"{rows}Hv] for {argument}.key {described(k)}")
    k_scale = quantisation_scale(f"{argument}.k_scale", fields.k_scale, k)
    return Cache(k, v, k_scale, quantisation_scale(f"{argument}.v_scale", fields.v_scale, v))


def _new(cache: Cache, key: Any, value: Any, lead: tuple[int, ...], rotary: Any) -> _New:
    new = []
    for name, array, x in (("key", key, cache.key), ("value", value, cache.value)):
        array = checked_array(name, array, np.floating, "a floating-point array")
        if x.dtype.name in QUANTISED:
            require(array.dtype.name in DTYPES, name, array, f"one of {', '.join(DTYPES)}")
        else:
            require(array.dtype == x.dtype, name, array, f"{x.dtype} as the cache")
        fits = array.ndim == len(lead) + 3 and array.shape[:-3] == lead and array.shape[-2:] == x.shape[-2:]
        require(fits, name, array, f"of shape {[*lead, 'T', *x.shape[-2:]]} beside the cache's {described(x)}")
        new.append(array.reshape(math.prod(lead), *array.shape[-3:]))
    require(new[1].shape[1] == new[0].shape[1], "value", new[1], f"as many tokens as key {described(new[0])}")
    if rotary is not None:
        rotated_features("key", new[0], rotary)
    return _New(*new)


def _sizes(key: Array, lead: tuple[int, ...], capacity: int) -> Sizes:
    batch, q_len, num_kv_heads, _ = key.shape
    return Sizes(lead, batch, q_len, capacity, num_kv_heads, num_kv_heads)


def _lengths(sizes: Sizes, kv_lengths: Any, query_lengths: Any) -> dict[str, Array | None]:
    ends = per_batch("kv_lengths", kv_lengths, sizes, -masks.FAR, masks.FAR)
    count = None if query_lengths is None else per_batch("query_lengths", query_lengths, sizes, 0, sizes.q_len)
    return {"kv_lengths": ends, "query_lengths": count}


def _places(cache: Cache, new: _New) -> _Places:
    """Of every new token. One that is none, or whose place is not there, goes nowhere."""
    batch, q_len = new.key.shape[:2]
    rows = cache.key.shape[1]
    capacity = rows if new.page_table is None else rows * new.page_table.shape[1]
    count = jnp.full(batch, q_len, jnp.int32) if new.query_lengths is None else new.query_lengths
    token = jnp.arange(q_len, dtype=jnp.int32)[None]
    position = (new.kv_lengths - count)[:, None] + token
    real = (token < count[:, None]) & (position >= 0) & (position < capacity)
    if new.page_table is None:
        return _Places(position, jnp.where(real, position, capacity + token))
    page = jnp.take_along_axis(new.page_table, jnp.clip(position // rows, 0, new.page_table.shape[1] - 1), axis=1)
    num_pages = cache.key.shape[0]
    real = real & (page >= 0) & (page < num_pages)
    nowhere = num_pages + jnp.arange(real.size).reshape(real.shape)
    return _Places(position, position % rows, jnp.where(real, page, nowhere))


def _write(cache: Cache, new: _New, places: _Places, rotary: Rotary | None) -> Cache:
    key = new.key if rotary is None else apply_rotary(new.key, places.position, rotary)
    parts = []
    for rows, stored, scale in ((key, cache.key, cache.k_scale), (new.value, cache.value, cache.v_scale)):
        if stored.dtype.name in QUANTISED:
            own_scales = scale is not None and scale.shape[1] == stored.shape[1]
            rows, scales = quantise(rows, stored.dtype, scale=None if own_scales else _fixed_scales(scale, places))
            scale = _set(scale, scales, places) if own_scales else scale
        parts.append((_set(stored, rows, places), scale))
    (key, k_scale), (value, v_scale) = parts
    return Cache(key, value, k_scale, v_scale)


def _fixed_scales(scale: Array | None, places: _Places) -> Any:
    """What the places that new tokens go to are quantised with: [B, T | 1, K]."""
    if scale is None:
        return 1.0
    return scale if places.page is None else scale.at[places.page, 0].get(mode="clip")


def _set(stored: Any, rows: Array, places: _Places) -> Array:
    if places.page is not None:
        return stored.at[places.page, places.row].set(rows, mode="drop", unique_indices=True)
    set_rows = lambda stored, row, new: stored.at[row].set(new, mode="drop", unique_indices=True)  # noqa: E731
    return jax.vmap(set_rows)(stored, places.row, rows)
