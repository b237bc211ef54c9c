"""Virtual time: events in the order of their times, and processes that wait for them."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Generator
from typing import Any

Process = Generator[Any, Any, None]
"""Yields seconds to sleep, or (signal, seconds): a signal to wait for, and the limit."""


class Loop:
    """Runs callbacks at their virtual times, in the order in which they were asked for where those are equal."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Run ``call`` in ``seconds``."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), call))

    def run(self, until: float) -> None:
        """Let time pass."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, call = heapq.heappop(queue)
            call()
        self.now = until

    # ---- the product's clock

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        raise RuntimeError("nothing waits in the simulation but its processes")


class Signal:
    """Wakes whoever waits; what was signalled before the wait does not count."""

    def __init__(self) -> None:
        self._waiters: list[Callable[[], None]] = []

    def wait(self, call: Callable[[], None]) -> None:
        self._waiters.append(call)

    def fire(self) -> None:
        waiters, self._waiters = self._waiters, []
        for call in waiters:
            call()


class Host:
    """A machine whose processes may stand still, or be gone. What reaches it while it is frozen comes at its thaw."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.frozen = self.dead = False
        self._kept: list[Callable[[], None]] = []

    def deliver(self, call: Callable[[], None]) -> None:
        """Let ``call`` happen on this host."""
        if self.dead:
            return
        if self.frozen:
            self._kept.append(call)
        else:
            call()

    def freeze(self) -> None:
        """Stand still."""
        self.frozen = True

    def thaw(self) -> None:
        """Go on, with all that has come meanwhile in its order."""
        self.frozen = False
        kept, self._kept = self._kept, []
        for call in kept:
            self.loop.after(0.0, lambda call=call: self.deliver(call))  # type: ignore[misc]

    def start(self, process: Process) -> None:
        """Run ``process`` on this host until it ends or the host dies."""
        self.deliver(lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        wanted = next(process, None)
        if wanted is None:
            return
        if not isinstance(wanted, tuple):
            self.loop.after(wanted, lambda: self.start(process))
            return
        signal, seconds = wanted
        done = False

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                self.start(process)

        signal.wait(once)
        if seconds != float("inf"):
            self.loop.after(seconds, once)
