"""What `train_demo.py` is made of: tasks, training, comparison and report."""

from __future__ import annotations


class InputError(ValueError):
    """The user asked for something impossible; the message is one line, and the program ends with exit code 2."""
