"""One job from its checked arguments to its report."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from typing import Any

import jax
from rich.console import Console

from demo import InputError, attentions, report, tasks
from demo.arguments import CHECKPOINT_EVERY
from demo.experiment import Experiment
from demo.options import Options, make_run, with_defaults
from demo.parallel import Processes, largest
from demo.run_folder import OPTIONS, OUTPUT, RunFolder
from demo.saved import check_checkpoints, resumed_options, saved_results
from demo.stop import StopRequest

LOG_WIDTH = 110  # where the output is no terminal


@dataclasses.dataclass(frozen=True)
class Job:
    """What is done, and where to."""

    options: Options
    task: tasks.Task
    folder: RunFolder
    checkpoint_every: int
    results: dict[str, Any]  # of earlier processes
    processes: Processes = Processes()  # noqa: RUF009 - frozen
    report_to: RunFolder | None = None

    def run(self, stop: StopRequest) -> None:
        """Work, save, report."""
        console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH, quiet=not self.processes.first)
        where = f"{self.options.task} on {jax.devices()[0].device_kind}, results in {self.folder.path}"
        console.print(where, markup=False, highlight=False, soft_wrap=True)
        stop.share = lambda signal: int(largest(signal))
        Experiment(self.options, self.task, self.folder, self.checkpoint_every, self.results, console, stop).work()
        stop.asked()  # what came during the search, where none waits for another, is for all too
        if self.processes.first:
            report.write(self.results, self.folder)
            if self.report_to is not None:
                report.write(report.without_paths(self.results), self.report_to)
            report.show(self.results, self.folder, console)
        self.processes.meet("the end")

    def how_to_go_on(self) -> str:
        """The command of this process, for those who use make and for those who do not."""
        flags = ["--resume", "--output", str(self.folder.path)]
        if self.report_to is not None:
            flags += ["--report-to", str(self.report_to.path)]
        if self.checkpoint_every != CHECKPOINT_EVERY:
            flags += ["--checkpoint-every", str(self.checkpoint_every)]
        flags += self.processes.flags()
        command = shlex.join(flags)
        return f'make demo ARGS="{command}" (without make: python train_demo.py {command})'


def prepare(arguments: argparse.Namespace) -> Job:
    """Everything checked; InputError, with nothing written, where something is wrong."""
    if arguments.resume and arguments.overwrite:
        raise InputError("--resume and --overwrite exclude each other")
    processes = Processes(arguments.coordinator, arguments.num_processes, arguments.process_id)
    if processes.count > 1 and arguments.output is None:
        raise InputError("--num-processes needs --output, the folder that all of them share")
    given = {f.name: getattr(arguments, f.name, None) for f in dataclasses.fields(Options)}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.resume:
        folder = RunFolder.existing(arguments.output, OUTPUT)
        options = resumed_options(given, folder)
        processes.start(options.devices)
    else:
        processes.start(given.get("devices", Options.devices))
        options = with_defaults(given)
    options.check_size()
    task = tasks.make_task(options.task, options.seq_len, options.file)
    runs = {name: make_run(options, task, name) for name in options.implementation}
    for name, run in runs.items():
        attentions.check(run, name)
    results: dict[str, Any] = {}
    report_to = None
    if arguments.report_to is not None and processes.first:
        report_to = RunFolder.for_report(arguments.report_to, arguments.output)
    if arguments.resume:
        results = saved_results(folder, options)
        check_checkpoints(folder, runs, results)
    elif processes.first:
        folder = RunFolder.fresh(arguments.output, OUTPUT, overwrite=arguments.overwrite)
        folder.write_json(OPTIONS, dataclasses.asdict(options))
    else:
        folder = RunFolder(arguments.output)
    folder.writes = processes.first
    processes.meet("the folder is there")
    return Job(options, task, folder, arguments.checkpoint_every, results, processes, report_to)
