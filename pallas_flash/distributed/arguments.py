"""What ring and Ulysses attention were called with, brought into the form that the rest works on."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_flash.masks import Dense, Mask
from pallas_flash.spec import Array, vary, varying_axes
from pallas_flash.validation import Arguments, Canonical, canonicalise

TAKEN = tuple(
    field.name
    for field in dataclasses.fields(Arguments)
    if field.name not in ("query", "key", "value", "bias", "return_residual", "return_max_logit")
)


class Local(NamedTuple):
    """A checked call of one device out of several."""

    call: Canonical
    axis_name: str
    devices: int


def check_names(function: str, arguments: dict[str, Any]) -> None:
    """TypeError or NotImplementedError for keywords that the function does not take."""
    for name, value in arguments.items():
        if name in ("bias", "return_max_logit"):
            raise NotImplementedError(f"{function} takes no {name}: position-dependent scores go into score_mod")
        if name not in TAKEN:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        dense = isinstance(value, Mask) and any(isinstance(part, Dense) for part in value.parts)
        if name == "mask" and value is not None and (dense or not isinstance(value, Mask)):
            raise NotImplementedError(f"{function} takes no mask as an array: use pallas_flash.masks")


def axis_size(function: str, axis_name: Any) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name must be an axis of the mesh of the shard_map that {function} is called in, not {axis_name!r}"
        ) from error


def local_call(function: str, tensors: tuple[Array, Array, Array], arguments: dict[str, Any], axis_name: str) -> Local:
    """Lengths and prefixes are those of whole sequences, of which each device has one of equal parts."""
    check_names(function, arguments)
    devices = axis_size(function, axis_name)
    axes = tuple(sorted({*varying_axes(tensors), *varying_axes(lax.axis_index(axis_name))}))
    tensors = jax.tree.map(lambda x: vary(x, axes) if isinstance(x, jax.Array) else x, tensors)
    call = canonicalise(Arguments(*tensors, **arguments), devices=devices)
    return Local(call, axis_name, devices)
