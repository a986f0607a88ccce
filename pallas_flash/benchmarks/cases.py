"""The workloads: shapes that are published or in use, what they cost at least, and their inputs."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.spec import Array

PASSES = ("forward", "backward", "forward+backward")
HIDDEN, TOKENS = 2048, 16384  # of FlashAttention-3's published grid
DISTRIBUTION = "standard normal; documents of a packed sequence: cuts drawn uniformly, seed 0"


@dataclasses.dataclass(frozen=True)
class Workload:
    """One attention call. window: keys before a query that it sees beside its own; None: all. documents: how many of
    random length are packed into each sequence; 0: not packed."""

    name: str
    batch: int
    seq_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    is_causal: bool = False
    window: int | None = None
    soft_cap: float | None = None
    documents: int = 0
    dtype: str = "bfloat16"

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def local_window_size(self) -> tuple[int, int] | None:
        return None if self.window is None else (self.window, 0)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def starts(self) -> np.ndarray:
        """Where the documents of a sequence start, and the sequence's end: int32 [documents + 1]."""
        rng = np.random.default_rng(0)
        cuts = rng.choice(np.arange(1, self.seq_len), max(self.documents, 1) - 1, replace=False)
        return np.concatenate([[0], np.sort(cuts), [self.seq_len]]).astype(np.int32)

    def pairs(self) -> int:
        """(query, key) pairs that the mask allows, of one head of one sequence."""
        lengths = np.diff(self.starts()).tolist()
        if not self.is_causal:
            assert self.window is None, "a window counts backwards from the query of a causal call"
            return sum(n * n for n in lengths)
        seen = self.seq_len if self.window is None else self.window + 1
        return sum(n * (n + 1) // 2 - max(n - seen, 0) * (max(n - seen, 0) + 1) // 2 for n in lengths)

    def flops(self, passed: str) -> int:
        """Of the matrix products over allowed pairs: q k^T and p v forward; again q k^T, and dout v^T, p^T dout, ds k
        and ds^T q backward."""
        dims = {"forward": (1, 1), "backward": (3, 2), "forward+backward": (4, 3)}[passed]
        per_pair = 2 * (dims[0] * self.head_dim + dims[1] * self.dim_v)
        return self.batch * self.num_q_heads * self.pairs() * per_pair

    def min_bytes(self, passed: str) -> int:
        """Of device memory if each input is read and each result written once. Forward: q, k, v; out. Backward: q, k,
        v, out, dout and the log-sum-exp; dq, dk, dv. Both: the two added, as out and the log-sum-exp go through
        memory between them."""
        tokens = self.batch * self.seq_len
        q, out = (tokens * self.num_q_heads * dim * self.itemsize for dim in (self.head_dim, self.dim_v))
        kv = tokens * self.num_kv_heads * (self.head_dim + self.dim_v) * self.itemsize
        lse = 4 * tokens * self.num_q_heads
        each = {"forward": q + kv + out + lse, "backward": 2 * (q + kv + out) + lse}
        return each[passed] if passed in each else sum(each.values())


class Packing(NamedTuple):
    """The documents of packed sequences, in the two forms that implementations take."""

    segment_ids: Array  # int32 [B, S]
    starts: Array  # int32 [documents + 1], of each sequence


class Inputs(NamedTuple):
    q: Array  # [B, S, N, H]
    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, Hv]
    dout: Array  # [B, S, N, Hv]
    packing: Packing | None


def make_inputs(workload: Workload, seed: int) -> Inputs:
    w = workload
    lead, heads = (w.batch, w.seq_len), (w.num_q_heads, w.num_kv_heads)
    shapes = [
        (*lead, heads[0], w.head_dim),
        (*lead, heads[1], w.head_dim),
        (*lead, heads[1], w.dim_v),
        (*lead, heads[0], w.dim_v),
    ]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    # Flat, so that shapes of one size share a program.
    drawn = (jax.random.normal(key, (math.prod(s),), w.dtype).reshape(s) for key, s in zip(keys, shapes, strict=True))
    q, k, v, dout = drawn
    return Inputs(q, k, v, dout, _packing(w))


def _packing(workload: Workload) -> Packing | None:
    if not workload.documents:
        return None
    starts = workload.starts()
    ids = np.repeat(np.arange(workload.documents, dtype=np.int32), np.diff(starts))
    return Packing(jnp.asarray(np.tile(ids, (workload.batch, 1))), jnp.asarray(starts))


def _paper_grid() -> Iterator[Workload]:
    lengths, dims = (512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256)
    for dim, causal, length in itertools.product(dims, (False, True), lengths):
        name = f"fa3-h{dim}-{'causal' if causal else 'full'}-{length}"
        yield Workload(name, TOKENS // length, length, HIDDEN // dim, HIDDEN // dim, dim, is_causal=causal)


def _in_float16() -> Iterator[Workload]:
    """A part of the grid."""
    for workload in _paper_grid():
        if workload.seq_len in (2048, 8192) and workload.head_dim < 256:
            yield dataclasses.replace(workload, name=f"fp16-{workload.name.removeprefix('fa3-')}", dtype="float16")


def _models() -> Iterator[Workload]:
    causal: dict[str, Any] = {"is_causal": True}
    yield Workload("gpt2-full-1024", 64, 1024, 16, 16, 64)
    yield Workload("gpt2-causal-1024", 64, 1024, 16, 16, 64, **causal)
    yield Workload("llama3-8b-8192", 2, 8192, 32, 8, 128, **causal)
    yield Workload("llama3-70b-8192", 1, 8192, 64, 8, 128, **causal)
    yield Workload("gemma2-9b-global-8192", 2, 8192, 16, 8, 256, soft_cap=50.0, **causal)
    yield Workload("gemma2-9b-local-8192", 2, 8192, 16, 8, 256, soft_cap=50.0, window=4095, **causal)
    yield Workload("mistral-7b-16384", 1, 16384, 32, 8, 128, window=4095, **causal)
    yield Workload("causal-32768", 1, 32768, 16, 16, 128, **causal)  # the window and the documents are parts of it
    yield Workload("window-1024-32768", 1, 32768, 16, 16, 128, window=1023, **causal)
    yield Workload("deepseek-mla-4096", 1, 4096, 128, 128, 192, 128, **causal)
    yield Workload("packed-full-32768", 1, 32768, 16, 16, 128, documents=16)
    yield Workload("packed-causal-32768", 1, 32768, 16, 16, 128, documents=16, **causal)


def _quick() -> Iterator[Workload]:
    yield Workload("quick-causal-256", 2, 256, 4, 2, 32, is_causal=True)
    yield Workload("quick-packed-256", 1, 256, 2, 2, 32, documents=4)
    yield Workload("quick-window-cap-256", 1, 256, 2, 1, 48, 32, True, 63, 20.0)


QUICK = tuple(_quick())
WORKLOADS = (*_paper_grid(), *_in_float16(), *_models())


def select[W: Any](patterns: list[str], workloads: tuple[W, ...]) -> list[W]:
    """Those whose names match any of the glob patterns, in the order of the list; ValueError for a pattern that matches
    none."""
    names = [w.name for w in workloads]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"--workloads {pattern}: no such workload; there are {', '.join(names)}")
    return [w for w in workloads if any(fnmatch.fnmatchcase(w.name, pattern) for pattern in patterns)]
