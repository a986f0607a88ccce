"""Ring attention: queries stay, keys and values travel around the devices that share a sequence.

Each device attends its own queries to the keys that are with it, while those of the next step are on their way, and
merges the partial results. The backward pass sends the keys around again, with the sums of their gradients behind them;
between the passes only O and the log-sum-exp are kept, beside the inputs. (Liu, Zaharia, Abbeel 2023, Ring Attention;
Brandon et al. 2023, Striped Attention, for why the order of tokens matters under a causal mask.)
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_flash import autodiff, dispatch, reference
from pallas_flash.combine import Partial, combine
from pallas_flash.distributed import plan as plan_
from pallas_flash.distributed import steps
from pallas_flash.distributed.arguments import Local, local_call
from pallas_flash.distributed.order import Order
from pallas_flash.distributed.plan import Pair, Plan
from pallas_flash.distributed.steps import Ring, Step
from pallas_flash.spec import (
    Array,
    AttentionSpec,
    Cotangents,
    Gradients,
    Operands,
    Residuals,
    accumulator_dtype,
    vary,
    varying_axes,
)


def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    axis_name: str,
    order: str = "contiguous",
    return_residual: bool = False,
    implementation: str | None = None,
    **arguments: Any,
) -> Any:
    """`flash_attention` over a sequence that is sharded over a mesh axis, inside `jax.shard_map`: each device passes
    its own rows and gets its own rows of the result that one device would have.

    Keys and values travel around the axis while the tile that is there is computed, no further than a static mask needs
    them (causal, a window), and what is masked as a whole is not computed. Positions are those of the whole sequence,
    for masks, `score_mod` and dropout, whose mask is that of one device.

    Args:
      query: [*B, T/P, N, H], this device's rows; P is the size of the axis. Rows are ordered as `order` says.
      key, value: [*B, S/P, K, H], [*B, S/P, K, Hv], likewise.
      axis_name: the mesh axis.
      order: "contiguous", or "zigzag" (see `to_zigzag`), which balances a causal mask (windows are balanced
        without it).
      return_residual: also return the log-sum-exp.
      implementation: as in `flash_attention`; "reference" is none for this.
      **arguments: those of `flash_attention`: scale, is_causal, query_seq_lengths and key_value_seq_lengths (of whole
        sequences), local_window_size, query_offset, segment_ids (of this device's rows: [*B, S/P], or a pair [*B, T/P],
        [*B, S/P]), logits_soft_cap, sinks, score_mod, dropout_rate, dropout_key, precision, deterministic, and mask if
        it is a `masks.Mask`, with lengths and segment ids likewise. Batch elements and heads are counted from 0 on each
        device, as everywhere in shard_map.

    Returns:
      out [*B, T/P, N, Hv], or (out, lse [*B, T/P, N]).

    Raises:
      ValueError: an argument is wrong; the message names it.
      NotImplementedError: bias, a mask as an array, return_max_logit, or what `implementation` cannot compute.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from pallas_flash.distributed import from_zigzag, ring_attention, to_zigzag
      >>> devices = jax.device_count()
      >>> mesh = jax.make_mesh((devices,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> rows = P(None, "context")
      >>> attend = jax.shard_map(
      ...     lambda q, k, v: ring_attention(q, k, v, axis_name="context", order="zigzag", is_causal=True),
      ...     mesh=mesh, in_specs=rows, out_specs=rows,
      ... )
      >>> x = to_zigzag(jnp.ones((1, 8 * devices, 2, 16)), devices)
      >>> from_zigzag(jax.jit(attend)(x, x, x), devices).shape == x.shape
      True
    """
    local = local_call("ring_attention", (query, key, value), arguments, axis_name, return_residual)
    _, operands, lead = local.call
    output = _attend(_ring(local, Order(order, local.devices), implementation), operands)
    out = output.out.reshape(*lead, *output.out.shape[1:])
    if not return_residual:
        return out
    lse = jnp.swapaxes(output.lse, 1, 2)
    return out, lse.reshape(*lead, *lse.shape[1:])


class KeySums(NamedTuple):
    """Gradients of the keys, in the accumulator's dtype, one entry a chunk."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]


class Sums(NamedTuple):
    """Gradients of what stays, one entry a chunk of queries, and of what all chunks share."""

    q: tuple[Array, ...]
    scale: Array | None
    score_mod: tuple[Array | None, ...]


def _ring(local: Local, order: Order, implementation: str | None) -> Ring:
    spec, operands, _ = local.call
    plan = plan_.make(spec, order, operands.shapes)
    chunks = plan_.chunks_of(spec, order, operands.shapes)
    typed = local.axis_name in varying_axes(operands.q)
    floats = [x for x in operands.score_mod if jnp.issubdtype(x.dtype, jnp.floating)]
    uniform = typed and any(set(varying_axes(x)) != set(varying_axes(operands.q)) for x in floats)
    ring = Ring(local.axis_name, spec, None, plan, tuple(map(tuple, chunks.needed.tolist())), uniform)
    step = Step(jnp.int32(0), jnp.int32(0), steps.keys_of(spec, operands))
    pair = Pair(0, 0, always=False, masked=True, offset=None)
    part_spec, part = steps.part_of(ring, operands._replace(sinks=None), pair, step)
    choice = dispatch.choose(part_spec, part, implementation, dispatch.TABLE)
    if choice.default is reference:
        raise NotImplementedError("ring_attention: implementation='reference' has no backward pass of its own")
    return dataclasses.replace(ring, choice=choice)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, operands: Operands) -> autodiff.Output:
    return _attend_fwd(ring, operands)[0]


def _attend_fwd(ring: Ring, operands: Operands) -> tuple[autodiff.Output, tuple[Operands, Residuals]]:
    chunk = (operands.shapes.batch, ring.plan.lengths[0], operands.shapes.num_q_heads)
    dtype = accumulator_dtype(operands.q.dtype)
    like = partial(steps.zeros, operands)
    empty = Partial(like((*chunk, operands.shapes.value_head_dim), dtype), like(chunk, dtype) - jnp.inf)
    state = (empty,) * ring.plan.order.chunks_a_device
    without_sinks = operands._replace(sinks=None)

    def step(state: Any, at: Step, pairs: tuple[Pair, ...]) -> tuple[Any, None]:
        state = list(state)
        for pair in pairs:
            call = steps.part_of(ring, without_sinks, pair, at)
            state[pair.q] = steps.where_needed(ring, pair, at, call, partial(_fold, ring.choice, call), state[pair.q])
        return tuple(state), None

    state, _ = steps.around(ring, operands, step, state)
    if operands.sinks is not None:  # a key without a value
        sink = lambda x: Partial(jnp.zeros_like(x.out), jnp.broadcast_to(operands.sinks.astype(dtype), x.lse.shape))  # noqa: E731
        state = tuple(combine([x, sink(x)]) for x in state)
    out = jnp.concatenate([x.out for x in state], axis=1).astype(operands.q.dtype)
    lse = jnp.swapaxes(jnp.concatenate([x.lse for x in state], axis=1), 1, 2)
    residuals = Residuals(out, lse, jnp.where(lse == -jnp.inf, 0.0, 1.0).astype(dtype))
    residuals = Residuals(*map(checkpoint_name, residuals, autodiff.CHECKPOINT_NAMES))
    return autodiff.Output(residuals.out, residuals.m, None), (operands, residuals)


def _attend_bwd(ring: Ring, saved: tuple[Operands, Residuals], cotangents: autodiff.Output) -> tuple[Operands]:
    operands, residuals = saved
    sizes, dtype = ring.plan, accumulator_dtype(operands.q.dtype)
    like = lambda x: None if x is None else vary(jnp.zeros_like(x, dtype), varying_axes(x))  # noqa: E731
    zeros = lambda array, axis: tuple(map(like, sizes.order.parts(array, axis)))  # noqa: E731
    floats = tuple(x if jnp.issubdtype(x.dtype, jnp.floating) else None for x in operands.score_mod)
    sums = Sums(zeros(operands.q, 1), like(operands.scale), tuple(map(like, floats)))
    rows = [_rows(sizes, i, residuals, Cotangents(cotangents.out, cotangents.lse)) for i in range(len(sums.q))]
    without_sinks = operands._replace(sinks=None)

    def step(sums: Sums, at: Step, pairs: tuple[Pair, ...]) -> tuple[Sums, KeySums]:
        keys = KeySums(zeros(at.keys.k, 1), zeros(at.keys.v, 1))
        for pair in pairs:
            if ring.uniform and not pair.always:
                pair = pair._replace(masked=True)
            call = steps.part_of(ring, without_sinks, pair, at)
            add = partial(_add_gradients, ring.choice, call, rows[pair.q], pair)
            if ring.uniform:
                sums, keys = add((sums, keys))
            else:
                sums, keys = steps.where_needed(ring, pair, at, call, add, (sums, keys))
        return sums, keys

    sums, keys = steps.around(ring, operands, step, sums)
    whole = lambda parts, of: jnp.concatenate(parts, axis=1).astype(of.dtype)  # noqa: E731
    cast = lambda x, of: None if x is None else x.astype(of.dtype)  # noqa: E731
    gradients = Gradients(
        q=whole(sums.q, operands.q),
        k=whole(keys.k, operands.k),
        v=whole(keys.v, operands.v),
        sinks=_sink_gradient(operands, residuals, cotangents),
        scale=cast(sums.scale, operands.scale),
        score_mod=tuple(map(cast, sums.score_mod, operands.score_mod)),
    )
    return (autodiff.in_place_of(operands, gradients),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _fold(choice: autodiff.Choice, call: tuple[AttentionSpec, Operands], state: Partial) -> Partial:
    out, m, l = autodiff.run(choice, "forward", *call).residuals  # noqa: E741
    return combine([state, Partial(out, jnp.swapaxes(autodiff.log_sum_exp(m, l), 1, 2))])


def _rows(plan: Plan, chunk: int, residuals: Residuals, cotangents: Cotangents) -> tuple[Residuals, Cotangents]:
    """Those of one chunk of queries."""
    part = lambda x, axis: plan.order.parts(x, axis)[chunk]  # noqa: E731
    out, m, l = residuals  # noqa: E741
    return Residuals(part(out, 1), part(m, 2), part(l, 2)), Cotangents(part(cotangents.out, 1), part(cotangents.lse, 2))


def _add_gradients(
    choice: autodiff.Choice,
    call: tuple[AttentionSpec, Operands],
    rows: tuple[Residuals, Cotangents],
    pair: Pair,
    total: tuple[Sums, KeySums],
) -> tuple[Sums, KeySums]:
    """With m and l of the row's softmax over all keys, the gradients of one part are its share of the whole."""
    part = autodiff.run(choice, "backward", *call, *rows)
    sums, keys = total
    add = lambda x, y: None if x is None else x + y.astype(x.dtype)  # noqa: E731
    add_at = lambda chunks, i, y: (*chunks[:i], add(chunks[i], y), *chunks[i + 1 :])  # noqa: E731
    return Sums(
        q=add_at(sums.q, pair.q, part.q),
        scale=add(sums.scale, part.scale),
        score_mod=tuple(map(add, sums.score_mod, part.score_mod)),
    ), KeySums(k=add_at(keys.k, pair.kv, part.k), v=add_at(keys.v, pair.kv, part.v))


def _sink_gradient(operands: Operands, residuals: Residuals, cotangents: autodiff.Output) -> Array | None:
    """d sink = p_sink * (0 - delta), as everywhere, but once for all keys."""
    if operands.sinks is None:
        return None
    out, lse, _ = residuals
    p_sink = jnp.exp(operands.sinks.astype(lse.dtype)[:, None] - lse)
    product = jnp.where(out == 0, 0, out.astype(lse.dtype) * cotangents.out.astype(lse.dtype))
    delta = jnp.swapaxes(product.sum(-1), 1, 2) - cotangents.lse
    return -jnp.sum(p_sink * delta, axis=(0, 2)).astype(operands.sinks.dtype)
