"""SIGINT and SIGTERM as a request that the program looks at when it can save. Imports nothing that takes time."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a flag that loops look at; a second one interrupts at once.

    with StopRequest() as stop: ... if stop.signal: save and leave
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def leave_if_asked(self) -> None:
        """KeyboardInterrupt if a signal has come: for where there is nothing to save."""
        if self.signal is not None:
            raise KeyboardInterrupt

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
