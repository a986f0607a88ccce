"""What the Hopper decoding kernel carries from one block of keys to the next."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import softmax
from pallas_flash.kernels.sm90 import decode_copies
from pallas_flash.kernels.sm90.decode_config import ROWS
from pallas_flash.kernels.sm90.decode_plan import Worker


class State(NamedTuple):
    """Between two key blocks; O's accumulator stands apart."""

    stats: softmax.RowStatistics
    k_scale: jax.Array | None  # of the next block
    v_scale: jax.Array | None


def tile_of(columns: int, value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS, columns), value, jnp.float32), plgpu.Layout.WGMMA)


def first_state(worker: Worker) -> State:
    rows = plgpu.layout_cast(jnp.full((ROWS,), softmax.NO_MAXIMUM, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    part = functools.partial(tile_of, softmax.COLUMNS)
    stats = softmax.RowStatistics(part(softmax.NO_MAXIMUM), rows, part(0.0))
    scales = (
        decode_copies.scale(worker, source, jnp.int32(0)) for source in (worker.inputs.k_scale, worker.inputs.v_scale)
    )
    return State(stats, *scales)
