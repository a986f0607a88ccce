"""Signals as a request that the program looks at when it can save. Imports nothing that takes time."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopRequest:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a flag that loops look at; a second SIGINT interrupts at once.

    with StopRequest() as stop: ... if stop.asked(): save and leave
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # that has come to this process
        self.share: Callable[[int], int] = int  # among the processes of a run: the largest of what they have
        self._agreed = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether to stop, the same in all processes of a run: a signal to one of them is one to all. They must all ask
        equally often until the answer is yes, for a process that went on alone would wait for the others for ever."""
        if not self._agreed and (shared := self.share(self.signal or 0)):
            self.signal, self._agreed = self.signal or shared, True
        return self._agreed

    def leave_if_asked(self) -> None:
        """KeyboardInterrupt if a signal has come: for where there is nothing to save."""
        if self.signal is not None:
            raise KeyboardInterrupt

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == getattr(signal, "SIGHUP", None):
            _print_nowhere()


def _print_nowhere() -> None:
    """Where the terminal is gone, an attempt to print would end the program before it has saved."""
    for output in (1, 2):
        try:
            os.ttyname(output)
        except OSError as error:
            if error.errno == errno.EIO:  # neither a terminal that is there, nor a file
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
