"""How the Hopper backward kernel cuts its work: choices that may change speed, never results beyond rounding."""

from __future__ import annotations

import dataclasses

from pallas_flash.kernels.sm90.config import BARRIER_BYTES, BUFFER_ALIGNMENT, round_up

BLOCK_KV = 64  # keys of one compute warpgroup: the rows of a wgmma
COMPUTE_WGS = 2
TILE_KV = COMPUTE_WGS * BLOCK_KV


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """One CTA holds 128 keys and walks over queries in blocks of `block_q`."""

    block_q: int = 64
    num_stages: int = 2  # buffers for blocks of queries and of their output's cotangents
    head_group: int = 1  # heads whose tiles are worked on together, those with the most queries first
    unroll: int = 1  # unmasked blocks a loop's body: with 2 the tensor cores do not run dry between them
    num_ctas: int | None = None  # persistent CTAs; None: one for each work item

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128):
            raise ValueError(f"{self.block_q=} must be 64 or 128")
        if self.num_stages not in (1, 2, 4):
            raise ValueError(f"{self.num_stages=} must be 1, 2 or 4")
        if self.head_group < 1:
            raise ValueError(f"{self.head_group=} must be at least 1")
        if self.unroll not in (1, 2):
            raise ValueError(f"{self.unroll=} must be 1 or 2")
        if self.num_ctas is not None and self.num_ctas < 1:
            raise ValueError(f"{self.num_ctas=} must be at least 1, or None")

    def dq_part(self, head_dim: int) -> tuple[int, int]:
        """The share of one warpgroup in a block of dQ: half of its rows, or all rows and half of its columns."""
        return (64, head_dim) if self.block_q == 128 else (64, head_dim // COMPUTE_WGS)

    def shared_bytes(self, head_dim: int, value_head_dim: int, itemsize: int) -> int:
        both = head_dim + value_head_dim
        keys = TILE_KV * both * itemsize
        queries = self.num_stages * self.block_q * both * itemsize
        ds = 2 * TILE_KV * self.block_q * itemsize
        dq = self.block_q * head_dim * 4
        rows = 2 * round_up(self.num_stages * self.block_q * 4, BUFFER_ALIGNMENT)
        return keys + queries + ds + dq + rows + BARRIER_BYTES
