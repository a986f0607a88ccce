"""What the command lines of the package check alike: numbers, and folders before anything is measured for them."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path


def positive(text: str) -> int:
    """An argument's type: a whole number of at least 1."""
    return _whole_number(text, 1)


def not_negative(text: str) -> int:
    """An argument's type: a whole number of at least 0."""
    return _whole_number(text, 0)


def _whole_number(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text!r}")
    return number


def seconds(text: str) -> float:
    """An argument's type: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, not {text!r}")
    return number


def make_folder(option: str, folder: Path) -> None:
    """ValueError, with the option's name and the reason, if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option} {folder}: {error.strerror}") from error
