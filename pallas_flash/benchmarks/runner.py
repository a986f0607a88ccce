"""A run: for each workload compile all programs, check them, time those that are right, write the rows."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_flash.benchmarks import cases, check, programs, results, timing
from pallas_flash.benchmarks.cases import Workload
from pallas_flash.benchmarks.peers import Peer
from pallas_flash.benchmarks.programs import Program
from pallas_flash.benchmarks.progress import Progress
from pallas_flash.benchmarks.timing import Samples, Timer

MAX_COMPILING = 16
LONGER_THAN_LAST = 1.25  # how much longer than the longest so far a workload is allowed to take, in the plan


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is run. limit: seconds after which no workload is started that may not fit; None: no limit."""

    workloads: Sequence[Workload]
    passes: Sequence[str]
    peers: Sequence[Peer]
    rounds: int = 3
    iterations: int = 8
    sustained: bool = False
    limit: float | None = None
    folder: Path = Path("output/benchmarks")
    note: str | None = None


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


class Run(NamedTuple):
    """A run on its way: what it is to do, what it has found so far, and where that goes."""

    settings: Settings
    content: dict[str, Any]
    file: results.ResultsFile
    progress: Progress

    def add(self, row: dict[str, Any]) -> None:
        self.content["rows"].append(row)
        self.file.write(self.content)
        self.progress.show(row)


def run(settings: Settings, progress: Progress) -> Path:
    """Measure; returns the JSON file. After KeyboardInterrupt too: what was measured is in it, marked interrupted."""
    start = time.perf_counter()
    on_gpu = jax.default_backend() == "gpu"
    timer = Timer(settings.iterations, on_gpu)
    content: dict[str, Any] = {
        "schema": results.SCHEMA,
        "environment": results.environment(),
        "inputs": cases.DISTRIBUTION,
        "settings": _as_json(settings),
        "interrupted": False,
        "left_out": [],
        "ceilings": None,
        "workloads": {w.name: dataclasses.asdict(w) | {"pairs": w.pairs()} for w in settings.workloads},
        "rows": [],
    }
    current = Run(settings, content, results.ResultsFile(settings.folder), progress)
    current.file.write(content)
    try:
        content["ceilings"] = timing.ceilings(timer)
        longest = 0.0
        for index, workload in enumerate(settings.workloads):
            began = time.perf_counter()
            if settings.limit is not None and began - start + LONGER_THAN_LAST * longest > settings.limit:
                content["left_out"] = [w.name for w in settings.workloads[index:]]
                break
            progress.start(workload.name)
            _run_workload(current, workload, timer)
            longest = max(longest, time.perf_counter() - began)
    except KeyboardInterrupt:
        content["interrupted"] = True
    content["seconds"] = time.perf_counter() - start
    current.file.write(content)
    return current.file.path


def _as_json(settings: Settings) -> dict[str, Any]:
    plain = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    names = {name: [each.name for each in plain[name]] for name in ("workloads", "peers")}
    return plain | names | {"folder": str(settings.folder), "passes": list(settings.passes)}


def _run_workload(current: Run, workload: Workload, timer: Timer) -> None:
    settings = current.settings
    measured = [
        Measured(peer, kind)
        for peer in settings.peers
        for kind in programs.wanted(settings.passes, alone=peer.backward_alone)
    ]
    try:
        want = _prepare(measured, workload, timer)
        if want is None:
            return
        for each in measured:
            _judge(each, workload, want)
        del want
        timed = [(each.program, each.samples) for each in measured if each.program is not None]
        timing.interleave(timed, timer, settings.rounds, sustained=settings.sustained)
    finally:  # an interruption keeps the rounds that are done
        _add_rows(current, workload, measured)


