"""Checks of single arguments, under their names: what several of the public functions take."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import dropout, masks
from pallas_flash.spec import Array, array_of, described, is_array, jax_array


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


def require_known_sizes(arrays: dict[str, Any], instead: str = "") -> None:
    """NotImplementedError, with the array's name, for a symbolic size of `jax.export`: tiles are cut, and those to skip
    are counted, when the program is compiled."""
    for name, array in arrays.items():
        unknown = [size for size in (array.shape if is_array(array) else ()) if not isinstance(size, int | np.integer)]
        if unknown:
            raise NotImplementedError(
                f"{name} {described(array)} has the symbolic size {unknown[0]}: sizes must be known when the "
                f"program is compiled{instead}"
            )


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
    array = array_of(name, value, wanted)
    require(jnp.issubdtype(array.dtype, kind), name, value, wanted)
    return jax_array(name, array, wanted)


def per_batch(name: str, value: Any, sizes: Sizes, low: int, high: int) -> Array:
    array = masks.integers(name, value)
    require(array.shape in ((), sizes.lead), name, value, f"a scalar or of shape {list(sizes.lead)}, the batch")
    known = isinstance(high, int)  # and not a symbolic size of jax.export
    clamped = masks.clamp(array, low, high if known else masks.FAR)
    clamped = clamped if known else jnp.minimum(clamped, jnp.asarray(high, jnp.int32))
    return jnp.broadcast_to(clamped, sizes.lead).reshape(sizes.batch)


def require_key(name: str, key: Any, wanted: str) -> None:
    """One JAX random key, typed or raw."""
    require(is_array(key), name, key, wanted)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    require(key.shape == () if typed else key.dtype == jnp.uint32 and key.ndim == 1, name, key, wanted)
    try:
        jax.eval_shape(dropout.key_words, key)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be {wanted}, not {described(key)}") from error
