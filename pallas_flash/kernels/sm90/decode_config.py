"""How the Hopper decoding kernel cuts its work: choices that may change speed, never results."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from pallas_flash.kernels.sizes import COLUMNS, round_up
from pallas_flash.kernels.sm90.config import BARRIER_BYTES, BUFFER_ALIGNMENT, MAX_SHARED_BYTES
from pallas_flash.spec import Shapes

ROWS = 64  # of a tile of queries: what wgmma multiplies
WARP_ROWS = 16  # of them if each warp works on keys of its own
MERGED_COLUMNS = 8  # of the four warps' results, at a time
THREADS = 128  # of a CTA: one warpgroup
SM_SHARED_BYTES = 233_472  # of all CTAs of an SM
CTA_OVERHEAD_BYTES = 1024  # that the hardware takes for each
KEYS_PER_ROW = 64  # of a share that only evens out lengths: its results are then 2 % of what it reads
MOST_CTAS = 3  # of an SM: a thread then has up to 168 registers
SMS = 132  # of an H100 or H200 (SXM)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """One CTA is one warpgroup. It holds a tile of queries and walks over its share of the keys in blocks."""

    block_kv: int = 64
    k_stages: int = 3  # buffers for blocks of keys
    v_stages: int = 2  # for blocks of values, which are needed a little later
    rescale_threshold: float = 8.0  # rescale the accumulator only when some maximum grew by more, in base 2
    keys_per_split: int = 4096  # a cache is cut into shares of about so many keys, so that ragged lengths balance
    min_keys_per_split: int = 256  # in a small batch into smaller ones, so that there is one for every CTA at once
    early_combine: bool = False  # launch the merging kernel while the splits run; it waits for them on the GPU
    by_warps: bool = True  # caches in 8 bits, up to 16 rows: each warp works on keys of its own
    most_ctas: int = MOST_CTAS  # of an SM, as far as registers allow
    num_sms: int = SMS

    def __post_init__(self) -> None:
        if self.block_kv not in (64, 128):
            raise ValueError(f"{self.block_kv=} must be 64 or 128")
        for name in ("k_stages", "v_stages", "most_ctas", "num_sms"):
            if getattr(self, name) < 1:
                raise ValueError(f"self.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.rescale_threshold <= 10:
            raise ValueError(f"{self.rescale_threshold=} must lie between 0 and 10: 2**threshold is kept in 16 bits")
        for name in ("keys_per_split", "min_keys_per_split"):
            if getattr(self, name) < self.block_kv:
                raise ValueError(f"self.{name}={getattr(self, name)} must be at least {self.block_kv=}")

    @property
    def min_blocks(self) -> int:
        return self.min_keys_per_split // self.block_kv

    def splits(self, keys: int, tiles: int, rows: int, ctas_per_sm: int) -> int:
        """Into how many shares to cut each of `tiles` walks of up to so many keys: what fills the GPU once, or more
        where the shares would be long, as some sequence may be much longer than the others. rows: queries of a key
        head; results of shares stay small beside the keys that they are of."""
        at_once = ctas_per_sm * self.num_sms
        filling = min(at_once // tiles, keys // self.min_keys_per_split)
        of_bearable_length = keys // max(self.keys_per_split, KEYS_PER_ROW * rows)
        if filling >= of_bearable_length:
            return max(filling, 1)

        def blocks_in_turn(splits: int) -> int:
            """That the SMs work on one after the other: they should not wait for a last few CTAs."""
            return -(-tiles * splits // at_once) * -(-keys // (splits * self.block_kv))

        return min(range(of_bearable_length, of_bearable_length * 5 // 4 + 1), key=blocks_in_turn)

    def works_by_warps(self, rows: int, dtype: Any, cache_dtype: Any) -> bool:
        """rows: queries of a key head."""
        return self.by_warps and dtype != cache_dtype and rows <= WARP_ROWS

    def shared_bytes(self, head_dims: tuple[int, int], dtype: Any, cache_dtype: Any, rows: int = ROWS) -> int:
        """What a CTA needs. A block of a cache in 8 bits is converted to 16, there or in registers."""
        head_dim, value_head_dim = head_dims
        k, v = (self.block_kv * dim * np.dtype(cache_dtype).itemsize for dim in head_dims)
        by_warps = self.works_by_warps(rows, dtype, cache_dtype)
        q_rows = WARP_ROWS if by_warps else ROWS
        buffers = [q_rows * head_dim * np.dtype(dtype).itemsize, self.k_stages * k, self.v_stages * v]
        if by_warps:
            buffers += [2 * ROWS * MERGED_COLUMNS * 4, 2 * ROWS * 4]
        elif dtype != cache_dtype:
            buffers += [self.block_kv * dim * np.dtype(dtype).itemsize for dim in (head_dim, value_head_dim)]
            buffers += [2 * THREADS * 4]  # scales
        if not by_warps:
            buffers += [BUFFER_ALIGNMENT] * 3  # what is known of junk
        return sum(round_up(size, BUFFER_ALIGNMENT) for size in buffers) + BARRIER_BYTES

    def ctas_per_sm(self, shared_bytes: int) -> int:
        assert shared_bytes <= MAX_SHARED_BYTES
        return min(SM_SHARED_BYTES // (shared_bytes + CTA_OVERHEAD_BYTES), self.most_ctas)


def padded_head_dims(shapes: Shapes, cache_dtype: Any) -> tuple[int, int]:
    """As buffers hold them: in whole units of a buffer of the cache."""
    unit = COLUMNS * 2 // np.dtype(cache_dtype).itemsize
    return round_up(shapes.head_dim, unit), round_up(shapes.value_head_dim, unit)


def copy_rows(page_size: int | None, block_kv: int) -> int:
    """Consecutive rows of a block that surely stand in one page."""
    return block_kv if page_size is None else math.gcd(page_size, block_kv)
