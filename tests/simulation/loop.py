"""Virtual time: calls in the order of their times, and threads of hosts that wait for them.

The product's own loops run as greenlets: one at a time, and another one goes on only where they wait.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

LEAST_S = 0.001
"""A real turn takes some time too: what is left of a wait may be too little to move the clock."""


def sleep(seconds: float, signal: Signal | None = None) -> None:
    """In a thread of a host: wait ``seconds``, at most until ``signal`` is fired."""
    getcurrent().parent.switch(seconds, signal)


class Loop:
    """Makes calls at their virtual times, in the order in which they were asked for where those are equal."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._queue: list[tuple[float, int, Host | None, Callable[..., object], tuple[Any, ...]]] = []
        self._asked = 0

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any, host: Host | None = None) -> None:
        """Make the call in ``seconds``, on ``host`` if one is given."""
        self._asked += 1
        heapq.heappush(self._queue, (self.now + seconds, self._asked, host, call, arguments))

    def run(self, until: float) -> None:
        """Let time pass."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, host, call, arguments = heapq.heappop(queue)
            if host is None or not (host.dead or host.frozen):
                call(*arguments)
            else:
                host.deliver(call, *arguments)
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
        self._waiters: list[tuple[Host, list[greenlet]]] = []

    def wait(self, host: Host, waiting: list[greenlet]) -> None:
        self._waiters.append((host, waiting))

    def fire(self) -> None:
        waiters, self._waiters = self._waiters, []
        for host, waiting in waiters:
            host.wake(waiting)


class Host:
    """A machine whose threads may stand still, or be gone. What reaches it while it is frozen comes at its thaw."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.frozen = self.dead = False
        self._kept: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._threads: set[greenlet] = set()

    def deliver(self, call: Callable[..., object], *arguments: Any) -> None:
        """Let the call happen on this host."""
        if self.dead:
            return
        if self.frozen:
            self._kept.append((call, arguments))
        else:
            call(*arguments)

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """Let it happen in ``seconds``."""
        self.loop.after(seconds, call, *arguments, host=self)

    def freeze(self) -> None:
        """Stand still."""
        self.frozen = True

    def thaw(self) -> None:
        """Go on, with all that has come meanwhile in its order."""
        self.frozen = False
        kept, self._kept = self._kept, []
        for call, arguments in kept:
            self.after(0.0, call, *arguments)

    def start(self, body: Callable[..., object], *arguments: Any) -> None:
        """Run ``body`` as a thread of this host until it returns or the host dies."""
        thread = greenlet(body)
        self._threads.add(thread)
        self.deliver(self._resume, thread, *arguments)

    def end(self) -> None:
        """The schedule is over. Collection of garbage does not see the stacks of threads that wait: they end here."""
        for thread in self._threads:
            while thread:
                thread.throw()

    def _resume(self, thread: greenlet, *arguments: Any) -> None:
        thread.parent = getcurrent()
        wanted = thread.switch(*arguments)
        if thread.dead:
            self._threads.remove(thread)
            return
        seconds, signal = wanted
        if signal is None:
            self.after(seconds, self._resume, thread)
            return
        waiting = [thread]
        signal.wait(self, waiting)
        if seconds != float("inf"):
            self.loop.after(seconds, self.wake, waiting)

    def wake(self, waiting: list[greenlet]) -> None:
        """By a signal or at the end of the wait, whichever comes first."""
        if waiting:
            self.deliver(self._resume, waiting.pop())


class Turns:
    """A PeriodicThread on ``host``."""

    def __init__(self, host: Host, turn: Callable[[], float]) -> None:
        self._host, self._turn = host, turn
        self._signal, self._awake, self.closing = Signal(), False, False

    def start(self, after_s: float = 0.0) -> None:
        self._host.start(self._run, after_s)

    def wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._host.loop.after(0.0, self._signal.fire)

    def close(self) -> None:
        self.closing = True

    def _run(self, pause_s: float) -> None:
        while not self.closing:
            if not self._awake:
                sleep(max(LEAST_S, pause_s), self._signal)
            self._awake = False
            if not self.closing:
                pause_s = self._turn()


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
            sleep(float("inf"), self._free)
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

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        self._signal.fire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = self._loop.now + max(LEAST_S, timeout if timeout is not None else float("inf"))
        while not (holds := predicate()) and self._loop.now < end:
            sleep(end - self._loop.now, self._signal)
        return holds
