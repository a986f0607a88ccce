"""Which tokens of a sequence a device holds.

contiguous  device d of P holds the d-th of P chunks.
zigzag      device d holds the d-th and the d-th from the end of 2 P chunks, so that under a causal mask, where late
            queries see more keys than early ones, all devices have the same to do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.checks import require
from pallas_flash.distributed.arguments import axis_size
from pallas_flash.spec import Array, described, jax_array

NAMES = ("contiguous", "zigzag")


@dataclasses.dataclass(frozen=True)
class Order:
    name: str
    devices: int

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"order must be one of {', '.join(NAMES)}, not {self.name!r}")

    @property
    def chunks_a_device(self) -> int:
        return 2 if self.name == "zigzag" else 1

    @property
    def chunks(self) -> int:
        return self.devices * self.chunks_a_device

    def chunks_of(self, device: Any) -> tuple[Any, ...]:
        """The numbers of the chunks that a device holds, in the order in which it holds them."""
        return (device, self.chunks - 1 - device) if self.name == "zigzag" else (device,)

    def chunk_len(self, name: str, local_len: int) -> int:
        size, rest = divmod(local_len, self.chunks_a_device)
        if rest:
            raise ValueError(f"{name} must have an even number of rows a device in zigzag order, not {local_len}")
        return size

    def parts(self, array: Array, axis: int) -> list[Array]:
        """A device's rows, cut into its chunks."""
        return jnp.split(array, self.chunks_a_device, axis)


def to_zigzag(array: Array, devices: int, axis: int = 1) -> Array:
    """The rows of a whole sequence in zigzag order: sharding the result evenly along `axis` over `devices` gives device
    d the d-th chunk and the d-th from the end. For tokens, targets, segment ids, and for positions.

    Raises ValueError unless the length is a multiple of 2 * devices.

    >>> import jax.numpy as jnp
    >>> from pallas_flash.distributed import from_zigzag, to_zigzag
    >>> to_zigzag(jnp.arange(8), devices=2, axis=0).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    >>> from_zigzag(to_zigzag(jnp.arange(8), 2, 0), 2, 0).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    array = jax_array("array", array, "an array")
    return jnp.take(array, _zigzag_rows(array, devices, axis), axis)


def from_zigzag(array: Array, devices: int, axis: int = 1) -> Array:
    """The inverse of `to_zigzag`."""
    array = jax_array("array", array, "an array")
    return jnp.take(array, np.argsort(_zigzag_rows(array, devices, axis)), axis)


def _zigzag_rows(array: Array, devices: int, axis: int) -> np.ndarray:
    require(_is_int(devices) and devices >= 1, "devices", devices, "an integer, at least 1")
    wanted = f"an axis of array {described(array)}"
    require(_is_int(axis) and -array.ndim <= axis < array.ndim, "axis", axis, wanted)
    order = Order("zigzag", int(devices))
    length = array.shape[axis]
    if length % order.chunks:
        raise ValueError(f"axis {axis} must be a multiple of 2 * {devices} devices long, not {length}")
    chunks = np.arange(length).reshape(order.chunks, -1)
    return chunks[np.array([order.chunks_of(d) for d in range(devices)]).ravel()].ravel()


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def local_positions(local_len: int, axis_name: str, order: str = "contiguous") -> Array:
    """Inside shard_map: the position of each row that this device holds, int32 [local_len], as rotary embeddings need
    it.

    >>> import jax
    >>> from jax.sharding import PartitionSpec as P
    >>> from pallas_flash.distributed import local_positions
    >>> mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> positions = jax.shard_map(
    ...     lambda: local_positions(4, "context", "zigzag"), mesh=mesh, in_specs=(), out_specs=P("context")
    ... )
    >>> positions().tolist()
    [0, 1, 2, 3]
    """
    require(_is_int(local_len) and local_len >= 0, "local_len", local_len, "an integer, at least 0")
    whole = Order(order, axis_size("local_positions", axis_name))
    size = whole.chunk_len("a sequence", int(local_len))
    rows = jnp.arange(size, dtype=jnp.int32)
    return jnp.concatenate([chunk * size + rows for chunk in whole.chunks_of(lax.axis_index(axis_name))])
