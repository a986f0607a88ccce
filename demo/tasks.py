"""The tasks: each gives batches of tokens as a pure function of (seed, step), so that a resumed run sees the same data.

recall   key value key value ... then keys of that list at random: name the value of each (needs the whole context)
copy     random tokens, a separator, then the same tokens again
text     the bytes of a file; the next byte is to be predicted
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from demo import InputError

NAMES = ("recall", "copy", "text")
TRAIN, EVALUATION = 0, 1  # the streams of random numbers; held-out data never repeats the training stream
NUM_BYTES = 256
COPY_SYMBOLS = 32
MAX_RECALL = 2**13
VALIDATION_FRACTION = 0.1


class Batch(NamedTuple):
    """`targets[b, t]` is to be predicted from `tokens[b, : t + 1]`; `weights` is 1 where it counts and 0 elsewhere."""

    tokens: np.ndarray  # int32 [B, T]
    targets: np.ndarray  # int32 [B, T]
    weights: np.ndarray  # float32 [B, T]


class Task(Protocol):
    """What training needs to know of a task."""

    @property
    def seq_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch: ...

    def evaluation_batches(self, seed: int, batch_size: int) -> Iterator[Batch]: ...


def make_task(name: str, seq_len: int, file: str | None = None) -> Task:
    """The task of this name, or InputError in one line that says what is wrong."""
    if name == "recall":
        if seq_len < 8 or seq_len % 4:
            raise InputError(f"--seq-len {seq_len}: recall needs a multiple of 4 (two key-value lists), at least 8")
        if seq_len > MAX_RECALL:
            raise InputError(f"--seq-len {seq_len}: recall takes at most {MAX_RECALL:,}, for it has as many symbols")
        return Generated(seq_len, vocab_size=seq_len, draw=draw_recall)
    if name == "copy":
        if seq_len < 4 or seq_len % 2:
            raise InputError(f"--seq-len {seq_len}: copy needs an even number, at least 4")
        return Generated(seq_len, vocab_size=COPY_SYMBOLS + 1, draw=draw_copy)
    if name == "text":
        if file is None:
            raise InputError("--task text needs --file PATH, the file to learn")
        return Text(seq_len, file, read_bytes(file))
    raise InputError(f"--task {name}: unknown; the tasks are {', '.join(NAMES)}")


@dataclasses.dataclass(frozen=True)
class Generated:
    """Sequences drawn at random by `draw(rng, batch_size, seq_len)`; training and evaluation are separate streams."""

    seq_len: int
    vocab_size: int
    draw: Callable[[np.random.Generator, int, int], Batch]
    num_evaluation_batches: ClassVar[int] = 16

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        return self.draw(np.random.default_rng([seed, TRAIN, step]), batch_size, self.seq_len)

    def evaluation_batches(self, seed: int, batch_size: int) -> Iterator[Batch]:
        for step in range(self.num_evaluation_batches):
            yield self.draw(np.random.default_rng([seed, EVALUATION, step]), batch_size, self.seq_len)


def draw_recall(rng: np.random.Generator, batch_size: int, seq_len: int) -> Batch:
    """Multi-query associative recall: the first half lists key-value pairs, the second asks for some of them.

    Keys are the first seq_len // 2 tokens, half of them present in any one sequence; values the next seq_len // 2.
    """
    num_keys, num_pairs = seq_len // 2, seq_len // 4
    keys = rng.random((batch_size, num_keys)).argsort(axis=1)[:, :num_pairs]
    values = num_keys + rng.integers(num_keys, size=keys.shape)
    pairs = np.stack([keys, values], axis=-1)  # [B, pairs, 2]
    asked = rng.integers(num_pairs, size=keys.shape)  # with repetition: what was asked says nothing about what will be
    queries = np.take_along_axis(pairs, asked[..., None], axis=1)
    tokens = np.concatenate([pairs, queries], axis=1).reshape(batch_size, seq_len).astype(np.int32)
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, seq_len // 2 :: 2] = 1.0  # where a queried key stands, its value comes next
    return Batch(tokens, np.roll(tokens, -1, axis=1), weights)


def draw_copy(rng: np.random.Generator, batch_size: int, seq_len: int) -> Batch:
    """Random symbols, a separator, and the same symbols again; the second half counts."""
    half = seq_len // 2
    symbols = rng.integers(COPY_SYMBOLS, size=(batch_size, half))
    separator = np.full((batch_size, 1), COPY_SYMBOLS)
    sequence = np.concatenate([symbols, separator, symbols], axis=1).astype(np.int32)  # [B, T + 1]
    weights = np.zeros((batch_size, seq_len), np.float32)
    weights[:, half:] = 1.0
    return Batch(sequence[:, :-1], sequence[:, 1:], weights)


@dataclasses.dataclass(frozen=True)
class Text:
    """The bytes of a file. The last tenth (at least one window) is held out for validation."""

    seq_len: int
    file: str
    data: np.ndarray  # uint8 [bytes]
    max_evaluation_windows: ClassVar[int] = 256

    def __post_init__(self) -> None:
        needed = 2 * (self.seq_len + 1)
        if len(self.data) < needed:
            raise InputError(
                f"--seq-len {self.seq_len} needs a file of at least {needed} bytes, but {self.file} has "
                f"{len(self.data)}: training and validation each take a window of {self.seq_len + 1} "
                f"(a sequence and its next byte); take {self._remedy()}"
            )

    def _remedy(self) -> str:
        most = len(self.data) // 2 - 1
        return f"--seq-len {most} or less, or a longer file" if most >= 1 else "a longer file"

    @property
    def vocab_size(self) -> int:
        return NUM_BYTES

    @property
    def split(self) -> int:
        """Bytes before this are for training, the others for validation."""
        return len(self.data) - max(int(VALIDATION_FRACTION * len(self.data)), self.seq_len + 1)

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        rng = np.random.default_rng([seed, TRAIN, step])
        return self._windows(rng.integers(self.split - self.seq_len, size=batch_size))

    def evaluation_batches(self, seed: int, batch_size: int) -> Iterator[Batch]:
        """Windows spread evenly over the validation bytes, none overlapping another; `seed` plays no part."""
        del seed
        num_windows = (len(self.data) - self.split - 1) // self.seq_len
        kept = np.linspace(0, num_windows - 1, min(num_windows, self.max_evaluation_windows)).round().astype(int)
        starts = self.split + kept * self.seq_len
        for first in range(0, len(starts), batch_size):
            chosen = starts[first : first + batch_size]
            batch = self._windows(np.resize(chosen, batch_size))  # one compiled shape: the last batch is filled up ...
            batch.weights[len(chosen) :] = 0.0  # ... by windows that do not count
            yield batch

    def prompt(self, num_bytes: int) -> np.ndarray:
        """The first validation bytes, int32 [num_bytes]: what a sample continues."""
        return self.data[self.split : self.split + num_bytes].astype(np.int32)

    def _windows(self, starts: np.ndarray) -> Batch:
        windows = self.data[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int32)
        return Batch(windows[:, :-1], windows[:, 1:], np.ones((len(starts), self.seq_len), np.float32))


def read_bytes(file: str) -> np.ndarray:
    """The file's bytes, uint8, or InputError where there are none to be had."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise InputError(f"--file {file}: {error.strerror or error}") from error
    if not content:
        raise InputError(f"--file {file}: the file is empty")
    return np.frombuffer(content, np.uint8)


def fingerprint(file: str) -> str:
    """SHA-256 of the file, by which a resumed run knows that its data is still the same."""
    return hashlib.sha256(read_bytes(file).tobytes()).hexdigest()
