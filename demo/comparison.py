"""What a training step costs with each attention: memory as compiled and as allocated, time, the longest sequence."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from demo.parallel import largest
from demo.tasks import Batch
from demo.training import Run

MEASURED, OUT_OF_MEMORY, OVER_BUDGET = "measured", "out of memory", "over the budget"
MAX_REPEATS = 5
MIN_REPEATS = 2
MEASURING_SECONDS = 1.5  # of one program, unless MIN_REPEATS takes longer
LONGEST_TRIED = 2**22
FIRST_TRIED = 1024  # where nothing is measured
SINGLE_STEP = 16
MAX_COMPILATIONS = 5  # of a search: long programs take seconds to compile
DEFAULT_CPU_BUDGET = 2 * 2**30
UNTUNED = {"xla_gpu_autotune_level": 0}  # compiler options, for a program that is not run: nothing is tried out


class Memory(NamedTuple):
    """Bytes that the compiled program needs on the device: scratch alone, and together with what goes in and out."""

    temp: int
    total: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """A row of the comparison: one training step on one sequence of `seq_len` tokens."""

    implementation: str
    seq_len: int
    status: str  # MEASURED, OUT_OF_MEMORY or OVER_BUDGET (compiled but not run)
    temp_bytes: int | None
    total_bytes: int | None
    peak_bytes: int | None = None  # by the device's allocator; None where it does not count or this is hidden
    seconds: float | None = None  # the median of some steps


@dataclasses.dataclass(frozen=True)
class Longest:
    """The longest power of two found whose training step fits the budget, as compiled; nothing is run."""

    implementation: str
    seq_len: int  # 0 where none was found to fit
    total_bytes: int | None
    too_long: int | None  # the shortest found not to fit, twice seq_len unless the search had to stop before
    too_long_bytes: int | None
    compiled: tuple[tuple[int, int | None], ...]  # what the search itself compiled: tokens and bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is the device saying that it has no memory left."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def device_budget() -> int:
    """The memory of a device where it says how much it has, else 2 GiB."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", DEFAULT_CPU_BUDGET))


def memory(program: jax.stages.Compiled) -> Memory:
    """What the compiler reserved. Outputs that take the place of a donated input count once."""
    analysis = program.memory_analysis()
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temp = analysis.temp_size_in_bytes
    return Memory(temp, analysis.argument_size_in_bytes + outputs + temp)


def compiled_or_none(compile_program: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled | None:
    """None where the compiler itself says that the program cannot fit."""
    try:
        return compile_program()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def cost_as_compiled(name: str, seq_len: int, program: jax.stages.Compiled | None, budget: int) -> Cost:
    """What is known of a training step on one sequence before it runs; MEASURED is then still to be made true."""
    if program is None:
        return Cost(name, seq_len, OUT_OF_MEMORY, None, None)
    needed = memory(program)
    return Cost(name, seq_len, OVER_BUDGET if needed.total > budget else MEASURED, needed.temp, needed.total)


def measured(run: Run, cost: Cost, program: jax.stages.Compiled) -> Cost:
    """Run the step for its time and its peak. A peak never falls in a process, so it is this step's if it rises."""
    before = peak_bytes()
    try:
        seconds = _median_seconds(run, program, cost.seq_len)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return dataclasses.replace(cost, status=OUT_OF_MEMORY)
    after = peak_bytes()
    risen = after is not None and (before is None or after > before)
    return dataclasses.replace(cost, seconds=seconds, peak_bytes=after if risen else None)


def in_batches(costs: Sequence[Cost]) -> list[list[Cost]]:
    """By growing need of memory, those together that need less than twice what the first of them does.

    Compiling for a GPU tries algorithms out, with operands that the allocator counts: a few of a program's arrays, far
    less than half of what it needs in all. Who compiles a batch and runs it before the next one sees no peak of that.
    """
    batches: list[list[Cost]] = []
    for cost in sorted(costs, key=lambda cost: cost.total_bytes or 0):
        if batches and (cost.total_bytes or 0) < 2 * (batches[-1][0].total_bytes or 0):
            batches[-1].append(cost)
        else:
            batches.append([cost])
    return batches


def peak_bytes() -> int | None:
    """The most that has been allocated at once on the first device of this process; None where nobody counts."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def _median_seconds(run: Run, program: jax.stages.Compiled, seq_len: int) -> float:
    rng = np.random.default_rng(run.seed)
    tokens = rng.integers(run.task.vocab_size, size=(1, seq_len), dtype=np.int32)
    batch = run.place(Batch(tokens, np.roll(tokens, -1, axis=1), np.ones(tokens.shape, np.float32)))
    state = jax.block_until_ready(program(run.start(), batch))  # the first call warms up
    seconds: list[float] = []
    while len(seconds) < MAX_REPEATS and (len(seconds) < MIN_REPEATS or largest(sum(seconds)) < MEASURING_SECONDS):
        begin = time.perf_counter()
        state = jax.block_until_ready(program(state, batch))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def longest_sequence(
    name: str, run: Run, budget: int, known: Sequence[Cost], memory_of: Callable[[int], Memory | None]
) -> Longest:
    """Search among the powers of two, each guess from what is compiled already, with MAX_COMPILATIONS at most.

    memory_of: compiles for one sequence of so many tokens; None where the compiler itself says that it cannot fit.
    """
    totals = {row.seq_len: row.total_bytes for row in known}
    compiled: list[tuple[int, int | None]] = []
    while True:
        powers = {n: total for n, total in totals.items() if n.bit_count() == 1}
        fits = max((n for n, total in powers.items() if total is not None and total <= budget), default=0)
        too_long = min((n for n in powers if n > fits), default=None)
        ended = too_long == max(run.layout.length_unit, 2 * fits) or fits == LONGEST_TRIED
        if ended or len(compiled) == MAX_COMPILATIONS:
            too_long_bytes = totals[too_long] if too_long else None
            return Longest(name, fits, totals.get(fits), too_long, too_long_bytes, tuple(compiled))
        seq_len = max(run.layout.length_unit, _next_length(totals, budget, fits, too_long))
        needed = memory_of(seq_len)
        totals[seq_len] = needed.total if needed else None
        compiled.append((seq_len, totals[seq_len]))


def _next_length(totals: dict[int, int | None], budget: int, fits: int, too_long: int | None) -> int:
    """Where memory would reach the budget if it went on growing as between the two rows that are nearest to it."""
    lowest, highest = max(1, 2 * fits), too_long // 2 if too_long else LONGEST_TRIED
    known = sorted((abs(math.log(total / budget)), seq_len, total) for seq_len, total in totals.items() if total)[:2]
    if not known:
        return min(max(lowest, FIRST_TRIED), highest)
    (_, near, total), *others = known
    order = 1.0
    if others:
        _, far, other = others[0]
        order = min(2.0, max(1.0, math.log(total / other) / math.log(near / far)))
    elif fits:
        highest = min(highest, SINGLE_STEP * fits)  # one row does not tell how memory grows
    guess = math.log2(near) + math.log2(budget / total) / order
    return min(max(lowest, 2 ** max(0, math.floor(guess))), highest)
