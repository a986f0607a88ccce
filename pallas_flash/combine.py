"""Attention over disjoint sets of keys, merged into attention over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.spec import described, jax_array


class Partial(NamedTuple):
    """Attention over some of the keys. A row with no key has lse -inf, and nobody reads its out."""

    out: jax.Array  # [..., Hv]
    lse: jax.Array  # [...], natural logarithm of the softmax denominator


def combine(partials: Iterable[Partial | tuple[Any, Any]]) -> Partial:
    """Merge attention over disjoint sets of keys: pairs (out [..., Hv], lse [...]), all of the same shapes.

    Each pair is what `flash_attention(..., return_residual=True)` or `flash_decode(..., return_residual=True)` returned
    for the same queries and its own keys; the result is what one call over all these keys returns. Differentiable in
    every out and lse, forward and backward. A row that no set has a key for gives out 0, lse -inf and gradients 0.
    Sinks belong to one of the sets alone. The sums are in float32 (float64 for float64 inputs); out comes back in the
    outs' common dtype, so a running result that is float32 loses nothing from step to step.

    Raises:
      ValueError: there is no pair, or their shapes or dtypes do not fit together.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pallas_flash import combine, flash_attention
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 64, 4, 16))
      >>> halves = [flash_attention(q, k[s], v[s], return_residual=True) for s in (slice(32), slice(32, 64))]
      >>> bool(jnp.allclose(combine(halves).out, flash_attention(q, k, v), atol=1e-5))
      True

    Source: Dao 2023 (FlashAttention-2), section 3.1; Flash-Decoding (Dao, Haziza, Massa, Sizov 2023).
    """
    pairs = _checked(partials)
    lses = [pair.lse for pair in pairs]
    # The result does not depend on the shift, only its rounding does: no gradient needs to pass through it.
    m = lax.stop_gradient(jnp.stack(lses).max(axis=0))
    shift = jnp.where(m == -jnp.inf, 0, m)
    weights = [_exp(lse, shift) for lse in lses]
    l = sum(weights[1:], start=weights[0])  # noqa: E741
    l_or_1 = jnp.where(l == 0, 1, l)
    acc: Any = sum(
        jnp.where(lse == -jnp.inf, 0, weight / l_or_1)[..., None] * jnp.where((lse == -jnp.inf)[..., None], 0, out)
        for (out, lse), weight in zip(pairs, weights, strict=True)
    )
    dtype = jnp.result_type(*(pair.out for pair in pairs))
    return Partial(acc.astype(dtype), jnp.where(l == 0, -jnp.inf, shift + jnp.log(l_or_1)))


def _exp(lse: jax.Array, shift: jax.Array) -> jax.Array:
    """exp(lse - shift) whose derivative at -inf is 0 and not NaN."""
    empty = lse == -jnp.inf
    return jnp.where(empty, 0, jnp.exp(jnp.where(empty, shift, lse) - shift))


def _checked(partials: Iterable[Partial | tuple[Any, Any]]) -> list[Partial]:
    """The pairs as arrays, each lse in at least float32."""
    wanted = "pairs (out [..., Hv], lse [...]), at least one, in a list or another iterable"
    is_one = isinstance(partials, Partial | str) or hasattr(partials, "shape")
    given = [] if is_one or not isinstance(partials, Iterable) else list(partials)
    if not given:
        raise ValueError(f"partials must be {wanted}, not {described(partials)}")
    pairs = []
    for i, pair in enumerate(given):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"partials must be {wanted}: partials[{i}] is {described(pair)}")
        named = zip(("out", "lse"), pair, strict=True)
        pairs.append(Partial(*(jax_array(f"partials[{i}]: {n}", x, "an array") for n, x in named)))
    shape = pairs[0].out.shape
    for i, (out, lse) in enumerate(pairs):
        for name, array, wanted in (("out", out, shape), ("lse", lse, shape[:-1])):
            floating = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 1
            if not shape or array.shape != wanted or not floating:
                raise ValueError(
                    f"partials[{i}]: {name} must be floating with 16 bits or more, as in the first pair out "
                    f"{list(shape)} and lse {list(shape[:-1])}, not {array.dtype}{list(array.shape)}"
                )
    dtype = jnp.result_type(jnp.float32, *(pair.lse for pair in pairs))
    return [Partial(out, lse.astype(dtype)) for out, lse in pairs]
