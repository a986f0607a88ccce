"""What ring and Ulysses attention were called with, brought into the form that the rest works on."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.checks import checked_array
from pallas_flash.masks import Dense, Mask
from pallas_flash.spec import vary, varying_axes
from pallas_flash.validation import Arguments, Canonical, canonicalise

NAMES = tuple(field.name for field in dataclasses.fields(Arguments))
# Each with the reason.
NOT_TAKEN = {
    "bias": "position-dependent scores go into score_mod",
    "return_max_logit": "the largest logit of a head would have to be gathered from several devices",
}


class Local(NamedTuple):
    """A checked call of one device out of several."""

    call: Canonical
    axis_name: str
    devices: int


def local_call(
    function: str, tensors: tuple[Any, Any, Any], arguments: dict[str, Any], axis_name: str, return_residual: Any
) -> Local:
    """Everything is checked in the shapes that the caller gave, before anything moves. Lengths and prefixes are those
    of whole sequences, of which each device has one of equal parts."""
    _check_names(function, arguments)
    devices = axis_size(function, axis_name)
    named = zip(("query", "key", "value"), tensors, strict=True)
    arrays = [checked_array(name, x, jnp.floating, "a floating-point array") for name, x in named]
    axes = tuple(sorted({*varying_axes(arrays), *varying_axes(lax.axis_index(axis_name))}))
    arrays = [vary(x, axes) for x in arrays]
    call = canonicalise(Arguments(*arrays, **arguments, return_residual=return_residual), devices=devices)
    return Local(call, axis_name, devices)


def axis_size(function: str, axis_name: Any) -> int:
    try:
        return lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(
            f"axis_name must be an axis of the mesh of the shard_map that {function} is called in, not {axis_name!r}"
        ) from error


def _check_names(function: str, arguments: dict[str, Any]) -> None:
    """TypeError or NotImplementedError for keywords that the function does not take, unless they ask for nothing."""
    for name, value in arguments.items():
        if name not in NAMES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if name in NOT_TAKEN and not (value is None or (isinstance(value, bool | np.bool_) and not value)):
            raise NotImplementedError(f"{function} takes no {name}: {NOT_TAKEN[name]}")
        dense = isinstance(value, Mask) and any(isinstance(part, Dense) for part in value.parts)
        if name == "mask" and value is not None and (dense or not isinstance(value, Mask)):
            raise NotImplementedError(f"{function} takes no mask as an array: use pallas_flash.masks")
