"""What tests/test_interpret*.py share: their checks run in a process of their own, `python -m tests.test_interpret`, as
XLA reads NPROC when it starts: with fewer threads than warpgroups the interpreter would wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import interpreted

ROOT = Path(__file__).parent.parent
# The programs around the kernels' reads and writes are compiled for longer than they run.
ENVIRONMENT = interpreted.ENVIRONMENT | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def failure(check: Callable[..., None], *args: Any) -> str | None:
    try:
        check(*args)
    except Exception:
        return traceback.format_exc()
    return None


def main(checks: dict[str, Any]) -> None:
    """Run the checks, or those that a command line argument is part of the name of, and say how each went; exit with 1
    if any failed."""
    wanted = sys.argv[1:]
    failed = False
    for name, call in checks.items():
        if not wanted or any(part in name for part in wanted):
            problem = failure(*call)
            failed |= problem is not None
            print(f"{name}: {problem or 'passed'}", flush=True)
    sys.exit(failed)


def assert_all_pass(module: str, number: int) -> None:
    command, environment = [sys.executable, "-m", module], os.environ | ENVIRONMENT
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(": passed\n") == number
