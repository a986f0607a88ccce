"""How the Hopper kernel for dQ alone cuts its work: choices that may change speed, never results."""

from __future__ import annotations

import dataclasses

from pallas_flash.kernels.sizes import round_up
from pallas_flash.kernels.sm90.config import BARRIER_BYTES, BUFFER_ALIGNMENT

WARPGROUP = 128  # threads
OTHER_REGISTERS = 40  # of a thread: addresses, row statistics, what is on the way


@dataclasses.dataclass(frozen=True)
class QueriesConfig:
    """One CTA holds `compute_wgs * block_q` queries and walks over keys in blocks of `block_kv`."""

    block_q: int = 64  # rows of one compute warpgroup
    block_kv: int = 64
    compute_wgs: int = 2
    value_stages: int = 2  # buffers for value blocks
    overlap: bool = True  # dQ's product runs beside those of the next block; False: registers do not suffice for that
    head_group: int = 4  # heads whose tiles are worked on together, so that their keys stay in L2
    num_ctas: int = 132  # the SMs of an H100 or H200 (SXM)

    def __post_init__(self) -> None:
        if self.block_q != 64:
            raise ValueError(f"{self.block_q=} must be 64: wgmma multiplies 64 rows of a warpgroup")
        if self.block_kv not in (64, 128):
            raise ValueError(f"{self.block_kv=} must be 64 or 128")
        if self.compute_wgs not in (1, 2, 3):
            raise ValueError(f"{self.compute_wgs=} must be 1, 2 or 3: more leave a thread too few registers")
        if self.value_stages not in (1, 2):
            raise ValueError(f"{self.value_stages=} must be 1 or 2")
        if self.head_group < 1:
            raise ValueError(f"{self.head_group=} must be at least 1")
        if self.num_ctas < 1:
            raise ValueError(f"{self.num_ctas=} must be at least 1")

    @property
    def tile_q(self) -> int:
        return self.compute_wgs * self.block_q

    @property
    def key_stages(self) -> int:
        """Buffers for key blocks: `overlap` needs those of two steps."""
        return 2

    @property
    def compute_registers(self) -> int:
        """As `ForwardConfig.compute_registers`."""
        return {1: 240, 2: 232, 3: 160}[self.compute_wgs]

    @property
    def copy_registers(self) -> int:
        return {1: 40, 2: 40, 3: 32}[self.compute_wgs]

    def fits(self, head_dim: int) -> bool:
        """Whether dQ, S and dP, and with overlap dS, leave a thread enough registers, for a padded head dim."""
        elements = head_dim + 2 * self.block_kv + (self.block_kv // 2 if self.overlap else 0)
        return elements * self.block_q // WARPGROUP <= self.compute_registers - OTHER_REGISTERS

    def shared_bytes(self, head_dims: tuple[int, int], itemsize: int) -> int:
        """What a CTA needs of `MAX_SHARED_BYTES` for padded head dims."""
        queries = (self.tile_q * dim for dim in head_dims)
        stages = self.key_stages, self.value_stages
        keys = (count * self.block_kv * dim for count, dim in zip(stages, head_dims, strict=True))
        return sum(round_up(size * itemsize, BUFFER_ALIGNMENT) for size in (*queries, *keys)) + BARRIER_BYTES
