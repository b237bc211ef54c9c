"""Turns termination signals into a value that a command's loop polls.

*Runs in* the main thread. *Owns* the handlers of SIGINT, SIGTERM and SIGHUP while entered; of SIGHUP unless it is
ignored, as under ``nohup``.
*Fails by* nothing. *Invariant*: a handler only stores a number (an Event could deadlock with the interrupted thread).
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The first signal, and whether another followed."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.again = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._before = {each: signal.signal(each, self._note) for each in ASKING if each not in kept}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.again = self.signal is not None
        self.signal = self.signal or signum
