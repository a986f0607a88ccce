"""Measures tiles on the GPU at hand and keeps the fastest for later calls: `python -m pallas_flash.tuning`.

The search starts from the configuration that a call takes today and varies one field after the other, as long as
something gets faster. A candidate counts only if it compiles and its results are those of the start.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import masks
from pallas_flash.spec import AttentionSpec, Operands
from pallas_flash.tuning.cache import Case

ROUNDS, ITERATIONS = 3, 8
GAIN = 0.005  # a candidate must be faster by this share: less is noise
MAX_DIFFERENCE = 1e-2  # between the results of two configurations: a few roundings to 16 bits
COMPILERS = 8  # programs compiled at a time
TOKENS, HIDDEN = 16384, 2048  # the size of the measured calls: enough for every SM to have several tiles


class Kernel(NamedTuple):
    """What is tuned. `choices`: the values of each field that are tried."""

    table: str
    choices: dict[str, tuple[Any, ...]]
    start: Callable[[AttentionSpec, Operands], Any]  # the configuration that a call takes today
    fits: Callable[[Any, AttentionSpec, Operands], bool]
    run: Callable[[Any, AttentionSpec, Operands], Callable[..., Any]]  # of a configuration: a function of operands


class Problem(NamedTuple):
    kernel: Kernel
    case: Case
    spec: AttentionSpec
    operands: Operands


class Candidate(NamedTuple):
    config: Any
    program: Any  # compiled; None: it does not compile
    failure: str = ""


class Finding(NamedTuple):
    """One step of a search: how long a candidate took, or (`ms` is None) why it has no time."""

    config: Any
    ms: float | None
    note: str
    is_best: bool = False  # of all so far


Measure = Callable[[Any, tuple[Any, ...]], float]  # milliseconds of a compiled program with these arguments


def problem(kernel: Kernel, case: Case, seq_len: int) -> Problem:
    """A call of this case on random data, causal or full."""
    heads = max(1, HIDDEN // max(case.head_dim, case.value_head_dim))
    batch = max(1, TOKENS // seq_len)
    shapes = [(batch, seq_len, heads, dim) for dim in (case.head_dim, case.head_dim, case.value_head_dim)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    q, k, v = (jax.random.normal(key, shape, case.dtype) for key, shape in zip(keys, shapes, strict=True))
    mask = (masks.Band(None, 0),) if case.mask == "causal" else ()
    spec = AttentionSpec(scale=1 / math.sqrt(case.head_dim), mask=mask)
    return Problem(kernel, case, spec, Operands(q, k, v, mask=((),) * len(mask)))


def search(wanted: Problem, measure: Measure) -> Iterator[Finding]:
    """Yields what it tries, first the configuration in use; the last finding that `is_best` is the result."""
    kernel = wanted.kernel
    best = _compile(wanted, kernel.start(wanted.spec, wanted.operands))
    if best.program is None:
        raise RuntimeError(f"the configuration in use does not compile: {best.failure}")
    expected = best.program(wanted.operands)
    yield Finding(best.config, measure(best.program, (wanted.operands,)), "in use", is_best=True)
    tried, improved = {best.config}, True
    while improved:
        improved = False
        for field in kernel.choices:
            for candidate in _compile_all(wanted, _variants(wanted, best.config, field, tried)):
                finding = _try(wanted, candidate, best, expected, measure)
                yield finding
                if finding.is_best:
                    best, improved = candidate, True


def _variants(wanted: Problem, config: Any, field: str, tried: set[Any]) -> list[Any]:
    variants = []
    for value in wanted.kernel.choices[field]:
        try:
            variant = dataclasses.replace(config, **{field: value})
        except ValueError:  # no such combination
            continue
        if variant not in tried and wanted.kernel.fits(variant, wanted.spec, wanted.operands):
            tried.add(variant)
            variants.append(variant)
    return variants


def _try(wanted: Problem, candidate: Candidate, best: Candidate, expected: Any, measure: Measure) -> Finding:
    """Whether a candidate is right, and faster than the best so far, which is measured again beside it."""
    if candidate.program is None:
        return Finding(candidate.config, None, candidate.failure)
    difference = _difference(candidate.program(wanted.operands), expected)
    if not difference < MAX_DIFFERENCE:
        return Finding(candidate.config, None, f"wrong: its results differ by {difference:.1e}")
    before, now = (measure(each.program, (wanted.operands,)) for each in (best, candidate))
    return Finding(candidate.config, now, f"{before / now:.3f} x the best so far", is_best=now < (1 - GAIN) * before)


def _compile_all(wanted: Problem, configs: list[Any]) -> Iterator[Candidate]:
    with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
        yield from list(pool.map(lambda config: _compile(wanted, config), configs))


def _compile(wanted: Problem, config: Any) -> Candidate:
    try:
        run = wanted.kernel.run(config, wanted.spec, wanted.operands)
        return Candidate(config, jax.jit(run).lower(wanted.operands).compile())
    except Exception as error:  # too much shared memory, say: a line of the table
        return Candidate(config, None, f"does not compile: {type(error).__name__}: {error}"[:200])


def device_time(program: Any, arguments: tuple[Any, ...]) -> float:
    """The median of a program's device time in milliseconds, by CUPTI."""
    from jax.experimental.mosaic.gpu import profiler

    measured = profiler.measure(program, iterations=ITERATIONS)
    return statistics.median(time for _ in range(ROUNDS) for time in measured(*arguments)[1])


def _difference(got: Any, expected: Any) -> float:
    """The largest relative difference (Frobenius) of two results."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    norm = lambda x: jnp.linalg.norm(x.astype(jnp.float32).ravel())  # noqa: E731
    return max(float(norm(g.astype(jnp.float32) - e.astype(jnp.float32)) / norm(e)) for g, e in pairs)
