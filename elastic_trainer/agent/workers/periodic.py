"""The agent's threads: a periodic one that runs until it is closed, and delayed calls.

*Runs in* daemon threads, which it starts and owns.
*Fails by* nothing: a failed turn is logged, and the next one follows, so that no thread dies unnoticed.
"""

from __future__ import annotations

import sched
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

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

    def close(self) -> None:
        """Stop after the turn in progress, and wait for it."""
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
                logger().exception("thread.failed", thread=self._name)
                pause_s = _RETRY_S


class Cancellable(Protocol):
    """A call that has not been made yet."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Cancellable]
"""``later(seconds, call)``: makes ``call()`` in another thread after that time, unless it is cancelled before."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A call that ``plan`` holds."""

    plan: sched.scheduler
    event: sched.Event

    def cancel(self) -> None:
        with suppress(ValueError):  # it has been made
            self.plan.cancel(self.event)


class DelayedCalls:
    """Makes calls at a later time, each in its own thread; where none can be started, in the one that waits for them.

    A call that was not made would be the last of its kind: each plans the next one.
    """

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._plan = sched.scheduler(clock.monotonic)
        self._thread = PeriodicThread("delayed-calls", self.turn, clock)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Drop what is planned."""
        self._thread.close()

    def later(self, seconds: float, call: Callable[[], None]) -> Cancellable:
        """See :data:`Later`."""
        planned = _Planned(self._plan, self._plan.enter(seconds, 0, _begin, (call,)))
        self._thread.wake()
        return planned

    def turn(self) -> float:
        """Make the calls that are due; returns the seconds until the next one."""
        next_s = self._plan.run(blocking=False)
        return IDLE_S if next_s is None else next_s


def _begin(call: Callable[[], None]) -> None:
    try:
        threading.Thread(target=call, name="delayed-call", daemon=True).start()
    except RuntimeError:  # the limit of processes is reached
        call()
