"""Look for calls whose results are wrong.

    python -m tests.fuzz --seconds 600                        random calls, reference and xla in turn
    python -m tests.fuzz --seconds 600 --implementations sm90  on a GPU
    python -m tests.fuzz --seconds 600 --implementations interpreted   the kernels' bodies on a CPU (NPROC=8)
    python -m tests.fuzz --case '{"implementation": ...}'     the one that a failure printed

Every input follows from --seed. A failure is made as small as it gets and printed as the line that repeats it. Exit
codes: 0 all right, 1 something failed, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from pallas_flash import command_line, dispatch
from tests import interpreted
from tests.conftest import small_tiles
from tests.fuzz import run
from tests.fuzz.case import Case
from tests.fuzz.search import search

TILE = 32  # of xla: the calls are small, and should have several


def _case(line: str) -> Case:
    """An argument's type."""
    try:
        return Case.parse(line)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a line that a failure printed, not {line!r}: {error}") from error


def _obstacle(name: str) -> str | None:
    """Why an implementation cannot be asked for here."""
    known = (*dispatch.names(), interpreted.NAME)
    if name not in known:
        return f"implementation must be one of {', '.join(known)}, not {name!r}"
    if name == interpreted.NAME:
        return None
    entry = next(entry for entry in dispatch.TABLE if entry.name == name)
    problem = dispatch.device_obstacle(entry, dispatch.compute_capability())
    return problem and f"implementation {name} {problem}"


def main(arguments: list[str] | None = None) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, formatter_class=layout)
    parser.add_argument("--seconds", type=command_line.seconds, default=60.0)
    parser.add_argument("--seed", type=command_line.not_negative, default=0)
    parser.add_argument("--implementations", nargs="+", default=["reference", "xla"], metavar="NAME")
    parser.add_argument("--case", type=_case, help="check this one alone")
    options = parser.parse_args(arguments)
    asked = [options.case.implementation] if options.case else options.implementations
    for problem in filter(None, map(_obstacle, asked)):
        parser.error(problem)
    known = interpreted.by_name() if interpreted.NAME in asked else contextlib.nullcontext()
    with small_tiles(TILE), known:
        if options.case is not None:
            run.check(options.case)
            print("passed")
            return 0
        report = search(options.seed, tuple(options.implementations), seconds=options.seconds)
    said = {"none": "no transformation"}
    counts = ", ".join(f"{said.get(name, name)} {count}" for name, count in report.ran.items())
    print(f"seed {options.seed}: {counts}; {report.refused} refused, {len(report.failures)} failures")
    return 1 if report.failures else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
