"""The arguments of a decoding call, checked once and brought into the one form that everything below works on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import masks
from pallas_flash.checks import Sizes, checked_array, per_batch, require, require_known_sizes
from pallas_flash.decode_spec import DecodeOperands, DecodeSpec
from pallas_flash.spec import Array, accumulator_dtype, described, vary, varying_axes
from pallas_flash.validation import (
    DTYPES,
    checked_scale,
    checked_sinks,
    checked_soft_cap,
    require_groups,
    traced_score_mod,
    window_sides,
)

MAX_NEW_TOKENS = 16  # of flash_decode: what one tile of the matrix unit holds beside the heads of a group
QUANTISED = ("int8", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class DecodeArguments:
    """What flash_decode or paged_flash_decode was called with. See their docstrings."""

    query: Any
    key: Any
    value: Any
    kv_lengths: Any
    page_table: Any = None
    query_lengths: Any = None
    scale: Any = None
    local_window_size: Any = None
    logits_soft_cap: Any = None
    sinks: Any = None
    score_mod: Any = None
    k_scale: Any = None
    v_scale: Any = None
    return_residual: Any = False

    @property
    def paged(self) -> bool:
        return self.page_table is not None

    @property
    def names(self) -> tuple[str, str]:
        return ("key_pages", "value_pages") if self.paged else ("key_cache", "value_cache")


class DecodeCall(NamedTuple):
    """A checked call. `lead` are the batch dimensions as given; inside there is exactly one, their product."""

    spec: DecodeSpec
    operands: DecodeOperands
    lead: tuple[int, ...]


def canonicalise(arguments: DecodeArguments) -> DecodeCall:
    """Check every argument; ValueError names the argument, what came and what is wanted."""
    q, k, v, table, sizes = _tensors(arguments)
    require(
        isinstance(arguments.return_residual, bool | np.bool_), "return_residual", arguments.return_residual, "a bool"
    )
    static_scale, scale = checked_scale(arguments.scale, q)
    dtype = accumulator_dtype(q.dtype)
    score_mod, captures = traced_score_mod(arguments.score_mod, dtype, varying_axes((q, k, v)))
    spec = DecodeSpec(
        scale=static_scale,
        window=_window(arguments.local_window_size),
        soft_cap=checked_soft_cap(arguments.logits_soft_cap),
        score_mod=score_mod,
    )
    k_scale = quantisation_scale("k_scale", arguments.k_scale, k)
    v_scale = quantisation_scale("v_scale", arguments.v_scale, v)
    if not arguments.paged:
        k, v = (x.reshape(sizes.batch, *x.shape[-3:]) for x in (k, v))
        k_scale, v_scale = (x if x is None else x.reshape(sizes.batch, *x.shape[-2:]) for x in (k_scale, v_scale))
    operands = DecodeOperands(
        q.reshape(sizes.batch, *q.shape[-3:]),
        k,
        v,
        _kv_lengths(arguments.kv_lengths, sizes),
        page_table=table,
        q_lengths=_query_lengths(arguments.query_lengths, sizes),
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=checked_sinks(arguments.sinks, sizes),
        scale=scale,
    )
    axes = varying_axes(operands)
    varied = jax.tree.map(lambda x: vary(x, axes), operands)  # inside shard_map, all over the same mesh axes
    return DecodeCall(spec, varied._replace(score_mod=captures), sizes.lead)


def _tensors(arguments: DecodeArguments) -> tuple[Array, Array, Array, Array | None, Sizes]:
    k_name, v_name = arguments.names
    named = {"query": arguments.query, k_name: arguments.key, v_name: arguments.value}
    require_known_sizes(named | {"page_table": arguments.page_table})
    q, k, v = (checked_array(name, value, np.number, "an array of numbers") for name, value in named.items())
    require(q.dtype.name in DTYPES, "query", q, f"of a dtype out of {', '.join(DTYPES)}")
    for name, x in ((k_name, k), (v_name, v)):
        require(x.dtype.name in (q.dtype.name, *QUANTISED), name, x, f"{q.dtype} as query, or {' or '.join(QUANTISED)}")
    require(k.dtype == v.dtype, v_name, v, f"{k.dtype} as {k_name}")
    require(q.ndim >= 3, "query", q, "of shape [*B, T, N, H]")
    lead, (q_len, num_q_heads, head_dim) = q.shape[:-3], q.shape[-3:]
    if arguments.paged:
        table = page_table_of(arguments.page_table, lead, "query")
        k_wanted, v_wanted, k_lead = "[P, page_size, K, H]", "[P, page_size, K, Hv]", k.shape[:1]
    else:
        table, k_wanted, v_wanted, k_lead = None, "[*B, S, K, H]", "[*B, S, K, Hv]", lead
        wanted = f"at most {MAX_NEW_TOKENS} new tokens [*B, T <= {MAX_NEW_TOKENS}, N, H]; flash_attention with "
        require(q_len <= MAX_NEW_TOKENS, "query", q, wanted + "query_offset takes more")
    fits = k.ndim == len(k_lead) + 3 and k.shape == (*k_lead, *k.shape[-3:-1], head_dim)
    require(fits, k_name, k, f"{k_wanted} for query {described(q)}")
    require(v.ndim == k.ndim and v.shape[:-1] == k.shape[:-1], v_name, v, f"{v_wanted} for {k_name} {described(k)}")
    rows, num_kv_heads = k.shape[-3:-1]
    require_groups(num_q_heads, num_kv_heads)
    batch = math.prod(lead)
    if table is not None:
        rows *= table.shape[1]
    require(rows < masks.FAR, k_name, k, f"shorter: a sequence's capacity of {rows} rows must stay below {masks.FAR}")
    return q, k, v, table, Sizes(lead, batch, q_len, rows, num_q_heads, num_kv_heads)


def page_table_of(page_table: Any, lead: tuple[int, ...], beside: str) -> Array:
    """int32 [B, max_pages]; entries beyond int32 stay out of range."""
    table = masks.integers("page_table", page_table)
    wanted = f"of shape [*B, max_pages] with {beside}'s *B {list(lead)}"
    require(table.ndim == len(lead) + 1 and table.shape[:-1] == lead, "page_table", table, wanted)
    table = jnp.asarray(table) if table.dtype == np.int32 else masks.clamp(table, -1, 2**31 - 1)
    return table.reshape(math.prod(lead), table.shape[-1])


def _kv_lengths(lengths: Any, sizes: Sizes) -> Array:
    """int32 [B]. What is int32 already passes as it is: clamping it would be a program of its own on a GPU."""
    array = masks.integers("kv_lengths", lengths)
    if array.dtype == np.int32 and array.shape == sizes.lead:
        return jnp.asarray(array).reshape(sizes.batch)
    return per_batch("kv_lengths", array, sizes, 0, sizes.kv_len)


def _query_lengths(lengths: Any, sizes: Sizes) -> Array | None:
    return None if lengths is None else per_batch("query_lengths", lengths, sizes, 0, sizes.q_len)


def _window(window: Any) -> int | None:
    """The left side: the right one adds nothing to causal."""
    left, _ = window_sides(window)
    return None if left in (None, -1) else min(int(left), masks.FAR // 2)


def quantisation_scale(name: str, scale: Any, cache: Array) -> Array | None:
    """The factors of keys or values [*lead, rows, heads, width]: float32 [*lead, rows | 1, heads], None for none."""
    if cache.dtype.name not in QUANTISED:
        require(scale is None, name, scale, f"None beside keys and values in {cache.dtype}")
        return None
    if scale is None:
        require(cache.dtype != jnp.int8, name, scale, "given beside keys and values in int8")
        return None
    array = checked_array(name, scale, np.floating, "a float32 array")
    require(array.dtype == np.float32, name, array, "a float32 array")
    *lead, rows, heads, _ = cache.shape
    wanted = f"of shape {[*lead, rows, heads]}, or {[*lead, 1, heads]} for one of all rows"
    require(array.shape in ((*lead, rows, heads), (*lead, 1, heads)), name, array, wanted)
    return array
