"""Many programs compiled side by side, with an eye on the request to stop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType

import jax

from demo.stop import StopRequest
from demo.training import Run

SECONDS_BETWEEN_LOOKS = 0.2  # at the request to stop


class StoppedError(Exception):
    """Ends a thread whose result nobody waits for any more."""


class Compiler:
    """Threads that compile training steps. Tracing and lowering are Python, so they take turns; XLA needs no turn.

    with Compiler(stop) as compiler:
        for name, program in compiler.each({name: lambda: compiler.step(run, 1, 512)}): ...

    After a signal nothing new is begun. What XLA compiles at that moment cannot be broken off, and the process ends
    after it; nothing waits for it before that.
    """

    def __init__(self, stop: StopRequest):
        # Processes of one run share what they find out while compiling, and must ask for it in the same order.
        workers = (os.cpu_count() or 1) if jax.process_count() == 1 else 1
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="compiler")
        self._turn = threading.Lock()
        self._stop = stop
        self._left = False

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._left = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def lower(self, run: Run, batch_size: int, seq_len: int) -> jax.stages.Lowered:
        """The training step, to be compiled. In the threads of `each`."""
        with self._turn:
            if self._left or self._stop.signal is not None:
                raise StoppedError
            return run.lower_step(batch_size, seq_len)

    def step(self, run: Run, batch_size: int, seq_len: int) -> jax.stages.Compiled:
        """Likewise, compiled."""
        return self.lower(run, batch_size, seq_len).compile()

    def each[Key, Result](self, jobs: dict[Key, Callable[[], Result]]) -> Iterator[tuple[Key, Result]]:
        """Run all in threads; the results as they come, none after a signal. What a job raises is raised here."""
        waiting: dict[Future[Result], Key] = {self._pool.submit(job): key for key, job in jobs.items()}
        while waiting and self._stop.signal is None:
            done, _ = wait(waiting, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
            for future in done:
                key = waiting.pop(future)
                try:
                    yield key, future.result()
                except StoppedError:
                    return
        for future in waiting:
            future.cancel()
