"""The cases marked `also_interpreted`, by the kernels' bodies in Pallas' GPU interpreter, with race detection.

All of them take minutes: `NPROC=8 python -m pytest -m interpreted tests/cases`. Here runs the one that is not like any
of tests/test_interpret.py; there is no time for more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.interpreted import ENVIRONMENT

ROOT = Path(__file__).parent.parent.parent
CHOSEN = "nan_reaches and mask"


def test_the_kernels_bodies_pass_the_cases() -> None:
    """In a process of its own, as XLA reads the number of its threads when it starts."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "interpreted", "-k", CHOSEN, "tests/cases"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout and "skipped" not in run.stdout
