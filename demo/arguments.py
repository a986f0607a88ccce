"""The command line: every flag, its bounds and its help."""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo import InputError, tasks
from demo.options import LARGE_LENGTHS, LARGE_TASK_DEFAULTS, LEARNING_RATES, MAX_STEPS, MAX_TOKENS, TASK_DEFAULTS
from demo.parallel import KINDS, MAX_DEVICES
from demo.run_folder import OUTPUT
from models.config import COMPUTE_DTYPES, PRESETS

CHECKPOINT_EVERY = 100
MAX_SEED = 2**32 - 1
MAX_BUDGET = 2**20  # GiB


class Parser(argparse.ArgumentParser):
    """Errors are one line and exit code 2, by way of main."""

    def error(self, message: str):
        raise InputError(message)


def number(kind: Callable[[str], Any], least: float, most: float, what: str) -> Callable[[str], Any]:
    """A parser of one finite number from `least` to `most`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (value >= least and value < math.inf):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is too large: at most {most:,}")
        return value

    return parse


def count(most: int) -> Callable[[str], int]:
    return number(int, 1, most, "a whole number of at least 1")


def listed(item: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A parser of values separated by commas, none of them twice."""

    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(item(part.strip()) for part in text.split(","))
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} names something twice")
        return values

    return parse


def path_text(text: str) -> str:
    """A path that names something: an empty one, as from an unset shell variable, would mean the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def folder_path(text: str) -> Path:
    return Path(path_text(text))


def by_task(name: str) -> str:
    def said(table: dict[str, dict[str, Any]]) -> str:
        return ", ".join(f"{defaults[name]} for {task}" for task, defaults in table.items())

    return f"default: {said(TASK_DEFAULTS)}; on a large GPU, unless the preset is tiny, {said(LARGE_TASK_DEFAULTS)}"


def build_parser(description: str | None = None) -> argparse.ArgumentParser:
    """No argument has a default here: what is not given comes from the run that is resumed, else from the defaults."""
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=110)
    parser = Parser(prog="train_demo.py", description=description, formatter_class=layout, argument_default=None)
    _add_options(parser.add_argument_group("what is trained and measured (a resumed run must not differ in these)"))
    add = parser.add_argument_group("where to, and from where").add_argument
    add("--output", type=folder_path, metavar="DIR", help=f"folder of the run (default: the next free number in "
        f"{OUTPUT}/, with --resume the newest run there)")  # fmt: skip
    add("--report-to", type=folder_path, metavar="DIR", help="a folder for a copy of the report alone: page, figures "
        "and numbers, without paths of this machine (default: none)")  # fmt: skip
    add("--resume", action="store_true", help="go on with the run in the folder, from its last checkpoint")
    add("--overwrite", action="store_true", help="delete the run that the folder holds, and start anew")
    add("--checkpoint-every", type=count(MAX_STEPS), metavar="N", default=CHECKPOINT_EVERY,
        help=f"steps between checkpoints (default: {CHECKPOINT_EVERY})")  # fmt: skip
    add = parser.add_argument_group(
        "one process of several (the same command for each, on a shared file system)"
    ).add_argument
    add("--coordinator", metavar="HOST:PORT", help="where process 0 waits for the others (jax.distributed; no default)")
    add("--num-processes", type=count(MAX_DEVICES), metavar="P", help="how many there are (default: this one alone)")
    add("--process-id", type=number(int, 0, MAX_DEVICES, "a whole number of at least 0"), metavar="I",
        help="which one this is, from 0 (no default)")  # fmt: skip
    return parser


def _add_options(group: Any) -> None:
    """The flags that demo.options.Options holds, by the same names."""
    add = group.add_argument
    tokens, steps = count(MAX_TOKENS), count(MAX_STEPS)
    positive = functools.partial(number, float, sys.float_info.min, what="a number above 0")
    add("--task", choices=tasks.NAMES, help="recall and copy are toy tasks, text learns a file (default: recall)")
    add("--file", type=path_text, metavar="PATH", help="the file that --task text learns, byte by byte (no default)")
    add(
        "--preset",
        choices=tuple(PRESETS),
        help="size of the model, named as with a vocabulary of 50,304: with the small ones of these tasks 125m has 85 "
        "million parameters, 1b 970 million (default: tiny; 125m on a large GPU, an NVIDIA GPU of which JAX takes at "
        "least 24 GiB)",
    )
    add("--seq-len", type=tokens, metavar="T", help=f"tokens in a training sequence ({by_task('seq_len')})")
    add("--batch-size", type=tokens, metavar="B", help=f"sequences in a step ({by_task('batch_size')})")
    add("--steps", type=steps, metavar="N", help=f"training steps ({by_task('steps')})")
    rates = ", ".join(f"{rate:g} for {preset}" for preset, rate in LEARNING_RATES.items())
    add("--lr", type=positive(most=1000), metavar="RATE", help="highest learning rate of the schedule "
        f"(default: {rates})")  # fmt: skip
    add("--seed", type=number(int, 0, MAX_SEED, "a whole number of at least 0"), metavar="S",
        help="of parameters, data and sample (default: 0)")  # fmt: skip
    add("--dtype", choices=COMPUTE_DTYPES, help="of the computation; parameters are float32 (default: the preset's)")
    add("--implementation", type=listed(str), metavar="NAMES", help="attentions to train with and compare, separated "
        "by commas: reference, flash (the best one for this device), cudnn (of jax.nn, on NVIDIA GPUs in "
        "bfloat16), or any name that flash_attention takes (default: reference,flash)")  # fmt: skip
    add("--lengths", type=listed(tokens), metavar="T,T,...", help="sequence lengths at which a training step is "
        f"measured, in batches of one (default: 512,1024,2048,4096; on a large GPU, unless the preset is tiny, "
        f"{','.join(map(str, LARGE_LENGTHS))})")  # fmt: skip
    add("--memory-budget", type=positive(most=MAX_BUDGET), metavar="GIB", help="programs that need more are not "
        "run, and the longest sequence that fits is searched for (default: all of the device, 2 on a CPU)")  # fmt: skip
    add("--no-longest", dest="longest", action="store_const", const=False, help="skip that search, which compiles a "
        "few long training steps for each attention: for quick runs")  # fmt: skip
    add("--devices", type=count(MAX_DEVICES), metavar="N", help="devices to train on, of all processes together; on a "
        "CPU as many are made (default: 1)")  # fmt: skip
    add("--parallel", choices=KINDS, help="what the devices share: data, the sequences of a batch, with the parameters "
        "sharded; context, each sequence; both, pairs of devices share sequences (default: data)")  # fmt: skip
