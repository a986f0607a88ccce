"""How the Hopper backward kernel cuts its work: choices that may change speed, never results beyond rounding."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_flash.kernels.sizes import round_up
from pallas_flash.kernels.sm90.config import BARRIER_BYTES, BUFFER_ALIGNMENT

BLOCK = 64  # rows of the products of one compute warpgroup
COMPUTE_WGS = 2


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """One CTA holds `block_kv` keys and walks over queries in blocks of `block_q`.

    block_kv=128: each of the two compute warpgroups has 64 of the keys. block_kv=64, for head dims whose sums would not
    fit into registers so: the warpgroups share the keys, and each has half of the columns of dQ, dK and dV.
    """

    block_q: int = 64
    block_kv: int = 128
    num_stages: int = 2  # buffers for blocks of queries
    dout_stages: int = 2  # and for their output's cotangents
    head_group: int = 1  # heads whose tiles are worked on together, those with the most queries first
    num_ctas: int | None = None  # persistent CTAs; None: one for each work item
    own_outputs: bool = False  # dK and dV leave from buffers of their own, so that the next K and V come earlier
    late_dq: bool = False  # dQ of a block is multiplied a step later, so that no warpgroup waits for the other's dS
    take_turns: bool = False  # warpgroups alternate between the tensor cores and P, dS; with late_dq only

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128):
            raise ValueError(f"{self.block_q=} must be 64 or 128")
        if self.block_kv not in (64, 128):
            raise ValueError(f"{self.block_kv=} must be 64 or 128")
        if self.shares_keys and self.block_q != 64:
            raise ValueError(f"{self.block_q=} must be 64 where block_kv is")
        for name, stages in (("num_stages", self.num_stages), ("dout_stages", self.dout_stages)):
            if stages not in (1, 2):
                raise ValueError(f"{name}={stages} must be 1 or 2")
        for name in ("own_outputs", "late_dq"):
            if getattr(self, name) and self.shares_keys:
                raise ValueError(f"self.{name}=True needs {self.block_kv=} to be 128")
        if self.take_turns and not self.late_dq:
            raise ValueError(f"self.take_turns=True needs {self.late_dq=} to be True")
        if self.take_turns and min(self.num_stages, self.dout_stages) < 2:
            # A warpgroup that has its turn waits for the next block, which would wait for the other one's turn.
            raise ValueError(f"self.take_turns=True needs {self.num_stages=} and {self.dout_stages=} to be 2")
        if self.head_group < 1:
            raise ValueError(f"{self.head_group=} must be at least 1")
        if self.num_ctas is not None and self.num_ctas < 1:
            raise ValueError(f"{self.num_ctas=} must be at least 1, or None")

    @property
    def shares_keys(self) -> bool:
        return self.block_kv == BLOCK

    @property
    def dk_in_ds(self) -> bool:
        """Whether dK leaves from the two buffers of dS: beside dV's there is no room for one of its own."""
        return self.own_outputs and self.block_q == BLOCK

    def needs_slopes(self, dtype: Any, *, derivative: bool, dropout: bool) -> bool:
        """Whether dS is made from another matrix in shared memory than P as the product with dO takes it: P before
        dropout, P times the derivative of the logits, or P rounded less than to bfloat16, which alone would add as
        much to the error of the gradients as all other roundings."""
        return self.shares_keys and (derivative or dropout or dtype == jnp.bfloat16)

    def padded(self, head_dim: int, value_head_dim: int) -> tuple[int, int]:
        """The head dims that the kernel works with: what is read in parts of columns, by whole swizzled rows."""
        if self.shares_keys:
            unit = COMPUTE_WGS * 32
            return round_up(head_dim, unit), round_up(value_head_dim, unit)
        return round_up(head_dim, 64 if self.block_q == 128 else COMPUTE_WGS * 64), round_up(value_head_dim, 64)

    def fits(self, head_dim: int, value_head_dim: int) -> bool:
        """Whether the sums of a warpgroup, dK and dV beside S and dP, leave it enough registers."""
        columns = sum(self.padded(head_dim, value_head_dim))
        return columns <= (512 if self.shares_keys else 128 if self.block_q == 128 else 256)

    def sum_columns(self, head_dim: int) -> int:
        """Of dK or dV in one warpgroup."""
        return head_dim // COMPUTE_WGS if self.shares_keys else head_dim

    def dq_chunks(self, wg: int, head_dim: int) -> tuple[tuple[int, int, int], ...]:
        """The share of a warpgroup in a block of dQ, in parts of 64 rows: (first row, first column, columns)."""
        if self.block_q == 128:
            return ((wg * BLOCK, 0, head_dim),)
        columns = head_dim // COMPUTE_WGS
        size = 64 if columns % 64 == 0 else columns
        return tuple((0, first, size) for first in range(wg * columns, (wg + 1) * columns, size))

    def dq_columns(self, head_dim: int) -> int:
        return self.dq_chunks(0, head_dim)[0][2]

    def shared_bytes(self, head_dims: tuple[int, int], itemsize: int, *, slopes: bool, maximum: bool) -> int:
        """What a CTA needs of `MAX_SHARED_BYTES` for padded head dims. slopes, maximum: whether the buffers
        `slopes` and `rows.m` are there."""
        tile = self.block_kv * self.block_q * itemsize
        keys = self.block_kv * sum(head_dims) * itemsize
        stages = self.num_stages, self.dout_stages
        queries = sum(n * self.block_q * dim * itemsize for n, dim in zip(stages, head_dims, strict=True))
        weights = (1 if self.shares_keys else 2) * tile + self.shares_keys * (2 + slopes) * tile
        dq = COMPUTE_WGS * BLOCK * self.dq_columns(head_dims[0]) * 4
        rows = sum(round_up(n * self.block_q * 4, BUFFER_ALIGNMENT) for n in (*stages, *[self.num_stages] * maximum))
        outputs = self.own_outputs * self.block_kv * (head_dims[1] if self.dk_in_ds else sum(head_dims))
        return outputs * itemsize + keys + queries + weights + dq + rows + BARRIER_BYTES
