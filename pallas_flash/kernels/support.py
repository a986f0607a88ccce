"""What the kernel packages have in common as implementations. Importing this module does not import Pallas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.kernels import backward_bias, tile_function
from pallas_flash.masks import Dense, Predicate, Segments
from pallas_flash.spec import AttentionSpec, Operands, vary, varying_axes

MAX_HEAD_DIM = 256
MAX_ROWS = 2**31  # of all batch elements and heads: row statistics with larger offsets have not been proven right


def refused(spec: AttentionSpec, operands: Operands) -> str | None:
    """Why no kernel computes this call, in words; None if nothing that all of them have in common speaks against it."""
    shapes = operands.shapes
    if operands.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16, not {operands.q.dtype}"
    if max(shapes.head_dim, shapes.value_head_dim) > MAX_HEAD_DIM:
        return f"head dims {shapes.head_dim} and {shapes.value_head_dim}: it holds up to {MAX_HEAD_DIM}"
    if 0 in shapes:
        return f"an empty operand: {shapes}"
    if shapes.batch * shapes.num_q_heads * shapes.q_len >= MAX_ROWS:
        return f"batch * heads * queries must stay below {MAX_ROWS}: {shapes}"
    if spec.precision not in (None, jax.lax.Precision.DEFAULT, "default", "fastest"):
        return f"precision={spec.precision}: it rounds the softmax weights to {operands.q.dtype}"
    predicates = [("masks.predicate", part.function) for part in spec.mask if isinstance(part, Predicate)]
    obstacles = (
        function_obstacle([("score_mod", spec.score_mod), *predicates]),
        *(array_obstacle(name, getattr(operands, name)) for name in ("bias", "score_mod", "mask")),
    )
    return next(filter(None, obstacles), None)


def gradient_refused(spec: AttentionSpec, operands: Operands) -> str | None:
    """Likewise, why no backward kernel computes the gradients of a call that a forward kernel takes."""
    if spec.deterministic and operands.bias is not None and backward_bias.adds_up_heads(operands.bias, operands.shapes):
        return "deterministic=True and a bias that heads or batch elements share: the order of its sums is not fixed"
    if any(jnp.issubdtype(array.dtype, jnp.floating) for array in operands.score_mod):
        return "floating arrays that score_mod captures: it does not compute their gradients"
    if spec.score_mod is not None:
        problem = tile_function.derivative_obstacle(spec.score_mod)
        if problem is not None:
            return f"the derivative of score_mod uses {problem}, which it cannot compute"
    return None


def compute_capability() -> tuple[int, int] | None:
    """Of the first NVIDIA GPU that JAX sees; None if there is none."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return None
    major, minor = devices[0].compute_capability.split(".")
    return int(major), int(minor)


def varying(results: Any, operands: Any) -> Any:
    """Inside shard_map, results differ from device to device as the operands do; a kernel does not say so."""
    axes = varying_axes(operands)
    return jax.tree.map(lambda array: vary(array, axes), results)


def differentiated_once(arrays: Any, name: str) -> Any:
    """The arrays, whose derivative raises: the kernels of the implementation of this name have no second ones."""
    return _without_derivative(name)(arrays)


@functools.cache
def _without_derivative(name: str) -> Callable[[Any], Any]:
    @jax.custom_jvp
    def same(arrays: Any) -> Any:
        return arrays

    @same.defjvp
    def no_derivative(*_: Any) -> Any:
        raise NotImplementedError(f"implementation={name!r} has no second derivatives: take implementation='xla'")

    return same


def mask_class(spec: AttentionSpec, operands: Operands) -> str:
    """general: several features each need registers for every element of a tile beside its score. Smaller tiles then
    keep the loop over keys free of spills; one such feature fits the tiles of the other classes."""
    demanding = [part for part in spec.mask if isinstance(part, Dense | Predicate | Segments)]
    demanding += [x for x in (operands.bias, spec.score_mod, operands.dropout_key) if x is not None]
    if len(demanding) > 1:
        return "general"
    return "causal" if spec.mask else "full"


def function_obstacle(functions: Iterable[tuple[str, Any]]) -> str | None:
    """functions: names, and `Elementwise` functions or None."""
    for name, function in functions:
        if function is not None and (obstacle := tile_function.obstacle(function)) is not None:
            return f"{name} uses {obstacle}, which the kernel cannot compute"
    return None


def array_obstacle(name: str, arrays: Any) -> str | None:
    """Of arrays of which a kernel reads single elements."""
    unread = [array.dtype for array in jax.tree.leaves(arrays) if array.dtype.name not in tile_function.STORED]
    return f"{name} has an array of {unread[0]}, which it does not read" if unread else None
