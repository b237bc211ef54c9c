"""Virtual time: events in the order of their times, processes that wait for them, and straight code that waits.

The product's own loops run as greenlets: one at a time, and another one goes on only where they wait.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

Process = Generator[Any, Any, None]
"""Yields seconds to sleep, or (signal, seconds): a signal to wait for, and the limit."""
Answer = TypeVar("Answer")
LEAST_S = 0.001
"""A real turn takes some time too: what is left of a wait may be too little to move the clock."""


def straight(call: Callable[[], Answer]) -> Generator[Any, Any, Answer]:
    """``call()`` as a process."""
    task = greenlet(call)
    wanted = task.switch()
    while not task.dead:
        yield wanted
        task.parent = getcurrent()
        wanted = task.switch()
    return wanted  # type: ignore[no-any-return]


def wait_for(process: Generator[Any, Any, Answer]) -> Answer:
    """In straight code: wait until ``process`` has ended; its answer."""
    while True:
        try:
            wanted = next(process)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
        getcurrent().parent.switch(wanted)


def sleep(wanted: Any) -> None:
    """In straight code: wait for seconds, or for a signal."""
    getcurrent().parent.switch(wanted)


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
        if timeout_s > 0.0 and not event.is_set():
            sleep(timeout_s)
        return event.is_set()


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


class Turns:
    """A PeriodicThread on ``host``."""

    def __init__(self, host: Host, turn: Callable[[], float]) -> None:
        self._host, self._turn = host, turn
        self._signal, self._awake, self.closing = Signal(), False, False

    def start(self, after_s: float = 0.0) -> None:
        self._host.start(self._run(after_s))

    def wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._host.loop.after(0.0, self._signal.fire)

    def close(self) -> None:
        self.closing = True

    def _run(self, pause_s: float) -> Process:
        while not self.closing:
            if not self._awake:
                yield self._signal, max(LEAST_S, pause_s)
            self._awake = False
            if not self.closing:
                pause_s = yield from straight(self._turn)


class Lock:
    """A lock of straight code, which one greenlet may take several times."""

    def __init__(self) -> None:
        self._owner: greenlet | None = None
        self._times = 0
        self._free = Signal()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        while self._owner not in (None, getcurrent()):
            sleep((self._free, float("inf")))
        self._owner, self._times = getcurrent(), self._times + 1

    def release(self) -> None:
        self._times -= 1
        if not self._times:
            self._owner = None
            self._free.fire()


class Changed(threading.Condition):
    """A condition for which straight code waits."""

    def __init__(self, loop: Loop, signal: Signal) -> None:
        super().__init__()
        self._loop, self._signal = loop, signal

    def notify_all(self) -> None:
        self._signal.fire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = self._loop.now + max(LEAST_S, timeout if timeout is not None else float("inf"))
        while not predicate() and self._loop.now < end:
            sleep((self._signal, end - self._loop.now))
        return predicate()
