"""Train the same model twice, with standard attention and with flash attention, and compare what it costs.

    python train_demo.py                                   associative recall; a report in output/001
    python train_demo.py --task text --file book.txt       a byte-level language model of any file
    python train_demo.py --resume                          go on with the newest run after a kill or Ctrl-C
    make demo ARGS="--steps 30 --lengths 64 --no-longest"  through make, and quickly

Exit codes: 0 done; 2 bad input, or something to install (one line on stderr says what); 130 after SIGINT, 143 after
SIGTERM and 129 after SIGHUP (a closed terminal, unless under nohup), with everything saved and what there is reported.
"""

from __future__ import annotations

import argparse
import signal
import sys

from demo import InputError
from demo.stop import StopRequest

OWN = ("", "demo", "models", "pallas_flash")  # without these, nothing that is installed would help


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    stop, state = StopRequest(), "before it began"
    try:
        with stop:
            parsed = parse(arguments)
            stop.leave_if_asked()
            from demo.job import prepare

            job = prepare(parsed)
            state = f"and saved; to go on: {job.how_to_go_on()}"
            job.run(stop)
    except InputError as error:
        print(f"train_demo.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        stop.signal = stop.signal or signal.SIGINT
    if stop.signal is not None:
        print(f"train_demo.py: stopped by {signal.Signals(stop.signal).name} {state}", file=sys.stderr)
        return 128 + stop.signal
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, once everything is there. It imports JAX, which takes seconds: `stop` listens already."""
    if sys.version_info < (3, 12):  # noqa: UP036 - this file is run from a checkout, by any Python
        raise InputError(f"needs Python >= 3.12, not {sys.version.split()[0]}: make demo finds or fetches one")
    try:
        import demo.job  # noqa: F401 - everything, also for --help
        from demo.arguments import build_parser
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OWN:
            raise
        raise InputError(f'needs {missing}: make demo installs it, or here pip install ".[demo]"') from error
    return build_parser(__doc__).parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
