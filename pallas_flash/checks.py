"""Checks of single arguments, under their names: what several of the public functions take."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import dropout, masks
from pallas_flash.spec import Array, array_of, described


class Sizes(NamedTuple):
    lead: tuple[int, ...]
    batch: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    devices: int = 1


def require(condition: Any, name: str, got: Any, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {wanted}, not {described(got)}")


def static_number(value: Any) -> float | None:
    """A Python or NumPy number, infinite where it is too large for a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def checked_array(name: str, value: Any, kind: Any, wanted: str) -> Array:
    """`value` as an array of this kind of dtype; never a cast from another kind."""
    require(not isinstance(value, jax.ShapeDtypeStruct), name, value, wanted)
    array = array_of(name, value, wanted)
    require(jnp.issubdtype(array.dtype, kind), name, value, wanted)
    return jnp.asarray(array)


def per_batch(name: str, value: Any, sizes: Sizes, low: int, high: int) -> Array:
    array = masks.integers(name, value)
    require(array.shape in ((), sizes.lead), name, value, f"a scalar or of shape {list(sizes.lead)}, the batch")
    return jnp.broadcast_to(masks.clamp(array, low, high), sizes.lead).reshape(sizes.batch)


def require_key(name: str, key: Any, wanted: str) -> None:
    """One JAX random key, typed or raw."""
    require(hasattr(key, "dtype") and hasattr(key, "shape"), name, key, wanted)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    require(key.shape == () if typed else key.dtype == jnp.uint32 and key.ndim == 1, name, key, wanted)
    try:
        jax.eval_shape(dropout.key_words, key)
    except TypeError as error:
        raise ValueError(f"{name} must be {wanted}, not {described(key)}") from error
