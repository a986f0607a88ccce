"""What attention must compute and move, by formula: standard attention, which writes and reads the N x N matrix, and
flash attention, which streams tiles of one side past tiles of the other.

Dao et al. 2022 (FlashAttention), section 3.2: O(N d + N^2) against O(N^2 d^2 / M) accesses, M the fast memory. Here the
constants are counted too. For flash attention they are bytes between the processors and what is below them: a cache
serves the repeats of a stream, so that device memory sees between the least possible and this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pallas_flash.benchmarks.cases import Workload
from pallas_flash.benchmarks.report import Table

# Reads and writes of an N x N matrix in the inputs' dtype, each product and the softmax a kernel of its own. Forward: S
# written and read, P written and read. Backward: P read for dV, dP written and read, P read and dS written by the
# softmax' gradient, dS read for dQ and for dK.
MATRIX_PASSES = {"forward": 4, "backward": 7}


def _tensors(workload: Workload) -> tuple[int, int, int]:
    """Bytes of q, of k and v together, and of out."""
    w = workload
    unit = w.batch * w.seq_len * w.itemsize
    q, out = unit * w.num_q_heads * w.head_dim, unit * w.num_q_heads * w.dim_v
    return q, unit * w.num_kv_heads * (w.head_dim + w.dim_v), out


def standard_bytes(workload: Workload, passed: str) -> int:
    """Masks save nothing here."""
    if passed == "forward+backward":
        return standard_bytes(workload, "forward") + standard_bytes(workload, "backward")
    w = workload
    q, kv, out = _tensors(w)
    matrix = w.batch * w.num_q_heads * w.seq_len**2 * w.itemsize
    # Forward: q, k, v read, out written. Backward: q, k, v, dout read, dq, dk, dv written; dout a second time, for dV
    # and for dP.
    return MATRIX_PASSES[passed] * matrix + (q + kv + out if passed == "forward" else 2 * (q + kv + out))


def flash_bytes(workload: Workload, passed: str, tile: int) -> int:
    """tile: rows of queries (forward) or keys (backward) that a program keeps while the other side streams past."""
    if passed == "forward+backward":
        return flash_bytes(workload, "forward", tile) + flash_bytes(workload, "backward", tile)
    w = workload
    q, kv, out = _tensors(w)
    group = w.num_q_heads // w.num_kv_heads
    row_statistics = 4 * w.batch * w.seq_len * w.num_q_heads
    # How often each row of the other side passes by, on average: masked tiles are skipped.
    times = math.ceil(w.seq_len / tile) * w.pairs() / w.seq_len**2
    if passed == "forward":  # every query head reads the keys and values that it shares
        return q + out + row_statistics + round(max(times, 1) * group * kv)
    # q, dout and two numbers a row stream by; dq is added to in float32 each time.
    dq = q * 4 // w.itemsize
    return 2 * kv + round(max(times, 1) * (q + out + 2 * row_statistics + dq))


def table(workloads: Sequence[Workload], passed: str, tiles: Sequence[int]) -> Table:
    """GFLOP and GB of each workload."""
    header = ["workload", "GFLOP", "least GB", "standard GB", *(f"flash GB, tiles of {tile}" for tile in tiles)]
    header.append("standard / least")
    rows = []
    for w in workloads:
        least, standard = w.min_bytes(passed), standard_bytes(w, passed)
        sizes = [least, standard, *(flash_bytes(w, passed, tile) for tile in tiles)]
        row = [w.name, f"{w.flops(passed) / 1e9:.1f}", *(f"{size / 1e9:.2f}" for size in sizes)]
        rows.append([*row, f"{standard / least:.1f}"])
    return Table(f"FLOPs and bytes by formula, {passed}", header, rows)
