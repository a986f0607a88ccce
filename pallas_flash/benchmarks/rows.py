"""From what was measured of the programs of a workload to the rows of the results."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallas_flash.benchmarks import check, timing
from pallas_flash.benchmarks.cases import Workload
from pallas_flash.benchmarks.peers import Peer
from pallas_flash.benchmarks.programs import Program
from pallas_flash.benchmarks.timing import Samples

LOST_IN_NOISE = "the difference of two times is lost in their noise"


@dataclasses.dataclass
class Measured:
    """One program of one implementation on the way to its rows. failure: why it has no time."""

    peer: Peer
    kind: str
    program: Program | None = None
    failure: str | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    wrong: bool = False
    samples: Samples = dataclasses.field(default_factory=Samples)
    temp_bytes: int | None = None
    peak_bytes: int | None = None

    def judge(self, errors: dict[str, float], workload: Workload) -> None:
        """Note the errors, and whether any is over budget."""
        self.errors = errors
        if over := check.too_large(errors, workload.dtype):
            limits = check.budget(workload.dtype)
            said = ", ".join(f"{name} {error:.2e} (budget {limits[name]:.2e})" for name, error in over.items())
            self.wrong, self.failure = True, f"relative error of {said}"


def make(workload: Workload, passed: str, parts: list[Measured], ceilings: dict[str, Any] | None) -> dict[str, Any]:
    """parts: the program that a pass is, or the two whose difference it is. Without a time unless all is well."""
    first = parts[0]
    errors = {name: error for name, error in first.errors.items() if passed != "backward" or name != "out"}
    failures = [part.failure or part.samples.failure for part in parts]
    failure = next((text for text in failures if text is not None), None)
    if failure is None and not all(part.samples.times for part in parts):
        failure = "interrupted"
    times = _times(parts) if failure is None else {}
    if times and times["ms"]["median"] <= 0:
        failure = LOST_IN_NOISE
    row = {
        "workload": workload.name,
        "implementation": first.peer.name,
        "pass": passed,
        "status": "ok" if failure is None else "wrong" if any(part.wrong for part in parts) else "failed",
        "reason": failure,
        "errors": {name: error if math.isfinite(error) else None for name, error in errors.items()},
        "method": "difference of forward+backward and forward" if len(parts) == 2 else "a program of its own",
    }
    if first.peer.tile is not None:
        row["tile"] = list(first.peer.tile)
    if failure is not None:
        return row
    memory = {"temp_bytes": first.temp_bytes, "peak_bytes": first.peak_bytes}
    return row | times | memory | _rates(ceilings, workload, passed, times["ms"]["median"])


def _times(parts: list[Measured]) -> dict[str, Any]:
    """Milliseconds of one call, or of the difference of two."""
    samples = [part.samples for part in parts]
    clocks = {each.clock for each in samples}
    clock = clocks.pop() if len(clocks) == 1 else "wall"
    found: dict[str, Any] = {"clock": clock, "clock_note": samples[0].note}
    series = {
        "ms": [each.wall if clock == "wall" else each.device for each in samples],
        "wall_ms": [each.wall for each in samples],
        "sustained_ms": [each.sustained or each.sustained_wall for each in samples],
        "sustained_wall_ms": [each.sustained_wall for each in samples],
    }
    return found | {name: _combined(times) for name, times in series.items() if all(times)}


def _combined(series: list[list[float]]) -> dict[str, float]:
    """Statistics; of a difference, its extremes those of the independent ends (p20 of one less p80 of the other)."""
    first, *others = [timing.statistics(times) for times in series]
    if not others:
        return first
    (other,) = others
    ends = {"median": "median", "p20": "p80", "p80": "p20", "min": "min"}
    return {name: first[name] - other[end] for name, end in ends.items()} | {"samples": first["samples"]}


def _rates(ceilings: dict[str, Any] | None, workload: Workload, passed: str, ms: float) -> dict[str, Any]:
    """Work over time, and its share of what the device reaches in the same run."""
    flops, moved = workload.flops(passed), workload.min_bytes(passed)
    rates: dict[str, Any] = {"tflops": flops / ms / 1e9, "gbps": moved / ms / 1e6}
    if ceilings:
        rates["share_of_matmul"] = rates["tflops"] / ceilings["matmul_tflops"]
        rates["share_of_copy"] = rates["gbps"] / ceilings["copy_gbps"]
        compute, memory = flops / ceilings["matmul_tflops"] / 1e12, moved / ceilings["copy_gbps"] / 1e9
        rates["bound_by"] = "arithmetic" if compute > memory else "memory"
    return rates
