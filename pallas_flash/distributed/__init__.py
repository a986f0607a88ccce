"""Attention over sequences that are sharded over devices, called inside `jax.shard_map`.

Arrays that are sharded over batch and heads need nothing from here: `flash_attention` runs on each device's own part.
"""

from pallas_flash.distributed.order import from_zigzag, local_positions, to_zigzag
from pallas_flash.distributed.ring import ring_attention
from pallas_flash.distributed.ulysses import ulysses_attention

__all__ = ["from_zigzag", "local_positions", "ring_attention", "to_zigzag", "ulysses_attention"]
