"""The pass `decode`: a few new tokens against a long cache. Its workloads, their inputs, what is compared and checked.

Decoding is bound by memory: the cache is read once, so a rate is bytes of keys and values over time.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash import dispatch, flash_attention, flash_decode, paged_flash_decode, quantise
from pallas_flash.benchmarks import peers, programs
from pallas_flash.benchmarks.check import Results
from pallas_flash.benchmarks.peers import Peer
from pallas_flash.benchmarks.programs import Program
from pallas_flash.spec import Array

PASS = "decode"
PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class DecodeWorkload:
    """One call: every sequence has `length` tokens, the new ones included, in a cache that could hold `capacity`.
    page_size: None for a contiguous cache. cache_dtype: int8 and float8_e4m3fn have one scale a token."""

    name: str
    batch: int
    length: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    new_tokens: int = 1
    capacity: int | None = None
    page_size: int | None = None
    window: int | None = None
    cache_dtype: str = "bfloat16"
    dtype: str = "bfloat16"

    @property
    def rows(self) -> int:
        """Of the cache, for each sequence."""
        return self.length if self.capacity is None else self.capacity

    @property
    def is_quantised(self) -> bool:
        return self.cache_dtype != self.dtype

    def seen(self) -> int:
        """Keys of a sequence that some new token attends to."""
        return self.length if self.window is None else min(self.length, self.window + self.new_tokens)

    def pairs(self) -> int:
        """(query, key) pairs of one head of one sequence."""
        first = self.length - self.new_tokens
        ends = range(first + 1, self.length + 1)
        return sum(end if self.window is None else min(end, self.window + 1) for end in ends)

    def flops(self, passed: str) -> int:
        return 4 * self.batch * self.num_q_heads * self.head_dim * self.pairs()

    def min_bytes(self, passed: str) -> int:
        """Keys, values and scales that are seen, once; queries and results."""
        row = self.head_dim * jnp.dtype(self.cache_dtype).itemsize + (4 if self.is_quantised else 0)
        cache = 2 * self.batch * self.seen() * self.num_kv_heads * row
        return (
            cache + 2 * self.batch * self.new_tokens * self.num_q_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        )


class DecodeInputs(NamedTuple):
    q: Array  # [B, T, N, H]
    k: Array  # [B, S, K, H] or [P, page_size, K, H]
    v: Array
    lengths: Array  # int32 [B]
    table: Array | None
    k_scale: Array | None
    v_scale: Array | None


Attend = Callable[[DecodeInputs], Array]


def make_inputs(workload: DecodeWorkload, seed: int) -> DecodeInputs:
    w = workload
    q_key, k_key, v_key = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(q_key, (w.batch, w.new_tokens, w.num_q_heads, w.head_dim), w.dtype)
    (k, k_scale), (v, v_scale) = (_rows(key, w) for key in (k_key, v_key))
    lengths = jnp.full(w.batch, w.length, jnp.int32)
    if w.page_size is None:
        return DecodeInputs(q, k, v, lengths, None, k_scale, v_scale)
    pages = w.batch * w.rows // w.page_size
    order = np.random.default_rng(seed).permutation(pages).astype(np.int32)
    k, v, k_scale, v_scale = (
        x if x is None else x.reshape(pages, w.page_size, *x.shape[2:]) for x in (k, v, k_scale, v_scale)
    )
    return DecodeInputs(q, k, v, lengths, jnp.asarray(order.reshape(w.batch, -1)), k_scale, v_scale)


@partial(jax.jit, static_argnums=1)
def _rows(key: Array, w: DecodeWorkload) -> tuple[Array, Array | None]:
    """Random rows of a cache, one sequence after the other: what drawing needs beside them stays small."""

    def one(key: Array) -> tuple[Array, Array | None]:
        x = jax.random.normal(key, (w.rows, w.num_kv_heads, w.head_dim), w.dtype)
        return quantise(x, w.cache_dtype) if w.is_quantised else (x, None)

    return lax.map(one, jax.random.split(key, w.batch))


@partial(jax.jit, static_argnums=0)
def expected(workload: DecodeWorkload, inputs: DecodeInputs) -> Results:
    """Standard attention in float32, one sequence after the other."""
    w = workload
    position = w.length - w.new_tokens + jnp.arange(w.new_tokens)[:, None]
    distance = position - jnp.arange(w.rows)
    seen = (distance >= 0) & (distance <= (w.rows if w.window is None else w.window))

    def rows(x: Array, scale: Array | None, b: Array) -> Array:
        take = lambda x: x[b] if inputs.table is None else x[inputs.table[b]].reshape(w.rows, *x.shape[2:])  # noqa: E731
        exact = take(x).astype(jnp.float32)
        return exact if scale is None else exact * take(scale)[..., None]

    def one(b: Array) -> Array:
        k, v = rows(inputs.k, inputs.k_scale, b), rows(inputs.v, inputs.v_scale, b)
        q = inputs.q[b].astype(jnp.float32).reshape(w.new_tokens, w.num_kv_heads, -1, w.head_dim)
        product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
        s = jnp.where(seen, product("tkgh,skh->kgts", q, k) * w.head_dim**-0.5, -jnp.inf)
        return product("kgts,skh->tkgh", jax.nn.softmax(s, axis=-1), v).reshape(inputs.q.shape[1:])

    return Results(lax.map(one, jnp.arange(w.batch)))


def lower(workload: DecodeWorkload, peer: Peer, kind: str, sets: list[DecodeInputs]) -> Callable[[], Program]:
    assert kind == PASS and peer.attend is not None
    attend: Any = peer.attend(workload)
    return partial(programs.finish, jax.jit(attend).lower(sets[0]), [(inputs,) for inputs in sets], Results)


def all_peers() -> tuple[Peer, ...]:
    """Our implementations of decoding; the Hopper forward kernel, which does not split the keys; what others have."""
    ours = (Peer(name, partial(_ours, name)) for name in dispatch.names(dispatch.DECODE_TABLE))
    return (
        *ours,
        Peer("sm90-unsplit", _unsplit),
        Peer("jax.nn-xla", partial(_jax_nn, "xla")),
        Peer("jax.nn-cudnn", partial(_jax_nn, "cudnn")),
        Peer("fa3", _dew_flash_attn),
        Peer("tokamax", _tokamax),
    )


def _ours(name: str, workload: DecodeWorkload) -> Any:
    def attend(i: DecodeInputs) -> Array:
        options: Any = {"k_scale": i.k_scale, "v_scale": i.v_scale, "local_window_size": workload.window}
        if i.table is not None:
            return paged_flash_decode(i.q, i.k, i.v, i.table, i.lengths, **options, implementation=name)
        return flash_decode(i.q, i.k, i.v, i.lengths, **options, implementation=name)

    return attend


def _plain(workload: DecodeWorkload, *, takes_lengths: bool) -> None:
    """Refuse what plain attention of one query against a dense cache is not."""
    w = workload
    reasons = {
        "no pages": w.page_size is not None,
        "no quantised cache": w.is_quantised,
        "no new tokens at the end of a cache": w.new_tokens > 1,
        "no window that ends at a length": w.window is not None,
        "no lengths": w.rows != w.length and not takes_lengths,
    }
    peers.refuse(next((reason for reason, applies in reasons.items() if applies), None))


def _unsplit(workload: DecodeWorkload) -> Any:
    _plain(workload, takes_lengths=True)
    return lambda i: flash_attention(i.q, i.k, i.v, key_value_seq_lengths=i.lengths, implementation="sm90")


def _jax_nn(implementation: str, workload: DecodeWorkload) -> Any:
    _plain(workload, takes_lengths=True)
    options: Any = {"implementation": implementation}
    return lambda i: jax.nn.dot_product_attention(i.q, i.k, i.v, key_value_seq_lengths=i.lengths, **options)


def _dew_flash_attn(workload: DecodeWorkload) -> Any:
    dew: Any = importlib.import_module("dew_flash_attn")
    _plain(workload, takes_lengths=False)
    return lambda i: dew.flash_mha(i.q, i.k, i.v, is_causal=False, window_size=(-1, -1))


def _tokamax(workload: DecodeWorkload) -> Any:
    tokamax = peers.import_tokamax()
    _plain(workload, takes_lengths=False)
    return lambda i: tokamax.dot_product_attention(i.q, i.k, i.v, implementation="mosaic")


def _workloads() -> Iterator[DecodeWorkload]:
    lengths = {"4k": 4096, "32k": 32768, "128k": 131072}
    for batch, (name, length) in itertools.product((1, 8, 64), lengths.items()):
        yield DecodeWorkload(f"decode-b{batch}-{name}", batch, length)
    for batch, (name, length) in itertools.product((1, 8, 64), lengths.items()):
        yield DecodeWorkload(f"decode-paged-b{batch}-{name}", batch, length, page_size=PAGE_SIZE)
    for dtype, batch in itertools.product(("int8", "float8_e4m3fn"), (1, 8, 64)):
        yield DecodeWorkload(f"decode-{dtype[:6].rstrip('_')}-b{batch}-128k", batch, 131072, cache_dtype=dtype)
    yield DecodeWorkload("decode-int8-paged-b8-128k", 8, 131072, cache_dtype="int8", page_size=PAGE_SIZE)
    for batch, name in itertools.product((1, 8), ("32k", "128k")):
        yield DecodeWorkload(f"decode-mqa-b{batch}-{name}", batch, lengths[name], num_kv_heads=1)
    yield DecodeWorkload("decode-mha-b8-32k", 8, 32768, num_kv_heads=32)
    yield DecodeWorkload("decode-4-tokens-b8-32k", 8, 32768, new_tokens=4)
    yield DecodeWorkload("decode-window-b8-128k", 8, 131072, window=4095)
    yield DecodeWorkload("decode-short-b8-64-of-64k", 8, 64, capacity=65536)


WORKLOADS = tuple(_workloads())
QUICK = (
    DecodeWorkload("quick-decode", 2, 96, 4, 2, 32, capacity=128, new_tokens=2, window=70),
    DecodeWorkload("quick-decode-one", 2, 96, 4, 2, 32),
    DecodeWorkload("quick-decode-paged-int8", 2, 96, 4, 2, 32, capacity=128, page_size=16, cache_dtype="int8"),
)
