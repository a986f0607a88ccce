"""Rotary position embedding: one rule for queries and for the keys that go into a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_flash import masks
from pallas_flash.checks import checked_array, require, static_number
from pallas_flash.spec import array_of, described


@dataclasses.dataclass(frozen=True)
class Rotary:
    """How positions rotate pairs of features: pair i by the angle position * base^(-2i / dim).

    base: 10,000 in the original, 500,000 in Llama 3.
    interleaved: the pairs are (x[2i], x[2i + 1]); else (x[i], x[i + dim / 2]), as in most checkpoints.
    dim: how many features rotate, the first ones; None: all of a head.
    frequencies: the angle of one position for each of the dim / 2 pairs, in place of the powers of base, for contexts
      that were stretched after training.

    Raises ValueError for what is no such rule.
    """

    base: float = 10_000.0
    interleaved: bool = False
    dim: int | None = None
    frequencies: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        base = static_number(self.base)
        if base is None or not 0 < base <= float(np.finfo(np.float32).max):
            raise ValueError(f"base must be a number, finite in float32 and above 0, not {described(self.base)}")
        require(isinstance(self.interleaved, bool), "interleaved", self.interleaved, "a bool")
        if self.dim is not None:
            is_int = isinstance(self.dim, int | np.integer) and not isinstance(self.dim, bool)
            require(is_int and self.dim >= 2 and self.dim % 2 == 0, "dim", self.dim, "an even integer, at least 2")
        if self.frequencies is None:
            return
        wanted = "None or dim / 2 finite numbers"
        angles = array_of("frequencies", self.frequencies, wanted)
        fits = not isinstance(angles, Tracer) and angles.ndim == 1 and np.issubdtype(angles.dtype, np.number)
        require(fits and bool(np.isfinite(angles).all()), "frequencies", self.frequencies, wanted)
        object.__setattr__(self, "frequencies", tuple(map(float, angles)))  # hashable, whatever came
        if self.dim not in (None, 2 * angles.size):
            raise ValueError(f"frequencies must be dim / 2 = {self.dim} / 2 numbers, not {angles.size}")


def rotated_features(name: str, x: jax.Array, rotary: Any) -> int:
    """How many features of x rotate. Raises ValueError, under the array's `name`, for a head that is too small."""
    require(rotary is None or isinstance(rotary, Rotary), "rotary", rotary, "None or a pallas_flash.Rotary")
    rotary = rotary or Rotary()
    dim = rotary.dim or (x.shape[-1] if rotary.frequencies is None else 2 * len(rotary.frequencies))
    if not isinstance(x.shape[-1], int):
        raise NotImplementedError(f"{name} {described(x)} must have heads of a size known when the program is compiled")
    if dim > x.shape[-1] or dim % 2:
        raise ValueError(
            f"{name} must have heads of at least {dim} features, an even number of which rotate, not {x.shape[-1]}"
        )
    return dim


def apply_rotary(x: jax.Array, positions: jax.Array, rotary: Rotary | None = None) -> jax.Array:
    """Rotate x [*B, T, N, H] as its positions, int [T] or [*B, T], say, by `Rotary()` unless told otherwise. The scores
    of rotated queries and keys depend on the distances of their positions alone.

    Raises ValueError if x is not floating, positions are not integers, their shapes are others, or a head is too small
    for the rule; NotImplementedError if the head size is a symbol of jax.export.

    >>> import jax.numpy as jnp
    >>> from pallas_flash import Rotary, apply_rotary
    >>> x = jnp.ones((5, 1, 4))
    >>> rotated = apply_rotary(x, jnp.arange(5), Rotary(base=500_000.0))
    >>> bool((rotated[0] == x[0]).all()), rotated.shape
    (True, (5, 1, 4))

    Source: Su et al. 2021 (RoFormer), section 3.4.
    """
    x = checked_array("x", x, np.floating, "a floating-point array")
    positions = jnp.asarray(masks.integers("positions", positions))
    if x.ndim < 3 or positions.shape not in ((x.shape[-3],), x.shape[:-2]):
        raise ValueError(
            f"positions must be [T] or [*B, T] for x [*B, T, N, H], not {list(positions.shape)} for {list(x.shape)}"
        )
    dim = rotated_features("x", x, rotary)
    rotary = rotary or Rotary()
    half = dim // 2
    if rotary.frequencies is None:
        frequencies = rotary.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    else:
        frequencies = jnp.asarray(rotary.frequencies, jnp.float32)
    # In float32: bfloat16 has 8 bits, too few for the angle of a position in the thousands.
    positions = positions.reshape(*[1] * (x.ndim - positions.ndim - 2), *positions.shape, 1, 1)
    angles = positions.astype(jnp.float32) * frequencies.reshape(*[1] * (x.ndim - 1), half)  # [*B or 1s, T, 1, dim / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turning, rest = x[..., :dim].astype(jnp.float32), x[..., dim:]
    if rotary.interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = jnp.stack(pairs, axis=-1).reshape(turning.shape) if rotary.interleaved else jnp.concatenate(pairs, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
