"""Ulysses attention: before attention the devices of an axis exchange parts of the sequence for heads, and after it
back again. (Jacobs et al. 2023, DeepSpeed Ulysses.)"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_flash import api, dispatch, passes
from pallas_flash.distributed.arguments import Local, local_call
from pallas_flash.masks import Segments
from pallas_flash.spec import Array, Operands, vary, varying_axes


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
      NotImplementedError: bias, a mask as an array, return_max_logit, a symbolic size of jax.export, or what
        `implementation` cannot compute.

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
    dispatch.require_known_sizes(implementation, {"query": query, "key": key, "value": value})
    local = local_call("ulysses_attention", (query, key, value), arguments, axis_name, return_residual)
    call = local.call._replace(operands=_exchanged(local))
    results = api.restore(call, api.attend(call, implementation), return_residual=return_residual)
    if not return_residual:
        return _exchange(results, axis_name, split=-3, concat=-2)
    out, lse = results
    return _exchange(out, axis_name, split=-3, concat=-2), _exchange(lse, axis_name, split=-2, concat=-1)


def _exchanged(local: Local) -> Operands:
    """Whole sequences of this device's heads: their rows, segment ids and sinks."""
    (spec, operands, _), axis_name, devices = local
    shapes = operands.shapes
    _check_heads(shapes.num_q_heads, shapes.num_kv_heads, devices, axis_name)
    copies = max(1, devices // max(1, shapes.num_kv_heads))
    q, k, v = (
        _exchange(x, axis_name, split=-2, concat=-3)
        for x in (operands.q, jnp.repeat(operands.k, copies, axis=2), jnp.repeat(operands.v, copies, axis=2))
    )
    whole = lambda ids: lax.all_gather(ids, axis_name, axis=1, tiled=True)  # noqa: E731
    parts = zip(spec.mask, operands.mask, strict=True)
    mask = tuple(tuple(map(whole, x)) if isinstance(part, Segments) else x for part, x in parts)
    num_heads = shapes.num_q_heads // devices
    first_head = lax.axis_index(axis_name) * num_heads
    sinks, origin = operands.sinks, None
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(sinks, first_head, num_heads)
    if passes.asks_for_places(spec):
        origin = vary(jnp.stack([jnp.zeros_like(first_head), first_head]), varying_axes(q))
    return operands._replace(q=q, k=k, v=v, mask=mask, sinks=sinks, origin=origin)


def _check_heads(num_heads: int, num_kv_heads: int, devices: int, axis_name: str) -> None:
    if num_heads % devices or (num_kv_heads % devices and devices % num_kv_heads):
        raise ValueError(
            f"ulysses_attention: N={num_heads} query heads and K={num_kv_heads} key heads cannot be divided over the "
            f"{devices} devices of axis {axis_name!r}: N must be a multiple of that, K a multiple or a divisor; "
            "ring_attention takes any number"
        )


def _exchange(array: Array, axis_name: str, *, split: int, concat: int) -> Array:
    return lax.all_to_all(array, axis_name, array.ndim + split, array.ndim + concat, tiled=True)
