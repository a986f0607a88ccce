"""Which implementation computes a call: an ordered table, and the reasons."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any, Protocol

import jax

from pallas_flash import checks, reference, xla, xla_decode
from pallas_flash.autodiff import Choice
from pallas_flash.decode_spec import DecodeImplementation
from pallas_flash.kernels import sm80, sm90
from pallas_flash.kernels.sm90 import decode as sm90_decode
from pallas_flash.kernels.support import compute_capability
from pallas_flash.spec import Implementation, described

logger = logging.getLogger("pallas_flash")


class Candidate(Protocol):
    """What attention's and decoding's implementations share. A call's spec and operands are of the table's own kind."""

    NAME: str

    def unsupported(self, spec: Any, operands: Any) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class Entry[I: Candidate]:
    """One row of the table.

    capability: the smallest compute capability of an NVIDIA GPU that runs it, and the first that does not (None: all
    later ones do); None: any device. automatic: whether implementation=None may choose it.
    """

    implementation: I
    rank: str  # why it stands where it does
    capability: tuple[tuple[int, int], tuple[int, int] | None] | None = None
    automatic: bool = True

    @property
    def name(self) -> str:
        return self.implementation.NAME


# In the order in which implementation=None tries them.
TABLE: tuple[Entry[Implementation], ...] = (
    Entry(sm90, "fused kernels, forward and backward, for Hopper GPUs", capability=((9, 0), (10, 0))),
    Entry(sm80, "fused kernels, forward and backward, for every GPU since Ampere", capability=((8, 0), None)),
    Entry(xla, "runs on every device and takes every call; memory linear in the sequence length"),
    Entry(reference, "the meaning, at O(T S) memory: only by name", automatic=False),
)
DECODE_TABLE: tuple[Entry[DecodeImplementation], ...] = (
    Entry(sm90_decode, "fused kernels that split the keys, for Hopper GPUs", capability=((9, 0), (10, 0))),
    Entry(xla_decode, "runs on every device and takes every call; memory linear in the cache's length"),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the table says of one implementation for one call."""

    name: str
    chosen: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The table for one call on one kind of device; prints as text."""

    device: str
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> str | None:
        return next((verdict.name for verdict in self.verdicts if verdict.chosen), None)

    def __str__(self) -> str:
        rows = (f"{'->' if v.chosen else '  '} {v.name:10} {v.reason}" for v in self.verdicts)
        return "\n".join([f"on {self.device}:", *rows])


def names(table: tuple[Entry[Any], ...] = TABLE) -> tuple[str, ...]:
    return tuple(entry.name for entry in table)


def explain(
    spec: Any,
    operands: Any,
    capability: tuple[int, int] | None,
    name: str | None = None,
    table: tuple[Entry[Any], ...] = TABLE,
) -> Explanation:
    """Go down a table for a device: an NVIDIA GPU of this capability, or (None) anything else."""
    _check_name(name, table)
    verdicts: list[Verdict] = []
    found = False
    for entry in table:
        reason = _obstacle(entry, spec, operands, capability)
        if reason is None and name is None and not entry.automatic:
            reason = entry.rank
        elif reason is None and name not in (None, entry.name):
            reason = f"implementation={name!r} was asked for"
        chosen = reason is None and not found
        found |= chosen
        verdicts.append(Verdict(entry.name, chosen, reason or (entry.rank if chosen else "comes after the chosen one")))
    device = f"an NVIDIA GPU of compute capability {_version(capability)}" if capability else "a device without CUDA"
    return Explanation(device, tuple(verdicts))


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _check_name(name: str | None, table: tuple[Entry[Any], ...]) -> None:
    if name is not None and not (isinstance(name, str) and name in names(table)):
        raise ValueError(f"implementation must be None or one of {', '.join(names(table))}, not {described(name)}")


def device_obstacle(entry: Entry[Any], capability: tuple[int, int] | None) -> str | None:
    """Why an implementation does not run on an NVIDIA GPU of this capability, or (None) on anything else."""
    if entry.capability is None:
        return None
    lowest, beyond = entry.capability
    if capability is not None and lowest <= capability and (beyond is None or capability < beyond):
        return None
    below = "" if beyond is None else f" and < {_version(beyond)}"
    return f"needs an NVIDIA GPU of compute capability >= {_version(lowest)}{below}"


def _obstacle(entry: Entry[Any], spec: Any, operands: Any, capability: tuple[int, int] | None) -> str | None:
    return device_obstacle(entry, capability) or entry.implementation.unsupported(spec, operands)


def choose[I: Candidate](spec: Any, operands: Any, name: str | None, table: tuple[Entry[I], ...]) -> Choice[I]:
    """The implementations for a call. An explicit name is taken or refused (NotImplementedError), never replaced."""
    if name is not None:
        return _by_name(spec, operands, name, table)
    capability = compute_capability()
    default = explain(spec, operands, None, table=table)
    on_gpu = explain(spec, operands, capability, table=table) if capability else default
    if capability and on_gpu.chosen == xla.NAME:
        _warn_slow(str(on_gpu))
    return Choice(cuda=_chosen(on_gpu, table), default=_chosen(default, table))


def _chosen[I: Candidate](explanation: Explanation, table: tuple[Entry[I], ...]) -> I:
    return next(entry.implementation for entry in table if entry.name == explanation.chosen)


def _by_name[I: Candidate](spec: Any, operands: Any, name: str, table: tuple[Entry[I], ...]) -> Choice[I]:
    _check_name(name, table)
    entry = next(entry for entry in table if entry.name == name)
    reason = entry.implementation.unsupported(spec, operands)
    if reason is not None:
        raise NotImplementedError(f"implementation={name!r} cannot compute this call: {reason}")
    return Choice(entry.implementation, entry.implementation)


# What JAX says where a derivative or a device is missing, and what it means here.
_NO_FORWARD_MODE = (
    "has no forward-mode derivative (jvp, jacfwd): "
    'flash_attention and ulysses_attention have one with implementation="reference"'
)
_REFUSALS = {
    "forward-mode": _NO_FORWARD_MODE,
    "unhashable type: 'Unhashable'": _NO_FORWARD_MODE,  # the same inside shard_map, without jit
    "Only interpret mode": "runs on NVIDIA GPUs only",
}


def require_known_sizes(name: str | None, arrays: dict[str, Any]) -> None:
    """NotImplementedError, with the name of the argument, where jax.export leaves a size open: the reference alone
    computes on such arrays, and is never chosen unasked."""
    if not (isinstance(name, str) and name == reference.NAME):
        checks.require_known_sizes(arrays, f'; implementation="{reference.NAME}" does without')


@contextlib.contextmanager
def refusals_by_name(choice: Choice[Any]) -> Iterator[None]:
    """Raise NotImplementedError, with the name of the implementation, where JAX refuses what it cannot do."""
    try:
        yield
    except (TypeError, ValueError, jax.errors.JaxRuntimeError) as error:  # the last from XLA's partitioner
        for said, meaning in _REFUSALS.items():
            if said in str(error):
                raise NotImplementedError(f"implementation={choice.default.NAME!r} {meaning}") from error
        raise


@functools.cache
def _warn_slow(explanation: str) -> None:
    """Once for each explanation."""
    logger.warning("attention falls to the slow path, implementation='xla', %s", explanation)
