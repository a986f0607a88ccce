"""How these kernels cut their work: choices that may change speed, never results.

Importing this module does not import Pallas.
"""

from __future__ import annotations

import dataclasses

from pallas_flash.kernels.sizes import EVERY_ITEM, round_up

# Of one CTA, by compute capability; what is not listed has no less than the smallest.
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024}
LEAST_SHARED_BYTES = 99 * 1024
BUFFER_ALIGNMENT = 1024  # Pallas gives it to each buffer
COLUMN_UNIT = 32  # head dims are padded to it in shared memory: whole swizzled rows, copied by whole warps
CLEANED_ROWS = 64  # kernels/junk.py looks at so many values at once
WARPGROUP, MAX_REGISTERS = 128, 255  # threads; of one of them
OTHER_REGISTERS = 40  # of a thread: addresses, row statistics, fragments on the way
WARPS_ROWS = "four warps multiply 16 rows each, once or twice"


def max_shared_bytes(capability: tuple[int, int] | None) -> int:
    return SHARED_BYTES.get(capability or (0, 0), LEAST_SHARED_BYTES)


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """A warpgroup holds `block_q` queries and walks over keys in blocks of `block_kv`."""

    block_q: int = 128
    block_kv: int = 64
    num_stages: int = 1  # buffers for key blocks, and as many for value blocks
    q_in_registers: bool = False  # throughout, rather than read from shared memory in every step
    head_group: int = 4  # heads whose tiles are worked on together, so that their keys stay in L2
    rescale_threshold: float = 8.0  # rescale the accumulator only when some maximum grew by more, in base 2
    warpgroups: int = 1  # of a CTA: two hold neighbouring queries of a head, and have the same blocks of keys

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128):
            raise ValueError(f"{self.block_q=} must be 64 or 128: {WARPS_ROWS}")
        if self.block_kv not in (32, 64, 96, 128):
            raise ValueError(f"{self.block_kv=} must be 32, 64, 96 or 128")
        if self.num_stages not in (1, 2, 3):
            raise ValueError(f"{self.num_stages=} must be 1, 2 or 3")
        if self.head_group < 1:
            raise ValueError(f"{self.head_group=} must be at least 1")
        if not 0 <= self.rescale_threshold <= 10:
            raise ValueError(f"{self.rescale_threshold=} must lie between 0 and 10: 2**threshold is kept in 16 bits")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"{self.warpgroups=} must be 1 or 2")

    @property
    def tile_q(self) -> int:
        return self.warpgroups * self.block_q

    @property
    def num_ctas(self) -> int:
        return EVERY_ITEM

    def out_has_own_buffer(self, head_dims: tuple[int, int]) -> bool:
        """On its way out O takes the place of the queries, or of a block of values, if it fits there."""
        return head_dims[0] != head_dims[1] and (self.warpgroups > 1 or self.block_q > self.block_kv)

    def shared_bytes(self, head_dims: tuple[int, int], itemsize: int, *, hides_values: bool) -> int:
        """What a CTA needs, for padded head dims. hides_values: whether some values may need cleaning (junk.py)."""
        q, out = (self.tile_q * dim * itemsize for dim in head_dims)
        k, v = (self.num_stages * self.block_kv * dim * itemsize for dim in head_dims)
        junk = (self.num_stages * 4, self.num_stages * self.block_kv * 4, self.block_q * 4) if hides_values else ()
        buffers = (q, k, v, out if self.out_has_own_buffer(head_dims) else 0, *junk)
        return sum(round_up(size, BUFFER_ALIGNMENT) for size in buffers)


