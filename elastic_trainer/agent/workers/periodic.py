"""The agent's threads: periodic ones that run until they are closed.

*Runs in* daemon threads, which it starts and owns.
*Fails by* nothing: a failed turn is logged, and the next one follows, so that no thread dies unnoticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.telemetry.logs import logger

IDLE_S: Final = 3600.0
"""The result of a turn that has nothing to do until ``wake`` is called."""
_RETRY_S: Final = 0.5
_JOIN_LIMIT_S: Final = 6.0


class PeriodicThread:
    """Calls ``turn()`` in a thread named ``name``; each turn returns the seconds until the next one."""

    def __init__(self, name: str, turn: Callable[[], float], clock: Clock = SYSTEM) -> None:
        self._name, self._turn, self._clock = name, turn, clock
        self._awake = threading.Event()
        self._first_s = 0.0
        self.closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, after_s: float = 0.0) -> None:
        """Start the thread, with the first turn in ``after_s`` seconds."""
        self._first_s = after_s
        self._thread.start()

    def wake(self) -> None:
        self._awake.set()

    def abandon(self) -> None:
        """Stop after the turn in progress, and do not wait for it."""
        self.closing = True
        self._awake.set()

    def close(self) -> None:
        """Stop after the turn in progress, and wait for it."""
        self.abandon()
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
                logger().exception("thread.failed", thread=self._name)
                pause_s = _RETRY_S
