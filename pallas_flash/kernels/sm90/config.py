"""How the Hopper kernels cut their work: choices that may change speed, never results."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_flash.kernels.sizes import EVERY_ITEM, round_up
from pallas_flash.spec import AttentionSpec

MAX_SHARED_BYTES = 232_448  # of one CTA
BARRIER_BYTES = 1024
MIN_MASKED_BLOCK = 64  # rows of values that kernels/junk.py can clean
BUFFER_ALIGNMENT = 1024  # Pallas gives it to each buffer


def as_called[C: Any](config: C | None, spec: AttentionSpec) -> C | None:
    """The tuned tiles as a call wants them: not persistent where other kernels run beside it. One that holds a few SMs
    would let a few persistent CTAs start only when the others have ended, after twice the time; and one that comes
    later would wait for them all. NCCL's sends do both, as each waits for its peer on the other device."""
    persistent = config is not None and config.num_ctas is not None
    return dataclasses.replace(config, num_ctas=EVERY_ITEM) if persistent and spec.shares_device else config


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """One CTA holds `compute_wgs * block_q` queries and walks over keys in blocks of `block_kv`."""

    block_q: int = 64  # rows of one compute warpgroup
    block_kv: int = 128
    compute_wgs: int = 2
    num_stages: int = 2  # buffers for key and value blocks
    head_group: int = 4  # heads whose tiles are worked on together, so that their keys stay in L2
    take_turns: bool = True  # warpgroups alternate between tensor cores and softmax
    out_has_own_buffer: bool = True  # else it shares the queries', and the next queries load later
    own_bodies: bool = False  # a program for each compute warpgroup: its number as data costs registers
    rescale_threshold: float = 8.0  # rescale the accumulator only when some maximum grew by more, in base 2
    num_ctas: int = 132  # the SMs of an H100 or H200 (SXM)

    def __post_init__(self) -> None:
        if self.block_q != 64:
            raise ValueError(f"{self.block_q=} must be 64: wgmma multiplies 64 rows of a warpgroup")
        if self.block_kv < 16 or self.block_kv % 16 or self.block_kv > 256:
            raise ValueError(f"{self.block_kv=} must be a multiple of 16 between 16 and 256")
        if self.compute_wgs not in (1, 2, 3):
            raise ValueError(f"{self.compute_wgs=} must be 1, 2 or 3: more leave a thread too few registers")
        if self.num_stages < 2:
            raise ValueError(f"{self.num_stages=} must be at least 2")
        if self.head_group < 1:
            raise ValueError(f"{self.head_group=} must be at least 1")
        if not 0 <= self.rescale_threshold <= 10:
            raise ValueError(f"{self.rescale_threshold=} must lie between 0 and 10: 2**threshold is kept in 16 bits")
        if self.num_ctas < 1:
            raise ValueError(f"{self.num_ctas=} must be at least 1")

    @property
    def tile_q(self) -> int:
        return self.compute_wgs * self.block_q

    @property
    def compute_registers(self) -> int:
        """Of one thread. With `copy_registers` it must come out of what the kernel was launched with: 65,536 registers
        over all threads, a multiple of 8 each. More would wait for ever."""
        return {1: 240, 2: 232, 3: 160}[self.compute_wgs]

    @property
    def copy_registers(self) -> int:
        return {1: 40, 2: 40, 3: 32}[self.compute_wgs]

    def shared_bytes(self, head_dim: int, value_head_dim: int, itemsize: int, *, hides_values: bool) -> int:
        """What a CTA needs of `MAX_SHARED_BYTES`. hides_values: whether some values may need cleaning (junk.py)."""
        q, out = (self.tile_q * dim * itemsize for dim in (head_dim, value_head_dim))
        k, v = (self.num_stages * self.block_kv * dim * itemsize for dim in (head_dim, value_head_dim))
        rows = self.tile_q * 4
        junk = (self.num_stages * self.block_kv * 4, rows, *[BUFFER_ALIGNMENT] * 2) if hides_values else ()
        own = out * self.out_has_own_buffer
        buffers = (q if self.out_has_own_buffer else max(q, out), k, v, own, rows, rows, *junk)
        return sum(round_up(size, BUFFER_ALIGNMENT) for size in buffers) + BARRIER_BYTES
