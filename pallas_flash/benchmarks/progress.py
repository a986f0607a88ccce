"""How far a run is: a bar on a terminal, a line for each row elsewhere (a log file, CI, a machine without rich)."""

from __future__ import annotations

import importlib.util
import sys
from types import TracebackType
from typing import Any


class Progress:
    """with Progress(workloads=18) as progress: progress.start("gpt2"); progress.show(row)"""

    def __init__(self, *, workloads: int):
        self._bar: Any = None
        if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("ceilings", total=workloads)
        self._started = 0

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._bar is not None:
            self._bar.stop()

    def start(self, workload: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=workload, completed=self._started)
        self._started += 1

    def show(self, row: dict[str, Any]) -> None:
        line = f"{row['workload']:28} {row['implementation']:14} {row['pass']:16} {outcome(row)}"
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)


def outcome(row: dict[str, Any]) -> str:
    """The result of a row in words."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    ms = row["ms"]
    sustained = f"  sustained {row['sustained_ms']['median']:.3f}" if "sustained_ms" in row else ""
    spread = f"{ms['median']:9.3f} ms ({ms['p20']:.3f} to {ms['p80']:.3f}, {row['clock']})"
    rates = f"{row['tflops']:8.2f} TFLOP/s  {row['gbps']:6.0f} GB/s"
    return f"{spread}{sustained}  {rates}  error {max(row['errors'].values()):.1e}"
