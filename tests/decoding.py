"""What the tests of decoding share: random calls, the oracle's answer, and the same cache as pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_decode, paged_flash_decode, xla_decode
from tests import oracles

Call = dict[str, Any]

LAYOUTS = ("cache", "pages")
PAGE_SIZE = 4


class Sizes(NamedTuple):
    """Of a call over four sequences; all different unless told otherwise."""

    q_len: int = 3
    kv_len: int = 40
    heads: tuple[int, int] = (6, 2)
    dims: tuple[int, int] = (8, 5)


ODD = Sizes()


def random_call(sizes: Sizes = ODD, *, seed: int = 0, dtype: Any = np.float32, **options: Any) -> Call:
    """Lengths from empty to full, and options under the public names."""
    rng = np.random.default_rng(seed)
    q_len, kv_len, heads, dims = sizes
    shapes = {
        "query": (4, q_len, heads[0], dims[0]),
        "key": (4, kv_len, heads[1], dims[0]),
        "value": (4, kv_len, heads[1], dims[1]),
    }
    arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return arrays | {"kv_lengths": np.array([kv_len, 0, 17, 2], np.int32)} | options


def oracle(call: Call, arithmetic: Any = oracles.FLOAT64) -> oracles.Result:
    """What the call means, by the formulas."""
    q_len, capacity = call["query"].shape[1], call["key"].shape[1]
    lengths = np.clip(call["kv_lengths"], 0, capacity)
    real = np.clip(call.get("query_lengths", q_len), 0, q_len)
    window, score_mod = call.get("local_window_size"), call.get("score_mod")
    return oracles.attention(
        *(call[name] for name in ("query", "key", "value")),
        arithmetic=arithmetic,
        is_causal=True,
        query_offset=lengths - real,
        q_lengths=real,
        kv_lengths=lengths,
        window=None if window is None else (window, None),
        scale=call.get("scale"),
        soft_cap=call.get("logits_soft_cap"),
        sinks=call.get("sinks"),
        score_mod=None if score_mod is None else (score_mod, lambda *_: 1.0),
    )


def pages_of(call: Call, *, page_size: int = PAGE_SIZE, seed: int = 0, junk: Any = np.nan) -> Call:
    """The same cache in pages of random order: page 0 and all unused ones hold junk, unused entries point anywhere."""
    rng = np.random.default_rng([seed, 1])
    batch, capacity = call["key"].shape[:2]
    max_pages = capacity // page_size
    num_pages = batch * max_pages + 3
    pages = 1 + rng.permutation(num_pages - 1)[: batch * max_pages].reshape(batch, max_pages)
    used = -(-np.clip(call["kv_lengths"], 0, capacity) // page_size)
    table = np.where(np.arange(max_pages) < used[:, None], pages, rng.choice([-1, 0, 10**6, num_pages], pages.shape))
    paged = dict(call, page_table=table.astype(np.int32))
    for name in ("key", "value", "k_scale", "v_scale"):
        rows = call.get(name)
        if rows is None or rows.shape[1] == 1:
            continue
        pool = np.zeros((num_pages, page_size, *rows.shape[2:]), rows.dtype)
        pool[:] = 77 if rows.dtype == np.int8 else junk
        for b in range(batch):
            n = used[b]
            pool[pages[b, :n]] = rows[b].reshape(max_pages, page_size, *rows.shape[2:])[:n]
        paged[name] = pool
    return paged


def apply(call: Call, decoder: str | None = None, **options: Any) -> Any:
    """The public function that the call is for."""
    arguments = dict(call)
    tensors = [arguments.pop(name) for name in ("query", "key", "value")]
    function = paged_flash_decode if "page_table" in arguments else flash_decode
    return function(*tensors, **arguments, **options, implementation=decoder)


def decode(call: Call, decoder: str | None = "xla", *, jit: bool = False) -> Any:
    """(out, lse); with jit, every array is traced. Without, hundreds of calls of one shape compile next to nothing."""
    narrow = lambda x: isinstance(x, np.ndarray | jax.Array) and x.dtype != np.int64  # noqa: E731
    arrays = {name: jnp.asarray(value) for name, value in call.items() if narrow(value)}
    static = {name: value for name, value in call.items() if name not in arrays}
    run = lambda arrays: apply(arrays | static, decoder, return_residual=True)  # noqa: E731
    if jit or decoder != "xla":
        return jax.jit(run)(arrays)
    with jax.disable_jit():
        return run(arrays)


def check(call: Call, layout: str, *, factor: float = 2.0, jit: bool = False) -> Any:
    """Within the error budget of plain attention in the call's dtype; the arrays' unreadable rows are junk."""
    dtype = call["query"].dtype
    want, plain = (oracle(call, arithmetic) for arithmetic in (oracles.FLOAT64, oracles.plain(dtype)))
    out, lse = decode(pages_of(call) if layout == "pages" else with_junk(call), jit=jit)
    assert out.dtype == dtype and lse.dtype == oracles.plain(dtype).compute
    eps = float(jnp.finfo(dtype).eps)
    for name, floor in (("out", 4e-6 + eps / 2), ("lse", 1e-5)):
        exact, rough = getattr(want, name), getattr(plain, name)
        got = {"out": out, "lse": lse}[name]
        oracles.assert_within_budget(got, exact, rough, factor=factor, floor=floor, name=name)
    return out, lse


def with_junk(call: Call, junk: Any = np.nan) -> Call:
    """NaN behind every length, in keys, values and scales."""
    rows = np.arange(call["key"].shape[1])
    behind = rows >= np.clip(call["kv_lengths"], 0, len(rows))[:, None]
    result = dict(call)
    for name in ("key", "value", "k_scale", "v_scale"):
        array = call.get(name)
        if array is not None and array.shape[1] == len(rows) and array.dtype != np.int8:
            result[name] = np.where(behind.reshape(*behind.shape, *[1] * (array.ndim - 2)), junk, array).astype(
                array.dtype
            )
    return result


def quantised(call: Call, dtype: Any, per: str, seed: int = 0) -> tuple[Call, Call]:
    """The call with a quantised cache, one factor a "token" or "sequence", and with what that cache stands for."""
    rng = np.random.default_rng([seed, 2])
    stored, meant = dict(call), dict(call)
    for name, scale_name in (("key", "k_scale"), ("value", "v_scale")):
        batch, rows, heads, width = call[name].shape
        values = np.asarray(jnp.asarray(rng.normal(size=(batch, rows, heads, width)) * 40).astype(dtype))
        scale = rng.uniform(0.005, 0.03, (batch, rows if per == "token" else 1, heads)).astype(np.float32)
        stored |= {name: values, scale_name: scale}
        meant[name] = values.astype(np.float32) * scale[..., None]
    return stored, meant


@contextlib.contextmanager
def small_chunks(size: int = 8, block_q: int = 128) -> Iterator[None]:
    """Let `xla` cut the cache into chunks of this size, so that small calls have many of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MIN_CHUNK", size), ("MAX_CHUNK", size), ("BLOCK_Q", block_q)):
            patch.setattr(xla_decode, name, value)
        jax.clear_caches()
        yield
    jax.clear_caches()