def _prepare(measured: list[Measured], workload: Workload, timer: Timer) -> check.Results | None:
    """Compile all programs of a workload at once, before anything is timed, and compute what is expected; None, with
    the reason in every program's place, if that cannot be computed."""

    def attempt(each: Measured, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # whatever stops an implementation is a row of the table
            each.failure = programs.reason(error)

    def finish(each: Measured, compiling: Callable[[], Program]) -> None:
        each.program = attempt(each, compiling)

    try:
        count = programs.number_of_sets(workload, rotate=timer.on_gpu)
        sets = [cases.make_inputs(workload, seed) for seed in range(count)]
        with ThreadPoolExecutor(min(MAX_COMPILING, os.cpu_count() or 1)) as pool:
            want = pool.submit(lambda: jax.block_until_ready(check.expected(workload, sets[0])))
            for each in measured:
                lowered = attempt(each, partial(programs.lower, workload, each.peer, each.kind, sets))
                if lowered is not None:
                    pool.submit(finish, each, lowered)
        return want.result()
    except Exception as error:  # out of memory, say
        for each in measured:
            each.failure, each.program = f"no expected results: {programs.reason(error)}", None
        return None


def _judge(each: Measured, workload: Workload, want: check.Results) -> None:
    """Run once and compare; what fails or is wrong loses its program, and is not timed."""
    if each.program is None:
        return
    try:
        each.errors = check.relative_errors(each.program.run(), want)
    except Exception as error:  # as above
        each.failure, each.program = programs.reason(error), None
        return
    if over := check.too_large(each.errors, workload.dtype):
        limits = check.budget(workload.dtype)
        each.wrong, each.program = True, None
        said = ", ".join(f"{name} {error:.2e} (budget {limits[name]:.2e})" for name, error in over.items())
        each.failure = f"relative error of {said}"


def _add_rows(current: Run, workload: Workload, measured: list[Measured]) -> None:
    found = {(each.peer.name, each.kind): each for each in measured}
    for peer in current.settings.peers:
        for passed in current.settings.passes:
            # The program that a pass is, or the two whose difference it is.
            difference = passed == "backward" and not peer.backward_alone
            kinds = ("forward+backward", "forward") if difference else (passed,)
            row = _row(workload, passed, [found[peer.name, kind] for kind in kinds])
            if row["status"] == "ok":
                row |= _rates(current.content["ceilings"], workload, passed, row["ms"]["median"])
            current.add(row)


def _row(workload: Workload, passed: str, parts: list[Measured]) -> dict[str, Any]:
    first = parts[0]
    errors = {name: error for name, error in first.errors.items() if passed != "backward" or name != "out"}
    failures = [part.failure or part.samples.failure for part in parts]
    failure = next((text for text in failures if text is not None), None)
    if failure is None and not all(part.samples.times for part in parts):
        failure = "interrupted"
    row = {
        "workload": workload.name,
        "implementation": first.peer.name,
        "pass": passed,
        "status": "ok" if failure is None else "wrong" if any(part.wrong for part in parts) else "failed",
        "reason": failure,
        "errors": {name: error if math.isfinite(error) else None for name, error in errors.items()},
        "method": "difference of forward+backward and forward" if len(parts) == 2 else "a program of its own",
    }
    if failure is not None or first.program is None:
        return row
    return row | _times(parts) | {"temp_bytes": first.program.temp_bytes}


def _times(parts: list[Measured]) -> dict[str, Any]:
    """Milliseconds of one call, or of the difference of two."""
    clock = "cupti" if all(part.samples.clock == "cupti" for part in parts) else "wall"
    series = [part.samples.device if clock == "cupti" else part.samples.wall for part in parts]
    found: dict[str, Any] = {"clock": clock, "clock_note": parts[0].samples.note, "ms": _combined(series)}
    found["wall_ms"] = _combined([part.samples.wall for part in parts])
    sustained = [part.samples.sustained or part.samples.sustained_wall for part in parts]
    if all(sustained):
        found["sustained_ms"] = _combined(sustained)
        found["sustained_wall_ms"] = _combined([part.samples.sustained_wall for part in parts])
    return found


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
