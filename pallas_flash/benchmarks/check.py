"""Is a result right? Standard attention in float32, and how far a result is from it.

The scores are never held as a whole: a block of queries of one head at a time. All sequences of a batch are laid end to
end and every mask is one of ids and positions that are traced, so that workloads of the same number of tokens share one
program, whatever their length and mask.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.benchmarks.cases import Inputs, Workload
from pallas_flash.spec import Array

BLOCK_Q = 1024
UNBOUNDED = 2**30
NAMES = ("out", "dq", "dk", "dv")
dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Results(NamedTuple):
    """What a workload computes. A pass that does not compute an entry has None there."""

    out: Array | None = None  # [B, S, N, Hv]
    dq: Array | None = None  # [B, S, N, H]
    dk: Array | None = None  # [B, S, K, H]
    dv: Array | None = None  # [B, S, K, Hv]


def budget(dtype: Any) -> dict[str, float]:
    """The largest relative error that is not called wrong: a few roundings to the dtype (for float32: of long sums).
    What a wrong tile or a mask that is off by one does is far beyond it."""
    unit = 2**-18 if jnp.dtype(dtype) == jnp.float32 else float(jnp.finfo(dtype).eps) / 2
    return {"out": 2 * unit, "dq": 4 * unit, "dk": 4 * unit, "dv": 4 * unit}


class _Places(NamedTuple):
    """Which rows attend which: those of equal id, by their positions within a sequence."""

    ids: Array  # int32 [rows]
    positions: Array  # int32 [rows]


def expected(workload: Workload, inputs: Inputs) -> Results:
    """The float32 results, from the same inputs."""
    w = workload
    rows = w.batch * w.seq_len
    sequence = np.repeat(np.arange(w.batch, dtype=np.int32), w.seq_len)
    ids = jnp.asarray(sequence)
    if inputs.packing is not None:
        ids = ids * w.documents + inputs.packing.segment_ids.reshape(-1)
    places = _Places(ids, jnp.asarray(np.tile(np.arange(w.seq_len, dtype=np.int32), w.batch)))
    left = np.int32(UNBOUNDED if w.window is None else w.window)
    right = np.int32(0 if w.is_causal else UNBOUNDED)
    flat = [x.reshape(rows, *x.shape[2:]) for x in inputs[:4]]
    results = _standard(*flat, places, (left, right), w.soft_cap)
    return Results(*(x.reshape(w.batch, w.seq_len, *x.shape[1:]) for x in results))


@functools.partial(jax.jit, static_argnums=6)
def _standard(
    q: Array, k: Array, v: Array, dout: Array, places: _Places, bounds: Any, soft_cap: float | None
) -> Results:
    """[rows, heads, dim] each."""
    rows, heads, _ = q.shape
    group = heads // k.shape[1]
    block = min(BLOCK_Q, rows)
    padding = -rows % block

    def blocks(x: Array, fill: int = 0) -> Array:
        widths = ((0, padding), *((0, 0) for _ in x.shape[1:]))
        return jnp.pad(x, widths, constant_values=fill).reshape(-1, block, *x.shape[1:])

    q_places = _Places(blocks(places.ids, -1), blocks(places.positions))

    def one_head(head: Array) -> Results:
        q_h, dout_h = (lax.dynamic_index_in_dim(x, head, 1, False).astype(jnp.float32) for x in (q, dout))
        k_h, v_h = (lax.dynamic_index_in_dim(x, head // group, 1, False).astype(jnp.float32) for x in (k, v))

        def step(sums: tuple[Array, Array], xs: Any) -> Any:
            q_b, dout_b, at = xs
            distance = places.positions - at.positions[:, None]
            allowed = (places.ids == at.ids[:, None]) & (distance <= bounds[1]) & (distance >= -bounds[0])
            out, dq, dk, dv = _block(q_b, k_h, v_h, dout_b, allowed, soft_cap)
            return (sums[0] + dk, sums[1] + dv), (out, dq)

        zeros = (jnp.zeros_like(k_h), jnp.zeros_like(v_h))
        (dk, dv), (out, dq) = lax.scan(step, zeros, (blocks(q_h), blocks(dout_h), q_places))
        out, dq = (x.reshape(-1, x.shape[-1])[:rows] for x in (out, dq))
        return Results(out, dq, dk, dv)

    each = lax.map(one_head, jnp.arange(heads))
    dk, dv = (x.reshape(-1, group, *x.shape[1:]).sum(1) for x in (each.dk, each.dv))
    return Results(*(jnp.swapaxes(x, 0, 1) for x in (each.out, each.dq, dk, dv)))


def _block(q: Array, k: Array, v: Array, dout: Array, allowed: Array, soft_cap: float | None) -> Results:
    """A block of queries against all keys, forward and backward; rows without keys give 0."""
    scale = q.shape[-1] ** -0.5
    logits, slope = scale * dot(q, k.T), scale
    if soft_cap is not None:
        ratio = jnp.tanh(logits / soft_cap)
        logits, slope = soft_cap * ratio, scale * (1 - ratio**2)
    logits = jnp.where(allowed, logits, -jnp.inf)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    p = jnp.exp(logits - jnp.where(largest == -jnp.inf, 0, largest))
    total = jnp.sum(p, axis=-1, keepdims=True)
    p = p / jnp.where(total == 0, 1, total)
    out = dot(p, v)
    delta = jnp.sum(out * dout, axis=-1, keepdims=True)
    ds = p * (dot(dout, v.T) - delta) * slope
    return Results(out, dot(ds, k), dot(ds.T, q), dot(p.T, dout))


def relative_errors(got: Results, want: Results) -> dict[str, float]:
    """Frobenius norm of the difference over that of the expected, for each entry that was computed."""
    pairs = zip(NAMES, got, want, strict=True)
    errors = {name: _relative_error(g, w) for name, g, w in pairs if g is not None}
    return {name: float(error) for name, error in errors.items()}


@jax.jit
def _relative_error(got: Array, want: Array) -> Array:
    return jnp.linalg.norm((got.astype(jnp.float32) - want).ravel()) / jnp.linalg.norm(want.ravel())


def too_large(errors: dict[str, float], dtype: Any) -> dict[str, float]:
    """The errors over budget; NaN is."""
    limits = budget(dtype)
    return {name: error for name, error in errors.items() if not error <= limits[name]}
