"""The bytes of device memory that each kernel of a program really reads and writes, counted by Nsight Compute (`ncu`).

ncu starts a program of its own; run as a module, this is that program: it compiles a workload, checks the results, and
then runs it once more between the two calls that tell ncu to look. ncu empties the caches before each kernel, so what
one kernel leaves in the L2 for the next is counted twice, for every implementation alike.

The counters are those of the whole GPU: one program at a time.
"""

from __future__ import annotations

import csv
import ctypes
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from pallas_flash.benchmarks.cases import Workload

READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
# What ncu calls its units, in bytes and milliseconds.
UNITS = {
    **{"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9},
    **{"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "nsecond": 1e-6, "usecond": 1e-3, "msecond": 1.0, "second": 1e3},
}
TIMEOUT = 300  # seconds for one program
# For NVIDIA's tools that attach to a program. By default they attach to what it starts too, such as the assembler that
# a compilation calls, and then some runs never end.
PROGRAM_ALONE = ("--target-processes", "application-only")


class Kernel(NamedTuple):
    """One launch of a kernel: bytes of device memory, and its time under ncu, whose clocks are not those of a run."""

    name: str
    read: int
    written: int
    ms: float


def obstacle() -> str | None:
    """Why nothing can be counted here."""
    return None if shutil.which("ncu") else "Nsight Compute's ncu is not on the PATH"


def count(workload: Workload, implementation: str, kind: str) -> list[Kernel]:
    """All kernels of a program, in order. RuntimeError with the reason if it failed or its results are wrong."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = ["ncu", *PROGRAM_ALONE, "--csv", "--page", "raw", "--log-file", str(log)]
        command += ["--metrics", ",".join((READ, WRITTEN, TIME))]
        command += ["--profile-from-start", "off", "--clock-control", "none"]
        command += [sys.executable, "-m", "pallas_flash.benchmarks.ncu", workload.name, implementation, kind]
        # ncu has a lock in TMPDIR, which others may have left. XLA's own flags, if there are any, do not count here.
        # Kernels are launched one by one, and not as a graph.
        flags = "XLA_FLAGS=--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
        own = [flags, "XLA_PYTHON_CLIENT_PREALLOCATE=false", f"TMPDIR={folder}"]
        command = ["/usr/bin/env", *own, *command]
        try:
            status, errors = run_whole(command, TIMEOUT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"not done after {TIMEOUT} s") from error
        said = log.read_text() if log.is_file() else ""
    if status:
        lines = [line for line in (errors + said).splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"ncu ended with {status}")
    return parse(said)


def run_whole(command: list[str], seconds: float, **options: Any) -> tuple[int, str]:
    """Exit status of a program, and what it says where `options`, those of `Popen`, put a pipe. TimeoutExpired, with
    what it said so far, if it takes longer. Nothing of it is left over: ncu alone leaves its program running."""
    with subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
        try:
            said = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                error.output = "".join(filter(None, process.communicate()))
            raise
    return process.returncode, "".join(filter(None, said))


def parse(text: str) -> list[Kernel]:
    """ncu's CSV: messages, a line of names, a line of units, a line for each launch."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise RuntimeError(f"ncu counted nothing: {' '.join(text.split())[-200:] or 'no output'}")
    names, units, *launches = csv.reader(io.StringIO("\n".join(lines)))
    column = {name: index for index, name in enumerate(names)}

    def value(launch: list[str], metric: str) -> float:
        at = column[metric]
        return float(launch[at].replace(",", "")) * UNITS[units[at]]

    return [
        Kernel(line[column["Kernel Name"]], int(value(line, READ)), int(value(line, WRITTEN)), value(line, TIME))
        for line in launches
    ]


def _main(workload_name: str, implementation: str, kind: str) -> None:
    import jax

    from pallas_flash.benchmarks import cases, check, peers, programs, tiles

    (workload,) = cases.select([workload_name], cases.WORKLOADS)
    known = (*peers.all_peers(), *(peer for passed in tiles.TILES for peer in tiles.peers(passed)))
    (peer,) = peers.select([implementation], known)
    shapes = jax.eval_shape(lambda: cases.make_inputs(workload, 0))
    program = programs.lower(workload, peer, kind, [shapes])()
    inputs = cases.make_inputs(workload, 0)
    program = program._replace(arguments=[programs.arguments_of(inputs)])
    errors = check.relative_errors(program.run(), check.expected(workload, inputs))
    if over := check.too_large(errors, workload.dtype):
        sys.exit(f"relative error over budget: {over}")
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuProfilerStart()
    jax.block_until_ready(program.run())
    driver.cuProfilerStop()


if __name__ == "__main__":
    _main(*sys.argv[1:])
