"""The gradient of the bias in the backward kernels: what they add it up in, [1|B, 1|N, 1|T, 1|S] or less summed.

No temporary has [T, S] unless the bias does. Importing this module does not import Pallas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.kernels.sizes import round_up
from pallas_flash.spec import Operands, Shapes


def sums_over(bias: jax.Array) -> str | None:
    """What a kernel sums over: "queries", for which its tiles must have keys as rows; "keys"; or None, neither."""
    if bias.shape[2] > 1 and bias.shape[3] > 1:
        return None
    return "queries" if bias.shape[3] > 1 else "keys"


def adds_up_heads(bias: jax.Array, shapes: Shapes) -> bool:
    """Whether several CTAs add to the same element, in no fixed order."""
    return sums_over(bias) is None and bias.shape[:2] != (shapes.batch, shapes.num_q_heads)


class Totals(NamedTuple):
    """References to what kernels add the gradient of a bias up in: that whose tiles have the rows it needs."""

    of_queries: Any = None
    of_keys: Any = None


def totals(operands: Operands, blocks: tuple[int, int], *, interpreted: bool) -> Totals:
    """For tiles of these rows of queries and of keys."""
    bias = operands.bias
    if bias is None:
        return Totals()
    total = jax.new_ref(_zeros(bias, operands.shapes, blocks, interpreted=interpreted))
    return Totals(of_keys=total) if sums_over(bias) == "queries" else Totals(of_queries=total)


def _zeros(bias: jax.Array, shapes: Shapes, blocks: tuple[int, int], *, interpreted: bool) -> jax.Array:
    """What `TileScores.add_bias_gradient` adds to, for tiles of these rows of queries and of keys. The interpreter has
    no addition in device memory that several CTAs could share."""
    lengths = [round_up(*sizes) for sizes in zip((shapes.q_len, shapes.kv_len), blocks, strict=True)]
    heads = shapes.batch, shapes.num_q_heads
    over = sums_over(bias)
    if over is not None:
        return jnp.zeros((*heads, lengths[0 if over == "keys" else 1]), jnp.float32)
    return jnp.zeros((*(heads if interpreted else bias.shape[:2]), *lengths), jnp.float32)


def gradient(totals: Totals, operands: Operands) -> jax.Array | None:
    """From what the kernels added up."""
    bias, shapes = operands.bias, operands.shapes
    if bias is None:
        return None
    total = jax.freeze(totals.of_queries if totals.of_keys is None else totals.of_keys)
    over = sums_over(bias)
    if over is not None:
        total = total[..., None] if over == "keys" else total[..., None, :]
    total = total[:, :, : shapes.q_len, : shapes.kv_len]
    axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1 and total.shape[axis] > 1)
    return total.sum(axes, keepdims=True).astype(bias.dtype)
