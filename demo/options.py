"""The options that define a run: their defaults, and their agreement with the run that is resumed."""

from __future__ import annotations

import dataclasses
from typing import Any

from demo import InputError, comparison, tasks
from demo.parallel import CONTEXT, DATA, Layout
from demo.training import Run
from models.config import PRESETS

TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "recall": {"seq_len": 32, "batch_size": 32, "steps": 600},
    "copy": {"seq_len": 32, "batch_size": 32, "steps": 600},
    "text": {"seq_len": 128, "batch_size": 16, "steps": 400},
}
MAX_STEPS = 10**7
MAX_TOKENS = 2**20  # of a sequence, and of a batch
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
    longest: bool = True  # whether the longest sequence is searched for
    devices: int = 1
    parallel: str = "data"

    @property
    def budget_bytes(self) -> int:
        return int(self.memory_budget * 2**30)

    def check_size(self) -> None:
        """InputError for batches beyond what any program here could index."""
        if self.batch_size * self.seq_len > MAX_TOKENS:
            raise InputError(
                f"--batch-size {self.batch_size} and --seq-len {self.seq_len} make {self.batch_size * self.seq_len:,} "
                f"tokens in a step: at most {MAX_TOKENS:,}"
            )
        unit = self.layout.length_unit
        for flag, lengths in (("--seq-len", (self.seq_len,)), ("--lengths", self.lengths)):
            for length in lengths:
                if length % unit:
                    raise InputError(f"{flag} {length}: must be a multiple of {unit}, two chunks for each device")
        if PRESETS[self.preset].hidden_dim % self.layout.data:
            raise InputError(f"--devices {self.devices}: {self.layout.data} ways do not divide the model's width")

    @property
    def layout(self) -> Layout:
        return Layout.of(self.devices, self.parallel)


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


def check_implementation(run: Run, name: str) -> None:
    """InputError with the names to choose from if this is none of them, or with the reason why it cannot be used."""
    table = comparison.explanation(run, None)
    names = ("flash", *sorted(verdict.name for verdict in table.verdicts))
    if name not in names:
        raise InputError(f"--implementation {name or repr(name)}: unknown; the names are {', '.join(names)}")
    if comparison.chosen_implementation(run) is None:
        reasons = {v.name: v.reason for v in comparison.explanation(run, run.config.attention).verdicts}
        raise InputError(f"--implementation {name}: {reasons.get(name, 'nothing runs on this device')}")


def make_run(options: Options, task: tasks.Task, implementation: str) -> Run:
    """The training run with one attention; nothing else differs between them."""
    layout = options.layout
    config = dataclasses.replace(
        PRESETS[options.preset],
        vocab_size=task.vocab_size,
        tie_embeddings=False,  # in recall and copy, what comes next has nothing to do with the token it follows
        compute_dtype=options.dtype,
        attention=None if implementation == "flash" else implementation,
        # Standard attention is for XLA to partition.
        context_parallel=(DATA, CONTEXT) if layout.context > 1 and implementation != "reference" else None,
    )
    return Run(config, task, options.batch_size, options.steps, options.lr, options.seed, layout)
