"""NVIDIA's compute-sanitizer over a small call of every kernel.

    python -m tests.sanitize                     all four tools; needs a GPU and the CUDA toolkit
    python -m tests.sanitize --tools racecheck   one of them
    python -m tests.sanitize --jobs 4            several runs side by side

Two of the tools may not follow what these kernels do, so each is first asked about a program that is right by
construction: initcheck about memory that TMA stored, synccheck about warpgroups that meet at a named barrier from two
places of a program. A report of the same kind is not judged then: it says nothing. Everything else counts.

Exit codes: 0 no tool found anything that counts, 1 one did, or a run failed; 2 there is no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pallas_flash import command_line
from pallas_flash.benchmarks import ncu
from tests import sanitized

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 97  # exit status of a tool that found something: the program's own failures have others
ENDED = "the call ended, and its results are finite"
TIMEOUT = 300  # seconds for one run, most of which compiles
OURS = "flash_"  # in the names of this package's kernels
READ_FROM_TMA = "flash_decode_combine"  # reads by plain loads what another kernel of ours stored
UNFOLLOWED = {
    "initcheck": "Uninitialized __global__ memory read",
    "synccheck": "Barrier error detected. Divergent thread(s) in block.",
}
STOPS = ("memcheck", "synccheck")  # a report of theirs ends the kernel, and with it the program


class Failure(Exception):
    """A run that says nothing about the kernels: the program or the tool did not end as it should."""


def sanitize(tool: str, name: str, implementation: str) -> str:
    """What the tool found, "" for nothing. XLA's own allocator and command buffers stay out of its way."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    command = ["compute-sanitizer", *ncu.PROGRAM_ALONE, "--tool", tool, "--error-exitcode", str(FOUND)]
    command += [sys.executable, "-m", "tests.sanitize", "--run", name, "--implementation", implementation]
    with tempfile.TemporaryDirectory() as folder:  # the tools leave files there, which several of them might share
        own = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_FLAGS": flags, "TMPDIR": folder}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            status, said = ncu.run_whole(command, TIMEOUT, cwd=ROOT, env=os.environ | own, **streams)
        except subprocess.TimeoutExpired as error:
            raise Failure(f"not done after {TIMEOUT} s: {_shortened(error.output)}") from error
    reported = status == FOUND and bool(findings(said))
    if status not in (0, FOUND) or not (ENDED in said or (reported and tool in STOPS)):
        raise Failure(f"ended with status {status}: {_shortened(said)}")
    return said if status else ""


def _shortened(said: str) -> str:
    """Its beginning, where the first report is, and its end."""
    return (said if len(said) < 4000 else f"{said[:2000]}\n...\n{said[-2000:]}") or "no output"


def findings(report: str) -> set[tuple[str, str]]:
    """What a tool found, and in which kernel."""
    return set(re.findall(r"^=+ (\S.*?)(?: of size.*)?\n=+ +at (?:void )?([\w:<>]+)", report, re.MULTILINE))


def says_nothing(tool: str, report: str) -> bool:
    """Whether all of a report is of a kind that the tool's control has too."""
    judged = [
        (what, kernel)
        for what, kernel in findings(report)
        if what != UNFOLLOWED[tool] or (tool == "initcheck" and OURS in kernel and READ_FROM_TMA not in kernel)
    ]
    return not judged and bool(findings(report))


def check(tool: str, name: str, implementation: str, unfollowed: set[str]) -> str:
    """ "clean", "not judged" or "found"."""
    start = time.perf_counter()
    try:
        report = sanitize(tool, name, implementation)
    except Failure as failure:
        outcome, verdict = "found", f"failed, {failure}"
    else:
        outcome, verdict = ("found", report) if report else ("clean", "nothing found")
        if report and tool in unfollowed and says_nothing(tool, report):
            kernels = ", ".join(sorted({kernel for _, kernel in findings(report)}))
            outcome, verdict = "not judged", f"not judged, {UNFOLLOWED[tool]}, in {kernels}"
    print(f"{implementation}, {tool}, {name}: {verdict} ({time.perf_counter() - start:.0f} s)", flush=True)
    return outcome


def unfollowed_by(tools: list[str]) -> tuple[set[str], list[str]]:
    """The tools that report their control, and what counts as found: controls that failed in another way."""
    unfollowed, outcomes = set(), []
    for tool in tools:
        if tool not in sanitized.CONTROLS:
            continue
        name, _ = sanitized.CONTROLS[tool]
        try:
            report = sanitize(tool, name, "sm90")
            if report and {what for what, _ in findings(report)} != {UNFOLLOWED[tool]}:
                raise Failure(f"found what nobody expects there: {report}")
        except Failure as failure:
            print(f"{tool}, {name}: failed, {failure}", flush=True)
            outcomes.append("found")
            continue
        if report:
            unfollowed.add(tool)
            print(f"{tool} does not follow {name}: reports of this kind are not judged", flush=True)
    return unfollowed, outcomes


def main(arguments: list[str] | None = None) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__, formatter_class=layout)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--implementation", choices=("sm90", "sm80"), default="sm90")
    parser.add_argument("--jobs", type=command_line.positive, default=1, help="processes side by side, on one GPU")
    parser.add_argument("--run", metavar="CALL", help="one call, without a tool")
    options = parser.parse_args(arguments)
    names = list(sanitized.calls(options.implementation))
    if options.run is not None:
        known = [*names, *dict(sanitized.CONTROLS.values())]
        if options.run not in known:
            parser.error(f"--run: no call {options.run!r} of {options.implementation}; there are {', '.join(known)}")
        sanitized.run(options.run, options.implementation)
        print(ENDED)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    unfollowed, of_controls = unfollowed_by(options.tools)
    pairs = list(itertools.product(options.tools, names))
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = of_controls + list(
            pool.map(lambda pair: check(pair[0], pair[1], options.implementation, unfollowed), pairs)
        )
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("clean", "not judged", "found"))
    print(f"{len(outcomes)} runs: {counts}")
    return 1 if "found" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
