"""Rotary position embedding: one rule for queries and for the keys that go into a cache."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp


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
        if not (math.isfinite(self.base) and self.base > 0):
            raise ValueError(f"base must be finite and above 0, not {self.base}")
        if self.dim is not None and (self.dim < 2 or self.dim % 2):
            raise ValueError(f"dim must be even and at least 2, not {self.dim}")
        if self.frequencies is not None and self.dim not in (None, 2 * len(self.frequencies)):
            raise ValueError(f"frequencies must be dim / 2 = {self.dim} / 2 numbers, not {len(self.frequencies)}")


def apply_rotary(x: jax.Array, positions: jax.Array, rotary: Rotary | None = None) -> jax.Array:
    """Rotate x [*B, T, N, H] as its positions, int [T] or [*B, T], say, by `Rotary()` unless told otherwise. The scores
    of rotated queries and keys depend on the distances of their positions alone.

    Raises ValueError if x or positions do not have these shapes, or a head is too small for the rule.

    >>> import jax.numpy as jnp
    >>> from pallas_flash import Rotary, apply_rotary
    >>> x = jnp.ones((5, 1, 4))
    >>> rotated = apply_rotary(x, jnp.arange(5), Rotary(base=500_000.0))
    >>> bool((rotated[0] == x[0]).all()), rotated.shape
    (True, (5, 1, 4))

    Source: Su et al. 2021 (RoFormer), section 3.4.
    """
    rotary = rotary or Rotary()
    if x.ndim < 3 or positions.shape not in ((x.shape[-3],), x.shape[:-2]):
        raise ValueError(
            f"positions must be [T] or [*B, T] for x [*B, T, N, H], not {list(positions.shape)} for {list(x.shape)}"
        )
    dim = rotary.dim or (x.shape[-1] if rotary.frequencies is None else 2 * len(rotary.frequencies))
    if dim > x.shape[-1] or dim % 2:
        raise ValueError(
            f"x must have heads of at least {dim} features, an even number of which rotate, not {x.shape[-1]}"
        )
    half = dim // 2
    if rotary.frequencies is None:
        frequencies = rotary.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    else:
        frequencies = jnp.asarray(rotary.frequencies, jnp.float32)
    # In float32: bfloat16 has 8 bits, too few for the angle of a position in the thousands.
    angles = positions[..., None, None].astype(jnp.float32) * frequencies  # [*B, T, 1, dim / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turning, rest = x[..., :dim].astype(jnp.float32), x[..., dim:]
    if rotary.interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = jnp.stack(pairs, axis=-1).reshape(turning.shape) if rotary.interleaved else jnp.concatenate(pairs, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
