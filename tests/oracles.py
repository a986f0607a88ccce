"""Attention in NumPy, written from the formulas and from nothing of the package: the meaning of every argument.

In float64 it is the truth. In a smaller `Arithmetic` it is plain attention as one writes it in that dtype, and its
error is the budget of an implementation (`assert_within_budget`). What takes no part is removed by selection, so that
NaN and Inf in masked places have no effect by construction. Shapes: q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

NDArray = np.ndarray[Any, Any]


class Arithmetic(NamedTuple):
    """`compute` holds logits, softmax and sums; what plain attention stores goes through `storage`."""

    compute: Any
    storage: Any

    def stored(self, x: NDArray) -> NDArray:
        return x.astype(self.storage).astype(self.compute)


FLOAT64 = Arithmetic(np.float64, np.float64)


def plain(dtype: Any) -> Arithmetic:
    """Plain attention on inputs of this dtype: softmax in float32, its weights and all results in the inputs' dtype."""
    return FLOAT64 if np.dtype(dtype) == np.float64 else Arithmetic(np.float32, np.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One call. Lengths, offsets and prefix are ints or [B]; bias, mask and keep broadcast to [B, N, T, S]."""

    q: Any
    k: Any
    v: Any
    bias: Any = None
    mask: Any = None
    scale: Any = None
    is_causal: bool = False
    q_lengths: Any = None
    kv_lengths: Any = None
    window: Any = None  # int | (left, right), None or -1: unbounded
    query_offset: Any = 0
    segment_ids: Any = None  # [B, S] for both, or ([B, T], [B, S])
    prefix: Any = None
    chunk: int | None = None
    predicate: Callable[..., Any] | None = None  # (b, h, q_pos, kv_pos) -> bool, vectorised
    soft_cap: float | None = None
    sinks: Any = None  # [N]
    score_mod: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # f and df/dscore, vectorised
    keep: Any = None  # dropout's mask, True = kept
    rate: float = 0.0


class Index(NamedTuple):
    """Batch, head, query row, query position and key of every pair, broadcastable to [B, N, T, S]."""

    b: NDArray
    h: NDArray
    row: NDArray
    q_pos: NDArray
    kv_pos: NDArray


class Result(NamedTuple):
    out: NDArray  # [B, T, N, Hv]
    lse: NDArray  # [B, T, N]
    max_logit: NDArray  # [B, N], without the sink


class Intermediates(NamedTuple):
    """Everything of the forward pass that the closed-form gradients are made of, [B, N, T, S] unless said."""

    q: NDArray  # [B, N, T, H]
    k: NDArray  # [B, N, S, H], repeated for grouped heads
    v: NDArray  # [B, N, S, Hv]
    live: NDArray
    raw: NDArray
    scale: Any
    slope: NDArray  # d logits / d (scale * raw)
    logits: NDArray  # -inf where nothing takes part
    p: NDArray
    drop: NDArray  # keep / (1 - rate)
    out: NDArray  # [B, N, T, Hv]
    lse: NDArray  # [B, N, T]
    p_sink: NDArray | None  # [B, N, T]


def attention(q: Any, k: Any, v: Any, *, arithmetic: Arithmetic = FLOAT64, **options: Any) -> Result:
    """The options are the fields of `Arguments`."""
    f = intermediates(Arguments(q, k, v, **options), arithmetic)
    max_logit = f.logits.max(axis=(2, 3), initial=-np.inf)
    return Result(f.out.transpose(0, 2, 1, 3), f.lse.transpose(0, 2, 1), max_logit)


def intermediates(a: Arguments, arithmetic: Arithmetic = FLOAT64) -> Intermediates:
    dtype = arithmetic.compute
    q, k, v = (np.asarray(x).astype(dtype).transpose(0, 2, 1, 3) for x in (a.q, a.k, a.v))
    group = heads_per_group(a)
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    shape = (*q.shape[:3], k.shape[2])
    index = index_of(a, shape)
    live = live_pairs(a, index, shape)
    scale = dtype(q.shape[-1] ** -0.5 if a.scale is None else a.scale)
    with np.errstate(invalid="ignore", over="ignore"):
        raw = np.where(live, q @ k.swapaxes(-1, -2), 0)
    logits, slope = _logits(a, raw * scale, live, index, dtype)
    sinks = None if a.sinks is None else np.broadcast_to(np.asarray(a.sinks).astype(dtype)[:, None], shape[:3])
    m = logits.max(-1, initial=-np.inf)
    m = m if sinks is None else np.maximum(m, sinks)
    safe_m = np.where(m == -np.inf, 0, m).astype(dtype)
    p = np.exp(logits - safe_m[..., None])
    total = p.sum(-1) if sinks is None else p.sum(-1) + np.exp(sinks - safe_m)
    empty = total == 0
    total = np.where(empty, 1, total).astype(dtype)
    lse = np.where(empty, -np.inf, safe_m + np.log(total)).astype(dtype)
    p = p / total[..., None]
    keep = np.ones(shape, bool) if a.keep is None else np.broadcast_to(a.keep, shape)
    drop = (keep / (1 - a.rate)).astype(dtype)
    out = arithmetic.stored(weighted_sum(arithmetic.stored(p * drop), live, v))
    # Of a sink of -inf 0, also in a row without keys, where lse is -inf too.
    p_sink = None if sinks is None else np.where(sinks == -np.inf, 0, np.exp(sinks - np.where(empty, 0, lse)))
    return Intermediates(q, k, v, live, raw, scale, slope, logits, p, drop, out, lse, p_sink)


def heads_per_group(a: Arguments) -> int:
    num_q_heads, num_kv_heads = np.shape(a.q)[2], np.shape(a.k)[2]
    return num_q_heads // num_kv_heads if num_kv_heads else 1


def _logits(a: Arguments, scores: NDArray, live: NDArray, index: Index, dtype: Any) -> tuple[NDArray, NDArray]:
    """soft_cap(score_mod(scores)) + bias, -inf where masked; and the derivative by the scores, 0 where masked."""
    slope = np.ones_like(scores)
    if a.score_mod is not None:
        f, df = a.score_mod
        place = (index.b, index.h, index.q_pos, index.kv_pos)
        slope = slope * df(scores, *place)
        scores = f(scores, *place)
    if a.soft_cap is not None:
        capped = np.tanh(scores / dtype(a.soft_cap))
        slope, scores = slope * (1 - capped**2), dtype(a.soft_cap) * capped
    if a.bias is not None:
        scores = scores + np.asarray(a.bias).astype(dtype)
    return np.where(live, scores, -np.inf).astype(dtype), np.where(live, slope, 0).astype(dtype)


def index_of(a: Arguments, shape: tuple[int, ...]) -> Index:
    b, h, row, kv = np.ogrid[tuple(slice(n) for n in shape)]
    return Index(b, h, row, row + _per_batch(a.query_offset), kv)


def live_pairs(a: Arguments, index: Index, shape: tuple[int, ...]) -> NDArray:
    """Which (query, key) pairs take part."""
    distance = index.kv_pos - index.q_pos
    live = np.ones(shape, bool)
    if a.mask is not None:
        live = live & np.asarray(a.mask)
    if a.bias is not None:
        live = live & (np.asarray(a.bias) != -np.inf)
    if a.is_causal:
        live = live & (distance <= 0)
    if a.window is not None:
        left, right = a.window if isinstance(a.window, tuple) else (a.window, a.window)
        live = live & (True if left in (None, -1) else distance >= -left)
        live = live & (True if right in (None, -1) else distance <= right)
    if a.q_lengths is not None:
        live = live & (index.row < _per_batch(a.q_lengths))
    if a.kv_lengths is not None:
        live = live & (index.kv_pos < _per_batch(a.kv_lengths))
    if a.segment_ids is not None:
        q_ids, kv_ids = a.segment_ids if isinstance(a.segment_ids, tuple) else (a.segment_ids, a.segment_ids)
        live = live & (np.asarray(q_ids)[:, None, :, None] == np.asarray(kv_ids)[:, None, None, :])
    if a.prefix is not None:
        live = live & ((distance <= 0) | (index.kv_pos < _per_batch(a.prefix)))
    if a.chunk is not None:
        live = live & (index.q_pos // a.chunk == index.kv_pos // a.chunk)
    if a.predicate is not None:
        live = live & a.predicate(index.b, index.h, index.q_pos, index.kv_pos)
    return live


def _per_batch(value: Any) -> NDArray:
    return np.asarray(value).reshape(-1, 1, 1, 1)


def weighted_sum(weights: NDArray, live: NDArray, x: NDArray) -> NDArray:
    """Sum over s of weights[..., t, s] * x[..., s, :] over live pairs; NaN where a live pair meets junk in x."""
    junk = ~np.isfinite(x)
    total = weights @ np.where(junk, 0, x)
    if not junk.any():
        return total
    return np.where(live.astype(x.dtype) @ junk.astype(x.dtype) > 0, np.nan, total).astype(x.dtype)


def gradients(
    q: Any, k: Any, v: Any, *, dout: Any = None, dlse: Any = None, arithmetic: Arithmetic = FLOAT64, **options: Any
) -> dict[str, NDArray]:
    """Closed-form gradients of sum(out * dout) + sum(lse * dlse) by q, k, v, bias, sinks, scale (those given; scale
    always). dout [B, T, N, Hv] and dlse [B, T, N] default to zero."""
    a = Arguments(q, k, v, **options)
    f = intermediates(a, arithmetic)
    dout, dlse = _cotangents(f, dout, dlse)
    with np.errstate(invalid="ignore"):
        dp = arithmetic.stored(dout @ f.v.swapaxes(-1, -2))
        dp = np.where(f.live, dp * f.drop, 0)
    delta = (f.p * dp).sum(-1)
    d_row = dlse - delta  # what every logit of the row and the sink share
    dlogits = np.where(f.live, f.p * (dp + d_row[..., None]), 0)
    grads = _collect(a, f, dlogits, d_row, dout, arithmetic)
    if arithmetic == FLOAT64:
        return grads
    dtypes = {name: getattr(getattr(a, name), "dtype", arithmetic.compute) for name in grads}
    return {name: gradient.astype(dtypes[name]) for name, gradient in grads.items()}


def rounding_units(dtype: Any) -> tuple[float, float]:
    """Of arithmetic in float32 (float64 for float64), and of results that are stored in this dtype."""
    computed = np.float64 if dtype == np.float64 else np.float32
    return float(np.finfo(computed).eps), float(ml_dtypes.finfo(dtype).eps)


def rounding_magnitudes(
    q: Any, k: Any, v: Any, *, dout: Any = None, dlse: Any = None, **options: Any
) -> dict[str, NDArray]:
    """For "out" and each of `gradients`: the root of the sum of the squares of its terms. Independent rounding errors,
    relative to each term, add up to this much times the unit of rounding."""
    a = Arguments(q, k, v, **options)
    f = intermediates(a)
    dout, dlse = (np.where(np.isfinite(x), x, 0) ** 2 for x in _cotangents(f, dout, dlse))
    finite = {name: np.where(np.isfinite(x), x, 0) for name, x in (("q", f.q), ("k", f.k), ("v", f.v))}
    f = f._replace(**finite, raw=finite["q"] ** 2 @ finite["k"].swapaxes(-1, -2) ** 2)
    if a.soft_cap is not None:  # 1 - tanh^2 has an error of a rounded 1, however small it is
        computed, stored = rounding_units(np.asarray(q).dtype)
        f = f._replace(slope=np.where(f.live, f.slope + 2 * computed / (4 * computed + stored / 4), 0))
    squared = ("q", "k", "v", "scale", "slope", "p", "drop", "p_sink")
    f = f._replace(**{name: x**2 for name in squared if (x := getattr(f, name)) is not None})
    dp = np.where(f.live, dout @ f.v.swapaxes(-1, -2) * f.drop, 0)
    d_row = dlse + (f.p * dp).sum(-1)
    dlogits = np.where(f.live, f.p * (dp + d_row[..., None]), 0)
    squares = _collect(a, f, dlogits, d_row, dout, FLOAT64)
    squares["out"] = ((f.p * f.drop) @ f.v).transpose(0, 2, 1, 3)
    return {name: np.sqrt(x) for name, x in squares.items()}


def _cotangents(f: Intermediates, dout: Any, dlse: Any) -> tuple[NDArray, NDArray]:
    """As [B, N, T, ...] in the compute dtype. A row without keys returns a constant out, and a constant lse unless it
    has a sink above -inf: what arrives there goes nowhere."""
    dtype, has_key = f.p.dtype, f.live.any(-1)
    dout = np.zeros(f.out.shape, dtype) if dout is None else np.asarray(dout).astype(dtype).transpose(0, 2, 1, 3)
    dlse = np.zeros(f.lse.shape, dtype) if dlse is None else np.asarray(dlse).astype(dtype).transpose(0, 2, 1)
    return np.where(has_key[..., None], dout, 0), np.where(has_key | (f.p_sink is not None and f.p_sink > 0), dlse, 0)


def _collect(
    a: Arguments, f: Intermediates, dlogits: NDArray, d_row: NDArray, dout: NDArray, arithmetic: Arithmetic
) -> dict[str, NDArray]:
    """From the gradient of the logits to those of the arguments."""
    dscores = dlogits * f.slope
    draw = arithmetic.stored(dscores * f.scale)
    weights = arithmetic.stored(f.p * f.drop)
    live_t = f.live.swapaxes(-1, -2)
    groups = (np.shape(a.k)[2], heads_per_group(a))
    to_kv_heads = lambda x: x.reshape(len(x), *groups, *x.shape[2:]).sum(2).transpose(0, 2, 1, 3)  # noqa: E731
    grads = {
        "q": weighted_sum(draw, f.live, f.k).transpose(0, 2, 1, 3),
        "k": to_kv_heads(weighted_sum(draw.swapaxes(-1, -2), live_t, f.q)),
        "v": to_kv_heads(weighted_sum(weights.swapaxes(-1, -2), live_t, dout)),
        "scale": (dscores * f.raw).sum(),
    }
    if a.bias is not None:
        grads["bias"] = sum_to_shape(dlogits, np.shape(a.bias))
    if f.p_sink is not None:
        grads["sinks"] = (f.p_sink * d_row).sum((0, 2))
    return grads


def sum_to_shape(x: NDArray, shape: tuple[int, ...]) -> NDArray:
    """The transpose of broadcasting `shape` to x.shape, right-aligned."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1), keepdims=True)


def error(got: Any, want: Any) -> tuple[float, float]:
    """Frobenius norm and maximum of got - want, over the finite entries of `want`; the others must be the same."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape} instead of {want.shape}")
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        raise AssertionError("entries that are not finite differ")
    difference = np.abs(np.subtract(got, want, where=finite, out=np.zeros_like(want)))
    if np.isnan(difference).any():
        raise AssertionError(f"NaN in {np.isnan(difference).sum()} of {want.size} entries")
    return float(np.linalg.norm(difference)), float(difference.max(initial=0.0))


def assert_within_budget(
    got: Any, want: Any, plain: Any, *, factor: float = 2.0, floor: Any = 0.0, name: str = "result"
) -> None:
    """The error of `got` against the float64 truth `want` is at most `factor` times that of plain attention, in the
    Frobenius norm and in the maximum; `floor` (an array or a number, absolute) is allowed to both."""
    floor = np.broadcast_to(np.asarray(floor, np.float64), np.shape(want))
    allowed_norm, allowed_max = (factor * e for e in error(plain, want))
    norm, maximum = error(got, want)
    allowed_norm += float(np.linalg.norm(floor))
    allowed_max += float(floor.max(initial=0.0))
    assert norm <= allowed_norm, f"{name}: error {norm:.3g} in Frobenius norm, allowed {allowed_norm:.3g}"
    assert maximum <= allowed_max, f"{name}: maximum error {maximum:.3g}, allowed {allowed_max:.3g}"
