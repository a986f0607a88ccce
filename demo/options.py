"""The options that define a run: their defaults, and their agreement with the run that is resumed."""

from __future__ import annotations

import dataclasses
from typing import Any

from demo import InputError, comparison, tasks
from demo.run_folder import OPTIONS, RunFolder
from demo.training import Run
from models.config import PRESETS

TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "recall": {"seq_len": 32, "batch_size": 32, "steps": 600},
    "copy": {"seq_len": 32, "batch_size": 32, "steps": 600},
    "text": {"seq_len": 128, "batch_size": 16, "steps": 400},
}
LEARNING_RATES = {"tiny": 3e-3, "125m": 6e-4, "1b": 3e-4}


@dataclasses.dataclass(frozen=True)
class Options:
    """What defines a run: it is saved with it, and a resumed run must not differ in any of it."""

    task: str = "recall"
    file: str | None = None
    file_sha256: str | None = None
    preset: str = "tiny"
    seq_len: int = 0
    batch_size: int = 0
    steps: int = 0
    lr: float = 0.0
    seed: int = 0
    dtype: str = "float32"
    implementation: tuple[str, ...] = ("reference", "flash")
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    memory_budget: float = 0.0  # GiB

    @property
    def budget_bytes(self) -> int:
        return int(self.memory_budget * 2**30)


def with_defaults(given: dict[str, Any]) -> Options:
    """The options of a new run."""
    task, preset = given.get("task", Options.task), given.get("preset", Options.preset)
    if task != "text" and "file" in given:
        raise InputError(f"--file {given['file']}: only --task text reads a file")
    defaults = {
        **TASK_DEFAULTS[task],
        "lr": LEARNING_RATES[preset],
        "dtype": PRESETS[preset].compute_dtype,
        "memory_budget": comparison.device_budget() / 2**30,
    }
    if "file" in given:
        given = {**given, "file_sha256": tasks.fingerprint(given["file"])}
    return Options(**{**defaults, **given})


def resumed_options(given: dict[str, Any], folder: RunFolder) -> Options:
    """The options saved in the folder. InputError if a flag, or the file, says something else."""
    try:
        saved = {name: tuple(v) if isinstance(v, list) else v for name, v in folder.options().items()}
        options = Options(**saved)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--resume: {folder.file(OPTIONS)} cannot be read: {error}") from error
    for name, value in given.items():
        if value != saved[name]:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"--resume: {flag} is {value}, but the run in {folder.path} has {saved[name]}")
    if options.file and tasks.fingerprint(options.file) != options.file_sha256:
        raise InputError(f"--resume: {options.file} has changed since the run in {folder.path} began")
    return options


def check_implementation(run: Run, name: str) -> None:
    if comparison.chosen_implementation(run) is None:
        raise InputError(f"--implementation {name}: unknown, or this device does not run it")


def make_run(options: Options, task: tasks.Task, implementation: str) -> Run:
    """The training run with one attention; nothing else differs between them."""
    config = dataclasses.replace(
        PRESETS[options.preset],
        vocab_size=task.vocab_size,
        tie_embeddings=False,  # in recall and copy, what comes next has nothing to do with the token it follows
        compute_dtype=options.dtype,
        attention=None if implementation == "flash" else implementation,
    )
    return Run(config, task, options.batch_size, options.steps, options.lr, options.seed)
