"""Draw cases until the time is up; make every one that fails as small as it gets."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from tests.conftest import CPU_IMPLEMENTATIONS
from tests.fuzz import run
from tests.fuzz.case import DIMS, HEADS, Case, belongs, draw

ALIKE = 80  # cases in a row of one size, run operation by operation
CLEAR_EVERY = 800  # cases: compiled programs take memory
SHRINKING_SECONDS = 120.0

Check = Callable[[Case], None]


class Failure(NamedTuple):
    case: Case
    problem: str


class Report(NamedTuple):
    ran: Counter[str]  # by implementation, and by transformation
    refused: int
    failures: list[Failure]


def problem_of(case: Case, check: Check) -> str | None:
    """What is wrong with a case in words; None if nothing is. A refusal by name is the caller's affair."""
    try:
        check(case)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def cases(seed: int, implementations: tuple[str, ...], like: Case | None = None) -> Iterator[Case]:
    """Random cases for ever, of the sizes of `like` if that is given."""
    rng = np.random.default_rng(seed)
    while True:
        for implementation in implementations:
            last = like
            for _ in range(ALIKE if implementation in CPU_IMPLEMENTATIONS else 1):
                last = draw(rng, implementation, last)
                yield last


def search(
    seed: int,
    implementations: tuple[str, ...],
    *,
    seconds: float = np.inf,
    inputs: float = np.inf,
    like: Case | None = None,
    check: Check = run.check,
    tell: Callable[[str], None] = print,
) -> Report:
    """Check cases for so many seconds, or so many of them."""
    end, report = time.monotonic() + seconds, Report(Counter(), 0, [])
    for number, case in enumerate(cases(seed, implementations, like)):
        if time.monotonic() >= end or number >= inputs:
            return report
        if number % CLEAR_EVERY == CLEAR_EVERY - 1:
            jax.clear_caches()
            tell(f"{number + 1} inputs, {len(report.failures)} failures")
        report.ran.update((case.implementation, case.transformation))
        try:
            problem = problem_of(case, check)
        except NotImplementedError:
            report = report._replace(refused=report.refused + 1)
            continue
        if problem is not None:
            failure = shrink(Failure(case, problem), check)
            report.failures.append(failure)
            tell(f"FAILED: {failure.problem}\n  python -m tests.fuzz --case '{failure.case.line()}'")
    raise AssertionError("the cases never end")


def shrink(failure: Failure, check: Check) -> Failure:
    """Take away and make smaller for as long as it still fails."""
    end, smaller = time.monotonic() + SHRINKING_SECONDS, True
    while smaller:
        smaller = False
        for candidate in simpler(failure.case):
            if time.monotonic() > end:
                return failure
            try:
                problem = problem_of(candidate, check)
            except NotImplementedError:
                continue
            if problem is not None and _kind(problem) == _kind(failure.problem):
                failure, smaller = Failure(candidate, problem), True
                break
    return failure


def _kind(problem: str) -> str:
    """The error's type and the first word of its message: a smaller case must fail for the same reason."""
    return " ".join(problem.split()[:2])


def simpler(case: Case) -> Iterator[Case]:
    """Cases that are one step simpler, the largest steps first."""
    change = lambda **fields: dataclasses.replace(case, **fields)  # noqa: E731
    kernels = case.implementation not in ("reference", "xla")
    plainest = "jit" if kernels else "none"
    if case.transformation != plainest:
        yield change(transformation=plainest, mapped=())
    for name in case.options:
        mapped = tuple(other for other in case.mapped if not belongs(other, name))
        if mapped or not case.mapped:
            yield change(options={other: how for other, how in case.options.items() if other != name}, mapped=mapped)
    for name in case.mapped:
        if len(case.mapped) > 1:
            yield change(mapped=tuple(other for other in case.mapped if other != name))
    if case.batch > 1 and case.transformation != "shard_map":
        yield change(batch=1)
    for side, length in enumerate(case.lengths):
        for less in sorted({1, length // 2, length - 1} - {0, length}):
            yield change(lengths=tuple(less if i == side else n for i, n in enumerate(case.lengths)))
    yield from (change(heads=heads) for heads in HEADS if sum(heads) < sum(case.heads))
    yield from (change(dims=dims) for dims in DIMS if sum(dims) < sum(case.dims))
    if case.dtype != "float32" and not kernels:
        yield change(dtype="float32")
