"""The progress of a long loop: a live bar on a terminal, a line now and then elsewhere (a log file, CI)."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES_WITHOUT_TERMINAL = 10


class TrainingProgress:
    """Shows step, loss, tokens per second and the time left.

    with TrainingProgress(console, "reference", steps=600, tokens_per_step=1024) as progress: progress.update(1, 2.7)
    """

    def __init__(self, console: Console, title: str, *, steps: int, tokens_per_step: int):
        self._console, self._title = console, title
        self._steps, self._tokens_per_step = steps, tokens_per_step
        self._first: tuple[int, float] | None = None  # step and time of the first update: what came before is not ours
        self._printed = 0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._bar_task = self._bar.add_task(title, total=steps, loss="  …", speed="…") if self._bar else None

    def __enter__(self) -> TrainingProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._bar:
            self._bar.stop()

    def update(self, step: int, loss: float) -> None:
        now = time.perf_counter()
        first_step, first_time = self._first = self._first or (step, now)
        rate = (step - first_step) / (now - first_time) if step > first_step else None
        speed = f"{rate * self._tokens_per_step:,.0f}" if rate else "…"
        if self._bar and self._bar_task is not None:
            self._bar.update(self._bar_task, completed=step, loss=f"{loss:.4f}", speed=speed)
        elif step * LINES_WITHOUT_TERMINAL // self._steps > self._printed or step == self._steps:
            self._printed = step * LINES_WITHOUT_TERMINAL // self._steps
            eta = f"{(self._steps - step) / rate:.0f} s" if rate else "…"
            self._console.print(
                f"{self._title:>9}  step {step}/{self._steps}  loss {loss:.4f}  {speed} tokens/s  ETA {eta}",
                highlight=False,
            )
