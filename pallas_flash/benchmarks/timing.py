"""How long a program takes: device time by CUPTI, the wall time of an asynchronous loop beside it, and what the device
can do at most."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.benchmarks.programs import Program, Rotating, compile_program, reason

SECONDS_A_ROUND = 0.25  # a program too slow for all iterations within it gets fewer
SUSTAINED_SECONDS = 0.5
HELD_BYTES = 16 * 2**30  # the profiler keeps the results of all iterations


@dataclasses.dataclass
class Samples:
    """Milliseconds a call. device: one each call, by device_clock. wall: one each round, of a loop that waits once at
    its end. sustained_wall: of one such loop of SUSTAINED_SECONDS; sustained: device time of the calls right after it.
    note: what there is to know of the clock. failure: what stopped it."""

    device: list[float] = dataclasses.field(default_factory=list)
    wall: list[float] = dataclasses.field(default_factory=list)
    sustained: list[float] = dataclasses.field(default_factory=list)
    sustained_wall: list[float] = dataclasses.field(default_factory=list)
    note: str | None = None
    failure: str | None = None
    device_clock: str = "cupti"

    @property
    def clock(self) -> str:
        return self.device_clock if self.device else "wall"

    @property
    def times(self) -> list[float]:
        return self.device or self.wall


class Timer(NamedTuple):
    """iterations: calls a round, at most. on_gpu: whether there is CUPTI to ask."""

    iterations: int
    on_gpu: bool

    def sample(self, program: Program, samples: Samples) -> None:
        """One round."""
        call = Rotating(program)
        once = _wall(call, 1)  # also warms it up
        count = self._count(program, once)
        samples.wall.append(1e3 * _wall(call, count) / count)
        samples.device += self._device(call, count, samples)

    def sustain(self, program: Program, samples: Samples) -> None:
        """Back to back, until the clocks have come down to what they hold."""
        call = Rotating(program)
        once = min(samples.wall) / 1e3
        count = max(1, math.ceil(SUSTAINED_SECONDS / once))
        samples.sustained_wall.append(1e3 * _wall(call, count) / count)
        samples.sustained += self._device(call, self._count(program, once), samples)

    def _count(self, program: Program, seconds: float) -> int:
        most = min(SECONDS_A_ROUND / seconds, HELD_BYTES / max(program.output_bytes, 1))
        return max(1, min(self.iterations, int(most)))

    def _device(self, call: Callable[[], Any], count: int, samples: Samples) -> list[float]:
        if not self.on_gpu:
            samples.note = "no GPU: wall time"
            return []
        from jax.experimental.mosaic.gpu import profiler

        try:
            _, times = profiler.measure(call, iterations=count)()
        except RuntimeError as error:
            samples.note = f"no device time: {error}"
            return []
        return [times] if isinstance(times, float) else list(times or [])


def _wall(call: Callable[[], Any], count: int) -> float:
    """Seconds of `count` calls that nobody waits for, until the last has ended."""
    result = None
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return time.perf_counter() - start


def interleave(programs: Sequence[tuple[Program, Samples]], timer: Timer, rounds: int, *, sustained: bool) -> None:
    """Every program once in each round, and another one first each time: what the clocks do hits all alike, and none
    always follows the same other, which may leave them high or low. Fills the samples as it goes, so that an
    interruption leaves what was measured."""
    steps = [timer.sample] * rounds + [timer.sustain] * sustained
    for turn, step in enumerate(steps):
        first = turn % max(len(programs), 1)
        for program, samples in (*programs[first:], *programs[:first]):
            if samples.failure is None:
                try:
                    step(program, samples)
                except Exception as error:  # out of memory, say: a row of the table
                    samples.failure = reason(error)


def statistics(times: list[float]) -> dict[str, float]:
    p20, median, p80 = np.percentile(times, [20, 50, 80]).tolist()
    return {"median": median, "p20": p20, "p80": p80, "min": min(times), "samples": len(times)}


def ceilings(timer: Timer) -> dict[str, Any]:
    """What this device reaches: TFLOP/s of a large bfloat16 matrix product, GB/s (read and written) of a copy."""
    size, count = (8192, 2**29) if timer.on_gpu else (512, 2**22)
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    y = jnp.ones((count,), jnp.bfloat16)
    # Whatever XLA_FLAGS say: a product that XLA has not tuned is no ceiling.
    tuned = {"xla_gpu_autotune_level": 4} if timer.on_gpu else {}
    matmul = (compile_program(jnp.matmul, [(x, x.T)], tuned), Samples())
    copy = (compile_program(jnp.negative, [(y,)], tuned), Samples())
    interleave([matmul, copy], timer, 2, sustained=False)
    fastest = [min(samples.times) / 1e3 for _, samples in (matmul, copy)]
    return {
        "matmul_tflops": 2 * size**3 / fastest[0] / 1e12,
        "copy_gbps": 2 * y.nbytes / fastest[1] / 1e9,
        "what": f"bfloat16 {size} x {size} x {size} on random data; copy of {y.nbytes} bytes; fastest of "
        f"{len(matmul[1].times)} and {len(copy[1].times)}, {matmul[1].clock}",
    }
