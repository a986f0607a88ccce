"""What attention must compute and move, by formula and as counted: standard attention, which writes and reads the N x N
matrix, and flash attention, which streams tiles of one side past tiles of the other.

Dao et al. 2022 (FlashAttention), section 3.2: O(N d + N^2) against O(N^2 d^2 / M) accesses, M the fast memory. Here the
constants are counted too. For flash attention they are bytes between the processors and what is below them: a cache
serves the repeats of a stream, so that device memory sees between the least possible and this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from pallas_flash.benchmarks import ncu, results
from pallas_flash.benchmarks.cases import Workload
from pallas_flash.benchmarks.peers import Peer
from pallas_flash.benchmarks.tables import Table

KIND = "traffic"  # of the files that `measure` writes

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


# Dao et al. 2022 (FlashAttention), figure 2 left: GPT-2 medium, sequence 1024, head dim 64, 16 heads, batch 64, forward
# and backward on an A100. Their GFLOP are not those of the matrix products, which are 962 for this size.
PUBLISHED = (
    ("gpt2-full-1024", "published, A100: standard", 66.6, 40.3, 41.7),
    ("gpt2-full-1024", "published, A100: FlashAttention", 75.2, 4.4, 7.3),
)


def measure(
    workloads: Sequence[Workload],
    peers: Sequence[Peer],
    passes: Sequence[str],
    file: results.ResultsFile,
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Count the bytes of each program, one process after the other; the file is whole after each row."""
    content: dict[str, Any] = {
        "schema": results.SCHEMA,
        "kind": KIND,
        "environment": results.environment(),
        "inputs": "standard normal",
        "settings": {"passes": list(passes)},
        "workloads": {w.name: _by_formula(w, passes) for w in workloads},
        "rows": [],
    }
    file.write(content)
    for each in itertools.product(workloads, passes, peers):
        content["rows"].append(row := _row(*each))
        file.write(content)
        show(row)


def _by_formula(workload: Workload, passes: Sequence[str]) -> dict[str, Any]:
    each = {
        passed: {
            "gflop": workload.flops(passed) / 1e9,
            "least": workload.min_bytes(passed),
            "standard": standard_bytes(workload, passed),
        }
        for passed in passes
    }
    names = ("head_dim", "seq_len", "is_causal")
    return {name: getattr(workload, name) for name in names} | {"formula": each}


def _row(workload: Workload, passed: str, peer: Peer) -> dict[str, Any]:
    row: dict[str, Any] = {"workload": workload.name, "implementation": peer.name, "pass": passed}
    if peer.tile is not None:
        row["tile"] = list(peer.tile)
    try:
        counted = ncu.count(workload, peer.name, passed)
    except RuntimeError as error:  # a row of the table
        return row | {"status": "failed", "reason": str(error)}
    sums = {name: sum(getattr(kernel, name) for kernel in counted) for name in ("read", "written", "ms")}
    return row | {"status": "ok", "reason": None, **sums, "kernels": [kernel._asdict() for kernel in counted]}


def counted(content: dict[str, Any], passed: str) -> Table:
    """What was counted, beside the least possible and, where there are any, published figures of the same size."""
    header = ["workload", "implementation", "kernels", "GB read", "GB written", "GB", "x least", "GFLOP", "ms"]
    rows = []
    for row in (row for row in content["rows"] if row["pass"] == passed):
        formula = content["workloads"][row["workload"]]["formula"][passed]
        line = [row["workload"], row["implementation"]]
        if row["status"] != "ok":
            rows.append([*line, row["reason"], *[""] * (len(header) - 3)])
            continue
        total = row["read"] + row["written"]
        sizes = [f"{size / 1e9:.2f}" for size in (row["read"], row["written"], total)]
        line += [str(len(row["kernels"])), *sizes, f"{total / formula['least']:.2f}"]
        rows.append([*line, f"{formula['gflop']:.1f}", f"{row['ms']:.3g}"])
    named = {row[0] for row in rows}
    if passed == "forward+backward":
        rows += [
            [workload, what, "", "", "", f"{gb}", "", f"{gflop}", f"{ms}"]
            for workload, what, gflop, gb, ms in PUBLISHED
            if workload in named
        ]
    return Table(f"Bytes of device memory, {passed}", header, rows)


def kernels(content: dict[str, Any], passed: str) -> Table:
    """The kernels of each program."""
    rows = [
        [row["workload"], row["implementation"], kernel["name"][:60], f"{kernel['read'] / 1e6:.1f}",
         f"{kernel['written'] / 1e6:.1f}", f"{kernel['ms']:.3g}"]
        for row in content["rows"]
        if row["pass"] == passed and row["status"] == "ok"
        for kernel in row["kernels"]
    ]  # fmt: skip
    return Table(f"Kernels, {passed}", ["workload", "implementation", "kernel", "MB read", "MB written", "ms"], rows)
