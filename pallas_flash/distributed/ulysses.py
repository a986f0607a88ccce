"""Ulysses attention: before attention the devices of an axis exchange parts of the sequence for heads, and after it
back again. (Jacobs et al. 2023, DeepSpeed Ulysses.)"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_flash import api, partitioning
from pallas_flash.distributed.arguments import axis_size, check_names
from pallas_flash.masks import Mask, Segments
from pallas_flash.spec import Array, vary, varying_axes
from pallas_flash.validation import Arguments, canonicalise


def ulysses_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    axis_name: str,
    return_residual: bool = False,
    implementation: str | None = None,
    **arguments: Any,
) -> Any:
    """`flash_attention` over a sequence that is sharded over a mesh axis, inside `jax.shard_map`: each device attends
    whole sequences for some of the heads.

    The arguments are those of `ring_attention`, with rows in their natural order. The number of query heads must be a
    multiple of the size P of the axis; that of key heads a multiple or a divisor (then heads are sent P / K times).
    Against the ring: four exchanges a pass instead of P - 1, and any mask is balanced; but no more devices than heads.

    Returns:
      out [*B, T/P, N, Hv], or (out, lse [*B, T/P, N]).

    Raises:
      ValueError: an argument is wrong, or the heads cannot be divided; the message names it.
      NotImplementedError: bias, a mask as an array, return_max_logit, or what `implementation` cannot compute.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from pallas_flash.distributed import ulysses_attention
      >>> devices = jax.device_count()
      >>> mesh = jax.make_mesh((devices,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> rows = P(None, "context")
      >>> attend = jax.shard_map(
      ...     lambda q, k, v: ulysses_attention(q, k, v, axis_name="context", is_causal=True),
      ...     mesh=mesh, in_specs=rows, out_specs=rows,
      ... )
      >>> x = jnp.ones((1, 8 * devices, devices, 16))
      >>> jax.jit(attend)(x, x, x).shape == x.shape
      True
    """
    check_names("ulysses_attention", arguments)
    devices = axis_size("ulysses_attention", axis_name)
    _, (q, k, v, *_), lead = canonicalise(Arguments(query, key, value))  # for its errors
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    _check_heads(num_heads, num_kv_heads, devices, axis_name)
    copies = max(1, devices // num_kv_heads)
    q, k, v = (
        _exchange(x.reshape(*lead, *x.shape[1:]), axis_name, split=-2, concat=-3)
        for x in (q, jnp.repeat(k, copies, axis=2), jnp.repeat(v, copies, axis=2))
    )
    first_head = lax.axis_index(axis_name) * (num_heads // devices)
    call = canonicalise(Arguments(q, k, v, **_gathered(arguments, axis_name, first_head, num_heads // devices)))
    if partitioning.asks_for_places(call.spec):
        origin = vary(jnp.stack([jnp.zeros_like(first_head), first_head]), varying_axes(call.operands.q))
        call = call._replace(operands=call.operands._replace(origin=origin))
    results = api.restore(call, api.attend(call, implementation), return_residual=return_residual)
    if not return_residual:
        return _exchange(results, axis_name, split=-3, concat=-2)
    out, lse = results
    return _exchange(out, axis_name, split=-3, concat=-2), _exchange(lse, axis_name, split=-2, concat=-1)


def _check_heads(num_heads: int, num_kv_heads: int, devices: int, axis_name: str) -> None:
    if num_heads % devices or (num_kv_heads % devices and devices % num_kv_heads):
        raise ValueError(
            f"ulysses_attention: N={num_heads} query heads and K={num_kv_heads} key heads cannot be divided over the "
            f"{devices} devices of axis {axis_name!r}: N must be a multiple of that, K a multiple or a divisor; "
            "ring_attention takes any number"
        )


def _exchange(array: Array, axis_name: str, *, split: int, concat: int) -> Array:
    return lax.all_to_all(array, axis_name, array.ndim + split, array.ndim + concat, tiled=True)


def _gathered(arguments: dict[str, Any], axis_name: str, first_head: Array, num_heads: int) -> dict[str, Any]:
    """The segment ids of whole sequences, and the sinks of this device's heads."""
    whole = lambda ids: lax.all_gather(jnp.asarray(ids), axis_name, axis=-1 + jnp.ndim(ids), tiled=True)  # noqa: E731
    result = dict(arguments)
    ids, mask, sinks = (arguments.get(name) for name in ("segment_ids", "mask", "sinks"))
    if ids is not None:
        result["segment_ids"] = tuple(map(whole, ids)) if isinstance(ids, tuple | list) else whole(ids)
    if mask is not None:
        parts = zip(mask.parts, mask.arrays, strict=True)
        arrays = tuple(tuple(map(whole, x)) if isinstance(part, Segments) else x for part, x in parts)
        result["mask"] = Mask(mask.parts, arrays)
    if sinks is not None:
        result["sinks"] = lax.dynamic_slice_in_dim(jnp.asarray(sinks), first_head, num_heads)
    return result
