"""The options that define a run: their defaults, and their agreement with the run that is resumed."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import jax

from demo import InputError, attentions, comparison, tasks
from demo.parallel import CONTEXT, DATA, Layout
from demo.training import Run
from models.config import PRESETS
from pallas_flash.kernels.support import compute_capability

TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "recall": {"seq_len": 32, "batch_size": 32, "steps": 600},
    "copy": {"seq_len": 32, "batch_size": 32, "steps": 600},
    "text": {"seq_len": 128, "batch_size": 16, "steps": 400},
}
# Where a model takes a GPU to train: for all presets but tiny, on one that is large enough.
LARGE_TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "recall": {"seq_len": 64, "batch_size": 256, "steps": 1000},
    "copy": {"seq_len": 64, "batch_size": 256, "steps": 1000},
    "text": {"seq_len": 1024, "batch_size": 16, "steps": 1000},
}
LARGE_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
LARGE_DEVICE_BYTES = 24 * 2**30  # that JAX takes for itself, three quarters of what there is unless told otherwise
SMALL_PRESET, LARGE_PRESET = "tiny", "125m"
MAX_STEPS = 10**7
MAX_TOKENS = 2**20  # of a sequence, and of a batch
LEARNING_RATES = {"tiny": 3e-3, "125m": 6e-4, "1b": 3e-4}


@dataclasses.dataclass(frozen=True)
class Options:
    """What defines a run: it is saved with it, and a resumed run must not differ in any of it."""

    task: str = "recall"
    file: str | None = None
    file_sha256: str | None = None
    preset: str = SMALL_PRESET
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

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Options:
        """From what `dataclasses.asdict` gave, through JSON, which has lists instead of tuples."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})

    def flags(self) -> list[str]:
        """The flags that say all of this, whatever the defaults are."""
        flags = []
        for name, value in vars(self).items():
            if name == "longest":
                flags += [] if value else ["--no-longest"]
            elif name != "file_sha256" and value is not None:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                flags.append(f"--{name.replace('_', '-')}={text}")
        return flags

    def command(self) -> str:
        """What starts a run with these options in a shell."""
        return shlex.join(["python", "train_demo.py", *self.flags()])


def is_large(device: Any) -> bool:
    """Whether this is an NVIDIA GPU with room for a model of a useful size."""
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    return compute_capability() is not None and memory >= LARGE_DEVICE_BYTES


def with_defaults(given: dict[str, Any]) -> Options:
    """The options of a new run: what is given, and otherwise what suits the task, the preset and the device."""
    large = is_large(jax.local_devices()[0])
    task, preset = given.get("task", Options.task), given.get("preset", LARGE_PRESET if large else SMALL_PRESET)
    if task != "text" and "file" in given:
        raise InputError(f"--file {given['file']}: only --task text reads a file")
    large &= preset != SMALL_PRESET
    defaults = {
        **(LARGE_TASK_DEFAULTS if large else TASK_DEFAULTS)[task],
        "preset": preset,
        "lengths": LARGE_LENGTHS if large else Options.lengths,
        "lr": LEARNING_RATES[preset],
        "dtype": PRESETS[preset].compute_dtype,
        "memory_budget": comparison.device_budget() / 2**30,
    }
    if "file" in given:
        given = {**given, "file_sha256": tasks.fingerprint(given["file"])}
    return Options(**{**defaults, **given})


def make_run(options: Options, task: tasks.Task, implementation: str) -> Run:
    """The training run with one attention; nothing else differs between them."""
    layout = options.layout
    config = dataclasses.replace(
        PRESETS[options.preset],
        vocab_size=task.vocab_size,
        tie_embeddings=False,  # in recall and copy, what comes next has nothing to do with the token it follows
        compute_dtype=options.dtype,
        attention=attentions.config_name(implementation),
        # Standard attention is for XLA to partition.
        context_parallel=(DATA, CONTEXT) if layout.context > 1 and implementation != attentions.REFERENCE else None,
    )
    return Run(config, task, options.batch_size, options.steps, options.lr, options.seed, layout)
