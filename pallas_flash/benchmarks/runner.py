"""A run: for each workload compile all programs, check them, time those that are right, write the rows."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_flash.benchmarks import cases, check, decoding, programs, results, rows, timing, torch_sdpa
from pallas_flash.benchmarks.cases import Workload
from pallas_flash.benchmarks.peers import Peer
from pallas_flash.benchmarks.programs import Program
from pallas_flash.benchmarks.progress import Progress
from pallas_flash.benchmarks.rows import Measured
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
        in_jax = [each for each in measured if each.peer.attend is not None]
        want = _prepare(in_jax, workload, timer)
        if want is not None:
            for each in in_jax:
                _run_and_judge(each, workload, want)
        del want
        timed = [(each.program, each.samples) for each in measured if each.program is not None]
        timing.interleave(timed, timer, settings.rounds, sustained=settings.sustained)
        for peer in settings.peers:
            if peer.attend is None:
                in_torch = [each for each in measured if each.peer == peer]
                _measure_torch(in_torch, workload, settings.rounds * settings.iterations)
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
        if each.program is not None:
            each.temp_bytes, each.peak_bytes = each.program.temp_bytes, each.program.peak_bytes

    try:
        make_inputs, lower, expected = _functions(workload)
        count = programs.number_of_sets(workload, rotate=timer.on_gpu)
        sets = [make_inputs(workload, seed) for seed in range(count)]
        with ThreadPoolExecutor(min(MAX_COMPILING, os.cpu_count() or 1)) as pool:
            want = pool.submit(lambda: jax.block_until_ready(expected(workload, sets[0])))
            for each in measured:
                lowered = attempt(each, partial(lower, workload, each.peer, each.kind, sets))
                if lowered is not None:
                    pool.submit(finish, each, lowered)
        return want.result()
    except Exception as error:  # out of memory, say
        for each in measured:
            each.failure, each.program = f"no expected results: {programs.reason(error)}", None
        return None


def _functions(workload: Any) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Of the workload's kind: what makes inputs, what lowers a program, what computes the expected results."""
    if isinstance(workload, decoding.DecodeWorkload):
        return decoding.make_inputs, decoding.lower, decoding.expected
    return cases.make_inputs, programs.lower, check.expected


def _run_and_judge(each: Measured, workload: Workload, want: check.Results) -> None:
    """Run once and compare; what fails or is wrong loses its program, and is not timed."""
    if each.program is None:
        return
    try:
        each.judge(check.relative_errors(each.program.run(), want), workload)
    except Exception as error:  # as above
        each.failure = programs.reason(error)
    if each.failure is not None:
        each.program = None


def _measure_torch(measured: list[Measured], workload: Workload, calls: int) -> None:
    """All passes of one backend, in a process of its own."""
    try:
        answers = torch_sdpa.answer(workload, measured[0].peer.name, [each.kind for each in measured], calls)
    except Exception as error:  # as above
        for each in measured:
            each.failure = programs.reason(error)
        return
    for each in measured:
        found = answers[each.kind]
        each.samples = Samples(found["ms"], note=torch_sdpa.NOTE, device_clock="cuda events")
        each.temp_bytes, each.peak_bytes = found["temp_bytes"], found["peak_bytes"]
        each.judge(found["errors"], workload)


def _add_rows(current: Run, workload: Workload, measured: list[Measured]) -> None:
    found = {(each.peer.name, each.kind): each for each in measured}
    for peer in current.settings.peers:
        for passed in current.settings.passes:
            # The program that a pass is, or the two whose difference it is.
            difference = passed == "backward" and not peer.backward_alone
            kinds = ("forward+backward", "forward") if difference else (passed,)
            parts = [found[peer.name, kind] for kind in kinds]
            current.add(rows.make(workload, passed, parts, current.content["ceilings"]))
