"""The agent's threads: one that takes turns until it is closed, and calls at a later time.

*Runs in* daemon threads that are started here. *Owns* them.
*Fails by* nothing: a turn that fails is logged, and the next one comes. A dead duty would be silence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.telemetry.logs import logger

IDLE_S: Final = 3600.0
"""What a turn answers that has nothing to do before somebody wakes it."""
_RETRY_S: Final = 0.5
_JOIN_LIMIT_S: Final = 6.0


class Duty:
    """Calls ``turn()`` in a thread named ``name``; it answers how many seconds to wait for the next turn."""

    def __init__(self, name: str, turn: Callable[[], float], clock: Clock = SYSTEM) -> None:
        self._name, self._turn, self._clock = name, turn, clock
        self._awake = threading.Event()
        self._first_s = 0.0
        self.closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, after_s: float = 0.0) -> None:
        """Take the first turn in ``after_s`` seconds."""
        self._first_s = after_s
        self._thread.start()

    def wake(self) -> None:
        self._awake.set()

    def close(self) -> None:
        """Take no turn any more, and wait for the one under way."""
        self.closing = True
        self._awake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_LIMIT_S)

    def _run(self) -> None:
        pause_s = self._first_s
        while True:
            self._clock.wait(self._awake, pause_s)
            self._awake.clear()
            if self.closing:
                return
            try:
                pause_s = self._turn()
            except Exception:  # noqa: BLE001 - the edge of a thread
                logger().exception("duty.failed", duty=self._name)
                pause_s = _RETRY_S


class Cancellable(Protocol):
    """A call that has not been made yet."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Cancellable]
"""``later(seconds, call)``: ``call()`` in a thread of its own, unless it is cancelled before."""


def later(seconds: float, call: Callable[[], None]) -> Cancellable:
    """See :data:`Later`."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True  # a node that ends meanwhile does not wait for it
    timer.start()
    return timer
