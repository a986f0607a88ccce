"""Ring attention: queries stay, keys and values travel around the devices that share a sequence.

Each device attends its own queries to the keys that are with it, while those of the next step are on their way, and
merges the partial results. The backward pass sends the keys around again, with their gradients behind them; between the
passes only O and the log-sum-exp are kept, beside the inputs. (Liu, Zaharia, Abbeel 2023, Ring Attention; Brandon et
al. 2023, Striped Attention, for why the order of tokens matters under a causal mask.)
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_flash import autodiff, dispatch, reference, xla
from pallas_flash.checks import require_known_sizes
from pallas_flash.combine import Partial, combine
from pallas_flash.distributed import plan as plan_
from pallas_flash.distributed import steps
from pallas_flash.distributed.arguments import Local, local_call
from pallas_flash.distributed.heads import SHARED, Group, groups_of, in_groups
from pallas_flash.distributed.order import Order
from pallas_flash.distributed.plan import Pair
from pallas_flash.distributed.steps import Ring, Step
from pallas_flash.distributed.travel import Call, Pass, Results, added
from pallas_flash.spec import (
    Array,
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
    heads_at_once: int | None = None,
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
      heads_at_once: how many key heads, with the query heads that belong to them, go around before the next ones do;
        None: all. A device then holds the keys that are on their way, the partial results and the gradients that go
        home for those heads alone. It must divide K.
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
      NotImplementedError: bias, a mask as an array, return_max_logit, a symbolic size of jax.export, or what
        `implementation` cannot compute.

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
    require_known_sizes({"query": query, "key": key, "value": value})
    local = local_call("ring_attention", (query, key, value), arguments, axis_name, return_residual)
    _, operands, lead = local.call
    groups = groups_of(heads_at_once, operands.shapes.num_kv_heads)
    ring = _ring(local, Order(order, local.devices), implementation, groups)
    with dispatch.refusals_by_name(ring.choice):
        output = _attend(ring, operands)
    out = output.out.reshape(*lead, *output.out.shape[1:])
    if not return_residual:
        return out
    lse = jnp.swapaxes(output.lse, 1, 2)
    return out, lse.reshape(*lead, *lse.shape[1:])


def _ring(local: Local, order: Order, implementation: str | None, groups: int) -> Ring:
    spec, operands, _ = local.call
    plan = plan_.make(spec, order, operands.shapes)
    chunks = plan_.chunks_of(spec, order, operands.shapes)
    typed = local.axis_name in varying_axes(operands.q)
    floats = [x for x in operands.score_mod if jnp.issubdtype(x.dtype, jnp.floating)]
    uniform = typed and any(set(varying_axes(x)) != set(varying_axes(operands.q)) for x in floats)
    ring = Ring(local.axis_name, spec, None, plan, tuple(map(tuple, chunks.needed.tolist())), uniform, groups)
    some = Group(jnp.int32(0), groups).part_of(spec, operands._replace(sinks=None))
    step = Step(jnp.int32(0), jnp.int32(0), steps.keys_of(spec, some))
    pair = Pair(0, 0, always=False, masked=True, offset=None)
    part_spec, part = steps.part_of(ring, some, pair, step, steps.Blocks(0, 0))
    choice = dispatch.choose(part_spec, part, implementation, dispatch.TABLE)
    if choice.default is reference:
        raise NotImplementedError("ring_attention: implementation='reference' has no backward pass of its own")
    return dataclasses.replace(ring, choice=choice)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, operands: Operands) -> autodiff.Output:
    return _attend_fwd(ring, operands)[0]


def _attend_fwd(ring: Ring, operands: Operands) -> tuple[autodiff.Output, tuple[Operands, Residuals]]:
    some = lambda group: _forward(ring, group.part_of(ring.spec, operands))  # noqa: E731
    out, lse, _ = in_groups(ring.groups, some, autodiff.Output(2, 1, None))
    residuals = Residuals(out, lse, jnp.where(lse == -jnp.inf, 0.0, 1.0).astype(lse.dtype))
    residuals = Residuals(*map(checkpoint_name, residuals, autodiff.CHECKPOINT_NAMES))
    return autodiff.Output(residuals.out, residuals.m, None), (operands, residuals)


def _forward(ring: Ring, operands: Operands) -> autodiff.Output:
    dtype = accumulator_dtype(operands.q.dtype)

    def compute(call: Call, block: Any) -> Results:
        del block
        out, m, l = autodiff.run(ring.choice, "forward", *call).residuals  # noqa: E741
        return Results(Partial(out, jnp.swapaxes(autodiff.log_sum_exp(m, l), 1, 2)), None, None)

    def nothing(part: Operands) -> Results:
        rows, like = part.q.shape[:-1], partial(steps.zeros, operands)
        out = like((*rows, part.v.shape[-1]), part.q.dtype)
        return Results(Partial(out, like(rows, dtype) - jnp.inf), None, None)

    def add(first: Partial, *more: Partial) -> Partial:
        first = first._replace(out=first.out.astype(dtype))
        return combine([first, *more]) if more else first

    chunks = Pass(ring, operands._replace(sinks=None), compute, nothing, add).around().q
    if operands.sinks is not None:  # a key without a value
        sink = lambda x: Partial(jnp.zeros_like(x.out), jnp.broadcast_to(operands.sinks.astype(dtype), x.lse.shape))  # noqa: E731
        chunks = [combine([x, sink(x)]) for x in chunks]
    out = jnp.concatenate([x.out.astype(operands.q.dtype) for x in chunks], axis=1)
    return autodiff.Output(out, jnp.swapaxes(jnp.concatenate([x.lse for x in chunks], axis=1), 1, 2), None)


def _attend_bwd(ring: Ring, saved: tuple[Operands, Residuals], cotangents: autodiff.Output) -> tuple[Operands]:
    operands, residuals = saved
    arriving = Cotangents(cotangents.out, cotangents.lse)

    def some(group: Group) -> Gradients:
        cut = lambda arrays, axes: type(arrays)(*map(group.cut, arrays, axes))  # noqa: E731
        rows = cut(residuals, Residuals(2, 1, 1)), cut(arriving, Cotangents(2, 1))
        return _backward(ring, group.part_of(ring.spec, operands), *rows)

    there = lambda x, axis: None if x is None else axis  # noqa: E731
    floats = tuple(SHARED if jnp.issubdtype(x.dtype, jnp.floating) else None for x in operands.score_mod)
    axes = Gradients(2, 2, 2, None, there(operands.sinks, 0), there(operands.scale, SHARED), floats)
    gradients = in_groups(ring.groups, some, axes)
    cast = lambda x, of: None if x is None else x.astype(of.dtype)  # noqa: E731
    gradients = gradients._replace(
        scale=cast(gradients.scale, operands.scale),
        score_mod=tuple(map(cast, gradients.score_mod, operands.score_mod)),
    )
    return (autodiff.in_place_of(operands, gradients),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _backward(ring: Ring, operands: Operands, residuals: Residuals, cotangents: Cotangents) -> Gradients:
    """Those of scale and score_mod in the accumulator's dtype."""
    cut = partial(steps.cut, ring.plan.order)
    like = lambda x: vary(jnp.zeros_like(x), varying_axes(x))  # noqa: E731

    def compute(call: Call, block: Any) -> Results:
        """With m and l of the row's softmax over all keys, the gradients of one part are its share of the whole."""
        (out, m, l), (dout, dlse) = residuals, cotangents  # noqa: E741
        rows = Residuals(cut(out, 1, block), cut(m, 2, block), cut(l, 2, block))
        arriving = Cotangents(cut(dout, 1, block), cut(dlse, 2, block))
        part = autodiff.run(ring.choice, "backward", *call, rows, arriving)
        return Results(part.q, (part.k, part.v), (part.scale, part.score_mod))

    def nothing(part: Operands) -> Results:
        floats = tuple(like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None for x in part.score_mod)
        scale = None if part.scale is None else like(part.scale)
        return Results(like(part.q), (like(part.k), like(part.v)), (scale, floats))

    sums = Pass(ring, operands._replace(sinks=None), compute, nothing, added, uniform=ring.uniform).around()
    dk, dv = zip(*sums.kv, strict=True)
    whole = lambda parts, of: jnp.concatenate([x.astype(of.dtype) for x in parts], axis=1)  # noqa: E731
    return Gradients(
        q=whole(sums.q, operands.q),
        k=whole(dk, operands.k),
        v=whole(dv, operands.v),
        sinks=xla.sink_gradient(operands, xla.backward_rows(residuals, cotangents)),  # once for all keys
        scale=sums.shared[0],
        score_mod=sums.shared[1],
    )
