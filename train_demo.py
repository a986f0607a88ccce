"""Train the same model twice, with standard attention and with flash attention, and compare what it costs.

    python train_demo.py                                   associative recall; a report in output/001
    python train_demo.py --task text --file book.txt       a byte-level language model of any file
    python train_demo.py --resume                          go on with the newest run after a kill or Ctrl-C
    make demo ARGS="--steps 30 --lengths 64 --no-longest"  through make, and quickly

Exit codes: 0 done; 2 bad input (one line on stderr says what); 130 after SIGINT and 143 after SIGTERM, with everything
saved and what there is reported.
"""

from __future__ import annotations

import signal
import sys

from demo import InputError
from demo.stop import StopRequest


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    stop, state = StopRequest(), "before it began"
    try:
        with stop:
            from demo.arguments import build_parser  # imports JAX, which takes seconds: stop listens already
            from demo.job import prepare

            parsed = build_parser(__doc__).parse_args(arguments)
            stop.leave_if_asked()
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


if __name__ == "__main__":
    sys.exit(main())
