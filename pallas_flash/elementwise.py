"""A user's elementwise function, traced once: its program is static, the arrays that it captures are operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]

from pallas_flash.spec import Array

# Operations whose printed form does not determine what they do: two of them are equal only if the functions are.
_OPAQUE = ("custom_jvp_call", "custom_vjp_call", "callback", "ffi_call", "pallas_call")


class Elementwise:
    """The jaxpr of a scalar function. Equal programs are equal objects, so a lambda written anew in every step of a
    training loop does not compile anew."""

    def __init__(self, fn: Callable[..., Any], jaxpr: Any):
        self.jaxpr = jaxpr
        program = str(jaxpr)
        self._key = (program, fn if any(name in program for name in _OPAQUE) else None)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elementwise) and self._key == other._key

    def __call__(self, captures: Sequence[Array], *args: Array) -> Array:
        """Apply to arrays of one rank that broadcast against each other. Axes of size 1 stay scalars inside, so that
        `table[head]` is one load where all elements share the head."""
        shape = jnp.broadcast_shapes(*(arg.shape for arg in args))
        program = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, list(captures)))
        function = lambda *scalars: program(*scalars)[0]  # noqa: E731
        for axis in reversed(range(len(shape))):
            in_axes = tuple(0 if arg.shape[axis] != 1 else None for arg in args)
            if any(a is not None for a in in_axes):
                function = jax.vmap(function, in_axes)
        result = function(*(arg.reshape([n for n in arg.shape if n != 1]) for arg in args))
        return result.reshape(shape)


def trace(fn: Callable[..., Any], *dtypes: Any) -> tuple[Elementwise, tuple[Array, ...]]:
    """Trace `fn` at scalars of these dtypes. Returns its program and the arrays that it captured."""
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes))
    return Elementwise(fn, closed.jaxpr), tuple(jnp.asarray(const) for const in closed.consts)
