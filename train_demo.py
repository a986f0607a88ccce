"""Train the same model twice, with standard attention and with flash attention, and compare what it costs.

    python train_demo.py                                   associative recall; a report in output/001
    python train_demo.py --task text --file book.txt       a byte-level language model of any file
    python train_demo.py --resume                          go on with the newest run after a kill or Ctrl-C

Exit codes: 0 done; 2 bad input (one line on stderr says what); 130 after SIGINT and 143 after SIGTERM, with everything
saved and what there is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from demo import InputError, report, tasks
from demo.experiment import work
from demo.options import (
    LEARNING_RATES,
    TASK_DEFAULTS,
    Options,
    check_implementation,
    make_run,
    resumed_options,
    with_defaults,
)
from demo.run_folder import OPTIONS, RunFolder
from demo.training import StopRequest
from models.config import COMPUTE_DTYPES, PRESETS

OUTPUT = Path("output")
LOG_WIDTH = 110  # where the output is no terminal


class Parser(argparse.ArgumentParser):
    """Errors are one line and exit code 2, by way of main."""

    def error(self, message: str):
        raise InputError(message)


def number(kind: Callable[[str], Any], least: float, what: str) -> Callable[[str], Any]:
    """A parser of one number that is at least `least` and finite."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (value >= least and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


count = number(int, 1, "a whole number of at least 1")
positive = number(float, sys.float_info.min, "a number above 0")
seed_number = number(int, 0, "a whole number of at least 0")


def listed(item: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A parser of values separated by commas, none of them twice."""

    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(item(part.strip()) for part in text.split(","))
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} names something twice")
        return values

    return parse


def by_task(name: str) -> str:
    return "default: " + ", ".join(f"{defaults[name]} for {task}" for task, defaults in TASK_DEFAULTS.items())


def build_parser() -> argparse.ArgumentParser:
    """No argument has a default here: what is not given comes from the run that is resumed, else from the defaults."""
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=110)
    parser = Parser(prog="train_demo.py", description=__doc__, formatter_class=layout, argument_default=None)
    model = parser.add_argument_group("what is trained (a resumed run must not differ in these)")
    add = model.add_argument
    add("--task", choices=tasks.NAMES, help="recall and copy are toy tasks, text learns a file (default: recall)")
    add("--file", metavar="PATH", help="the file that --task text learns, byte by byte (no default)")
    add("--preset", choices=tuple(PRESETS), help="size of the model (default: tiny)")
    add("--seq-len", type=count, metavar="T", help=f"tokens in a training sequence ({by_task('seq_len')})")
    add("--batch-size", type=count, metavar="B", help=f"sequences in a step ({by_task('batch_size')})")
    add("--steps", type=count, metavar="N", help=f"training steps ({by_task('steps')})")
    rates = ", ".join(f"{rate:g} for {preset}" for preset, rate in LEARNING_RATES.items())
    add("--lr", type=positive, metavar="RATE", help=f"highest learning rate of the schedule (default: {rates})")
    add("--seed", type=seed_number, metavar="S", help="of parameters, data and sample (default: 0)")
    add("--dtype", choices=COMPUTE_DTYPES, help="of the computation; parameters are float32 (default: the preset's)")
    add("--implementation", type=listed(str), metavar="NAMES", help="attentions to train with and compare, separated "
        "by commas: reference, flash (the best one for this device), or any name that flash_attention takes "
        "(default: reference,flash)")  # fmt: skip
    add("--lengths", type=listed(count), metavar="T,T,...", help="sequence lengths at which a training step is "
        "measured, in batches of one (default: 512,1024,2048,4096)")  # fmt: skip
    add("--memory-budget", type=positive, metavar="GIB", help="programs that need more are not run, and the longest "
        "sequence that fits is searched for (default: the memory of the device, 2 on a CPU)")  # fmt: skip
    folder = parser.add_argument_group("where to, and from where")
    add = folder.add_argument
    add("--output", type=Path, metavar="DIR", help=f"folder of the run (default: the next free number in {OUTPUT}/, "
        "with --resume the newest run there)")  # fmt: skip
    add("--resume", action="store_true", help="go on with the run in the folder, from its last checkpoint")
    add("--overwrite", action="store_true", help="delete the run that the folder holds, and start anew")
    add("--checkpoint-every", type=count, metavar="N", default=100, help="steps between checkpoints (default: 100)")
    return parser


def prepare(arguments: argparse.Namespace) -> tuple[Options, tasks.Task, RunFolder]:
    """Options, task and folder, all checked; InputError, with nothing written, where something is wrong."""
    if arguments.resume and arguments.overwrite:
        raise InputError("--resume and --overwrite exclude each other")
    given = {f.name: getattr(arguments, f.name, None) for f in dataclasses.fields(Options)}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.resume:
        folder = RunFolder.existing(arguments.output, OUTPUT)
        options = resumed_options(given, folder)
    else:
        options = with_defaults(given)
    task = tasks.make_task(options.task, options.seq_len, options.file)
    for name in options.implementation:
        check_implementation(make_run(options, task, name), name)
    if not arguments.resume:
        folder = RunFolder.fresh(arguments.output, OUTPUT, overwrite=arguments.overwrite)
        folder.write_json(OPTIONS, dataclasses.asdict(options))
    return options, task, folder


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    try:
        with StopRequest() as stop:
            parsed = build_parser().parse_args(arguments)
            options, task, folder = prepare(parsed)
            where = f"{options.task} on {jax.devices()[0].device_kind}, results in {folder.path}"
            console.print(where, markup=False, highlight=False, soft_wrap=True)
            results = work(options, task, folder, parsed.checkpoint_every, console, stop)
            report.write(results, folder)
            report.show(results, folder, console)
    except InputError as error:
        print(f"train_demo.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_demo.py: interrupted; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    if stop.signal is not None:
        print(f"train_demo.py: stopped by a signal; to go on: --resume --output {folder.path}", file=sys.stderr)
        return 128 + stop.signal
    return 0


if __name__ == "__main__":
    sys.exit(main())