@dataclasses.dataclass(frozen=True)
class QueriesConfig:
    """Of the kernel for dQ: a CTA holds `block_q` queries with their dO and walks over keys in blocks of `block_kv`."""

    block_q: int = 64
    block_kv: int = 64
    num_stages: int = 2  # buffers for blocks of keys with their values
    head_group: int = 4

    def __post_init__(self) -> None:
        _check_backward(self)

    @property
    def tile_q(self) -> int:
        return self.block_q

    @property
    def num_ctas(self) -> int:
        return EVERY_ITEM

    def shared_bytes(self, head_dims: tuple[int, int], itemsize: int) -> int:
        rows = self.block_q + self.num_stages * self.block_kv
        return rows * sum(head_dims) * itemsize

    def registers(self, head_dims: tuple[int, int]) -> int:
        """Of a thread, for dQ, S and dP and the 16-bit dS."""
        return self.block_q * (head_dims[0] + self.block_kv * 5 // 2) // WARPGROUP


@dataclasses.dataclass(frozen=True)
class KeysConfig:
    """Of the kernel for dK and dV: a CTA holds `block_kv` keys with their values and walks over queries, with their dO,
    in blocks of `block_q`.

    part_q: queries of a block whose scores are in registers at the same time; None: all of them.
    fused: dQ comes from this kernel, too, by additions in device memory, unless something forbids that
    (`backward_pass.two_kernels`).
    warpgroups: of a CTA; two share its keys (`backward_pair`), and each has the scores of part_q queries.
    apart: dV and dK come from two runs, as their sums together would not fit into registers.
    """

    block_q: int = 64
    block_kv: int = 64
    num_stages: int = 2  # buffers for blocks of queries with their dO
    head_group: int = 1
    part_q: int | None = None
    fused: bool = False
    warpgroups: int = 1
    apart: bool = False

    def __post_init__(self) -> None:
        _check_backward(self)
        if self.part_q not in (None, 32, 64) or self.block_q % self.columns:
            raise ValueError(f"{self.part_q=} must be None, 32 or 64, and divide {self.block_q=}")
        if self.fused and (self.apart or self.block_q % 64 or self.columns > 64):
            raise ValueError(f"{self.fused=} wants a block_q of 64 or 128, in parts of 32 or 64, and not {self.apart=}")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"{self.warpgroups=} must be 1 or 2")
        if self.warpgroups == 2 and (not self.fused or self.block_q != 2 * self.columns):
            raise ValueError(f"{self.warpgroups=} wants fused=True and a part_q that is half of block_q")

    @property
    def columns(self) -> int:
        """Of a tile in registers, which has keys as rows."""
        return self.part_q or self.block_q

    @property
    def num_ctas(self) -> None:
        return None

    def shared_bytes(self, head_dims: tuple[int, int], itemsize: int) -> int:
        rows = self.block_kv + self.num_stages * self.block_q
        statistics = 3 * round_up(self.num_stages * self.block_q * 4, BUFFER_ALIGNMENT)
        tiles = self.warpgroups * self.block_kv * self.block_q * itemsize if self.fused else 0  # dS, and then P
        return rows * sum(head_dims) * itemsize + statistics + tiles

    def registers(self, head_dims: tuple[int, int]) -> int:
        """Of a thread, for dK and dV, and S and dP and one of them in 16 bits, or dQ of a block."""
        sums = self.block_kv * (max(head_dims) if self.apart else sum(head_dims)) // self.warpgroups
        dq = self.block_q * head_dims[0] // self.warpgroups if self.fused else 0
        return (sums + max(self.block_kv * self.columns * 5 // 2, dq)) // WARPGROUP


def _check_backward(config: QueriesConfig | KeysConfig) -> None:
    for name in ("block_q", "block_kv"):
        size = getattr(config, name)
        if size not in (32, 64, 96, 128):
            raise ValueError(f"{name}={size} must be 32, 64, 96 or 128")
    own = "block_q" if isinstance(config, QueriesConfig) else "block_kv"
    if getattr(config, own) % 64:
        raise ValueError(f"{own}={getattr(config, own)} must be 64 or 128: {WARPS_ROWS}")
    if config.num_stages not in (1, 2):
        raise ValueError(f"{config.num_stages=} must be 1 or 2")
    if config.head_group < 1:
        raise ValueError(f"{config.head_group=} must be at least 1")
