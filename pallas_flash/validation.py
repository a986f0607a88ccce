"""The arguments of a call, checked once and brought into the one form that everything below works on."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from pallas_flash import dropout, elementwise, masks
from pallas_flash.checks import Sizes, checked_array, per_batch, require, require_key, static_number
from pallas_flash.masks import Mask
from pallas_flash.spec import Array, AttentionSpec, Operands, accumulator_dtype, array_of, described, vary, varying_axes

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What flash_attention was called with, under its names. See its docstring."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    scale: Any = None
    is_causal: Any = False
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    local_window_size: Any = None
    query_offset: Any = 0
    segment_ids: Any = None
    logits_soft_cap: Any = None
    sinks: Any = None
    score_mod: Any = None
    dropout_rate: Any = 0.0
    dropout_key: Any = None
    precision: Any = None
    deterministic: Any = False
    return_residual: Any = False
    return_max_logit: Any = False


class Canonical(NamedTuple):
    """A checked call. `lead` are the batch dimensions as given; inside there is exactly one, their product."""

    spec: AttentionSpec
    operands: Operands
    lead: tuple[int, ...]


def canonicalise(arguments: Arguments, devices: int = 1) -> Canonical:
    """Check every argument; ValueError names the argument, what came and what is wanted.

    devices: queries and keys are one of as many equal parts of a sequence, and lengths are those of the whole.
    """
    _same_devices(arguments)
    q, k, v, sizes = _tensors(arguments)
    sizes = sizes._replace(devices=devices)
    for name in ("is_causal", "deterministic", "return_residual", "return_max_logit"):
        require(isinstance(getattr(arguments, name), bool | np.bool_), name, getattr(arguments, name), "a bool")
    static_scale, scale = checked_scale(arguments.scale, q)
    static_offset, q_offset = _query_offset(arguments.query_offset, sizes)
    parts, part_arrays = _mask(arguments, sizes)
    score_mod, captures = traced_score_mod(arguments.score_mod, accumulator_dtype(q.dtype), varying_axes((q, k, v)))
    rate, dropout_key = _dropout(arguments.dropout_rate, arguments.dropout_key)
    spec = AttentionSpec(
        scale=static_scale,
        mask=parts,
        q_offset=static_offset,
        soft_cap=checked_soft_cap(arguments.logits_soft_cap),
        score_mod=score_mod,
        dropout_rate=rate,
        precision=_precision(arguments.precision),
        deterministic=bool(arguments.deterministic),
        return_max_logit=bool(arguments.return_max_logit),
    )
    operands = Operands(
        *(x.reshape(sizes.batch, *x.shape[-3:]) for x in (q, k, v)),
        bias=_bias(arguments.bias, sizes),
        sinks=checked_sinks(arguments.sinks, sizes),
        scale=scale,
        score_mod=captures,
        mask=part_arrays,
        q_offset=q_offset,
        dropout_key=dropout_key,
    )
    return Canonical(spec, _vary_alike(spec, operands), sizes.lead)


def _same_devices(arguments: Arguments) -> None:
    """Arrays that were put somewhere must be on the same devices; the others follow them."""
    given = {name: getattr(arguments, name) for name in _TENSORS}
    placed = {name: x for name, x in given.items() if isinstance(x, jax.Array) and not isinstance(x, Tracer)}
    placed = {name: x.sharding.device_set for name, x in placed.items() if x.committed}
    if len(set(map(frozenset, placed.values()))) > 1:
        came = ", ".join(f"{name} on {sorted(map(str, devices))}" for name, devices in placed.items())
        raise ValueError(f"{', '.join(placed)} must be on the same devices, not {came}")


_TENSORS = ("query", "key", "value", "bias", "mask", "sinks")


def _vary_alike(spec: AttentionSpec, operands: Operands) -> Operands:
    """Inside shard_map, let all operands vary over the same mesh axes; the transpose of this cast sums the gradient of
    a replicated one. What functions captured is cast inside their programs."""
    axes = varying_axes(operands)
    varied = jax.tree.map(lambda x: vary(x, axes), operands)
    mask = tuple(
        captured if isinstance(part, masks.Predicate) else arrays
        for part, captured, arrays in zip(spec.mask, operands.mask, varied.mask, strict=True)
    )
    return varied._replace(score_mod=operands.score_mod, mask=mask)


def _tensors(arguments: Arguments) -> tuple[Array, Array, Array, Sizes]:
    q, k, v = (
        checked_array(name, getattr(arguments, name), jnp.floating, "a floating-point array")
        for name in ("query", "key", "value")
    )
    if not q.dtype == k.dtype == v.dtype or q.dtype.name not in DTYPES:
        raise ValueError(
            f"query, key and value must have one dtype out of {', '.join(DTYPES)}, "
            f"not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    require(q.ndim >= 3, "query", q, "of shape [*B, T, N, H]")
    lead, (q_len, num_q_heads, head_dim) = q.shape[:-3], q.shape[-3:]
    require(k.ndim == q.ndim, "key", k, f"of rank {q.ndim}, [*B, S, K, H], as query {described(q)}")
    kv_len, num_kv_heads = k.shape[-3:-1]
    require(
        k.shape == (*lead, kv_len, num_kv_heads, head_dim),
        "key",
        k,
        f"[*B, S, K, H] with query's *B and H {described(q)}",
    )
    require(
        v.ndim == q.ndim and v.shape[:-1] == k.shape[:-1],
        "value",
        v,
        f"[*B, S, K, Hv] with key's *B, S and K {described(k)}",
    )
    require_groups(num_q_heads, num_kv_heads)
    known = all(isinstance(n, int) for n in (num_q_heads, q_len, kv_len))
    if known and num_q_heads >= 128 and 4 <= q_len <= 64 and q_len == kv_len:
        warnings.warn(
            f"query {described(q)} has far more heads than rows: the layout is [*B, T, N, H], sequence before heads",
            stacklevel=4,
        )
    return q, k, v, Sizes(lead, math.prod(lead), q_len, kv_len, num_q_heads, num_kv_heads)


def require_groups(num_q_heads: int, num_kv_heads: int) -> None:
    if num_q_heads != 0 if num_kv_heads == 0 else num_q_heads % num_kv_heads:
        raise ValueError(
            "the number of query heads must be a multiple of the number of key heads, "
            f"not N={num_q_heads} and K={num_kv_heads}"
        )


def checked_scale(scale: Any, q: Array) -> tuple[float | None, Array | None]:
    """(static, None) for a number, (None, operand) for an array, which has a gradient."""
    if scale is None:
        known = isinstance(q.shape[-1], int)
        require(known and q.shape[-1] > 0, "scale", scale, f"given where head_dim is {q.shape[-1]}")
        return 1 / math.sqrt(q.shape[-1]), None
    dtype = accumulator_dtype(q.dtype)
    number = static_number(scale)
    if number is not None:
        require(abs(number) <= float(np.finfo(dtype).max), "scale", scale, f"finite in {dtype}")
        return number, None
    array = checked_array("scale", scale, jnp.floating, "a number or a floating-point scalar array")
    require(array.shape == (), "scale", scale, "a scalar")
    return None, array.astype(dtype)


def _query_offset(offset: Any, sizes: Sizes) -> tuple[int | None, Array | None]:
    limit = masks.FAR // 2
    if isinstance(offset, int | np.integer) and not isinstance(offset, bool):
        # int(): NumPy's abs() of its smallest integer is negative.
        require(abs(int(offset)) <= limit, "query_offset", offset, f"within +-{limit}")
        return int(offset), None
    return None, per_batch("query_offset", offset, sizes, -limit, limit)


def _mask(arguments: Arguments, sizes: Sizes) -> tuple[tuple[masks.Part, ...], tuple[masks.Arrays, ...]]:
    """Everything that says which pairs take part, as one conjunction: bands merged into one, which comes first."""
    whole = masks.everything()
    if isinstance(arguments.mask, Mask):
        whole &= arguments.mask
    elif arguments.mask is not None:
        dense = checked_array(
            "mask", arguments.mask, np.bool_, "a bool array (True: attend) or a pallas_flash.masks.Mask"
        )
        whole &= Mask((masks.Dense(),), ((_as_scores("mask", dense, sizes),),))
    if arguments.is_causal:
        whole &= masks.causal()
    whole &= masks.sliding_window(*window_sides(arguments.local_window_size))
    if arguments.query_seq_lengths is not None:
        whole &= Mask((masks.QueryLengths(),), ((arguments.query_seq_lengths,),))
    if arguments.key_value_seq_lengths is not None:
        whole &= Mask((masks.KeyValueLengths(),), ((arguments.key_value_seq_lengths,),))
    if arguments.segment_ids is not None:
        whole &= Mask((masks.Segments(),), (_segment_ids(arguments.segment_ids, sizes),))

    bands = [part for part in whole.parts if isinstance(part, masks.Band)]
    named = [_MASK_NAMES] * (len(arguments.mask.parts) if isinstance(arguments.mask, Mask) else 0)
    named += [_NAMES] * (len(whole.parts) - len(named))
    everything = zip(whole.parts, whole.arrays, named, strict=True)
    others = [(part, *rest) for part, *rest in everything if not isinstance(part, masks.Band)]
    narrowest = lambda sides: min((side for side in sides if side is not None), default=None)  # noqa: E731
    parts: list[masks.Part] = (
        [masks.Band(narrowest(b.left for b in bands), narrowest(b.right for b in bands))] if bands else []
    )
    arrays: list[masks.Arrays] = [() for _ in parts]
    for part, part_arrays, names in others:
        parts.append(part)
        arrays.append(_part_arrays(part, part_arrays, names, sizes))
    return tuple(parts), tuple(arrays)


# What the arrays of a part are called where they came as arguments, and where they came in a mask.
_NAMES: dict[type[masks.Part], str] = {
    masks.QueryLengths: "query_seq_lengths",
    masks.KeyValueLengths: "key_value_seq_lengths",
    masks.Segments: "segment_ids",
}
_MASK_NAMES: dict[type[masks.Part], str] = {
    masks.QueryLengths: "masks.lengths: query",
    masks.KeyValueLengths: "masks.lengths: key_value",
    masks.PrefixLM: "masks.prefix_lm: length",
    masks.Segments: "masks.segments: ids",
}


def _part_arrays(
    part: masks.Part, arrays: masks.Arrays, names: dict[type[masks.Part], str], sizes: Sizes
) -> masks.Arrays:
    if part.uses_batch:
        limit = sizes.q_len if isinstance(part, masks.QueryLengths) else sizes.kv_len
        return (per_batch(names[type(part)], arrays[0], sizes, 0, limit * sizes.devices),)
    if isinstance(part, masks.Segments):
        return _both_ids(names[masks.Segments], arrays, sizes)
    return arrays


def window_sides(window: Any) -> tuple[int | None, int | None]:
    """(left, right); None or -1 where there is no bound."""
    name, wanted = "local_window_size", "an integer >= 0 or a pair (left, right) of them, None or -1 for no bound"
    sides = window if isinstance(window, tuple | list) else (window, window)
    require(len(sides) == 2, name, window, wanted)
    for side in sides:
        is_int = isinstance(side, int | np.integer) and not isinstance(side, bool)
        require(side is None or (is_int and side >= -1), name, window, wanted)
    return sides[0], sides[1]


def _segment_ids(segment_ids: Any, sizes: Sizes) -> tuple[Any, Any]:
    """A list is a pair if what it holds has the rank of ids; else it is the ids themselves."""
    rank = lambda x: array_of("segment_ids", x, "ids or a pair (query ids, key ids)").ndim  # noqa: E731
    if isinstance(segment_ids, list) and not any(rank(x) > len(sizes.lead) for x in segment_ids):
        return segment_ids, segment_ids
    if isinstance(segment_ids, tuple | list):
        require(len(segment_ids) == 2, "segment_ids", segment_ids, "ids or a pair (query ids, key ids)")
        return tuple(segment_ids)
    return segment_ids, segment_ids


def _both_ids(name: str, ids: masks.Arrays, sizes: Sizes) -> masks.Arrays:
    """Of queries and of keys; 64-bit ids stay what they are. Unsigned ids keep their bits, which are those of other
    numbers where they are signed."""
    lengths = {"query": sizes.q_len, "key_value": sizes.kv_len}
    arrays = [_ids(f"{name} ({side})", x, lengths[side], sizes) for side, x in zip(lengths, ids, strict=True)]
    dtypes = [array.dtype.name for array in arrays]
    if dtypes[0] != dtypes[1] and {*dtypes} & {"uint32", "uint64"}:
        raise ValueError(f"{name} must be of one dtype where one of them is unsigned, not {' and '.join(dtypes)}")
    return tuple(array if array.dtype.itemsize > 4 else array.astype(jnp.int32) for array in arrays)


def _ids(name: str, ids: Any, length: int, sizes: Sizes) -> Array:
    array = masks.integers(name, ids)
    require(array.shape == (*sizes.lead, length), name, ids, f"of shape {[*sizes.lead, length]}")
    if isinstance(array, np.ndarray) and array.size:
        limits = np.iinfo(np.int32)
        fits = limits.min <= array.min() and array.max() <= limits.max
        require(fits or jax.config.jax_enable_x64, name, array, "within int32 (64-bit ids need jax_enable_x64)")
        array = array.astype(np.int32) if fits else array
    return jnp.asarray(array).reshape(sizes.batch, length)


def _as_scores(name: str, array: Array, sizes: Sizes) -> Array:
    """Bring what broadcasts against [*B, N, T, S] to [1|B, 1|N, 1|T, 1|S]. Only a batch that is partly broadcast is
    copied."""
    full = (*sizes.lead, sizes.num_q_heads, sizes.q_len, sizes.kv_len)
    shape = array.shape
    while len(shape) > len(full) and shape[0] == 1:
        shape = shape[1:]
    shape = (1,) * (len(full) - len(shape)) + shape
    fits = len(shape) == len(full) and all(n in (1, want) for n, want in zip(shape, full, strict=True))
    require(fits, name, array, f"broadcastable to [*B, N, T, S] = {list(full)}")
    lead, rest = shape[:-3], shape[-3:]
    array = array.reshape(shape)
    if all(n == 1 for n in lead):
        return array.reshape(1, *rest)
    return jnp.broadcast_to(array, (*sizes.lead, *rest)).reshape(sizes.batch, *rest)


def _bias(bias: Any, sizes: Sizes) -> Array | None:
    if bias is None:
        return None
    return _as_scores(
        "bias", checked_array("bias", bias, jnp.floating, "a floating-point array (a bool array goes to mask)"), sizes
    )


def checked_sinks(sinks: Any, sizes: Sizes) -> Array | None:
    if sinks is None:
        return None
    array = checked_array("sinks", sinks, jnp.floating, "a floating-point array")
    require(array.shape == (sizes.num_q_heads,), "sinks", sinks, f"of shape [N] = [{sizes.num_q_heads}]")
    return array


def checked_soft_cap(cap: Any) -> float | None:
    if cap is None:
        return None
    number = static_number(cap)
    if number is None:
        raise ValueError(f"logits_soft_cap must be None or a Python number (part of the program), not {described(cap)}")
    # Beyond, the quotient or the product with the cap would leave float32.
    require(1e-30 <= number <= 1e30, "logits_soft_cap", cap, "None or a number > 0, from 1e-30 to 1e30")
    return number


def traced_score_mod(
    function: Callable[..., Any] | None, dtype: Any, axes: tuple[str, ...]
) -> tuple[elementwise.Elementwise | None, tuple[Array, ...]]:
    if function is None:
        return None, ()
    return elementwise.trace("score_mod", function, {"score": dtype} | elementwise.PLACE, dtype, axes)


def _dropout(rate: Any, key: Any) -> tuple[float, Array | None]:
    number = static_number(rate)
    if number is None or not 0 <= number < 1:
        raise ValueError(f"dropout_rate must be a Python number in [0, 1), not {described(rate)}")
    if number == 0:
        return 0.0, None
    wanted = f"a JAX random key where dropout_rate is {rate}"
    require_key("dropout_key", key, wanted)
    return number, dropout.key_words(key)


def _precision(precision: Any) -> Any:
    if isinstance(precision, list):
        precision = tuple(precision)
    try:
        hash(precision)
        jax.eval_shape(lambda x: lax.dot(x, x, precision=precision), jax.ShapeDtypeStruct((1, 1), jnp.float32))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"precision must be what jax.lax.dot takes, not {described(precision)}: {error}") from error
    return precision
