"""What the calls of all Hopper kernels share around the kernels themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from pallas_flash.kernels import tile_function
from pallas_flash.spec import vary, varying_axes


def varying(results: Any, operands: Any) -> Any:
    """Inside shard_map, results differ from device to device as the operands do; a kernel does not say so."""
    axes = varying_axes(operands)
    return jax.tree.map(lambda array: vary(array, axes), results)


def mesh_obstacle(array: Any) -> str | None:
    sharding = array.sharding if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array).sharding
    if sharding is not None and jax.sharding.AxisType.Explicit in sharding.mesh.axis_types:
        return "arrays on a mesh with explicit axes: call it inside shard_map"
    return None


def function_obstacle(functions: Iterable[tuple[str, Any]]) -> str | None:
    """functions: names, and `Elementwise` functions or None."""
    for name, function in functions:
        if function is not None and (obstacle := tile_function.obstacle(function)) is not None:
            return f"{name} uses {obstacle}, which the kernel cannot compute"
    return None


def array_obstacle(name: str, arrays: Any) -> str | None:
    """Of arrays of which the kernel reads single elements."""
    unread = [array.dtype for array in jax.tree.leaves(arrays) if array.dtype.name not in tile_function.STORED]
    return f"{name} has an array of {unread[0]}, which it does not read" if unread else None
