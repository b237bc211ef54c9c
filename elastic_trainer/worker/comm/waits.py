"""The pending collectives of one round; the end of the round interrupts every wait for them.

gloo notices a lost connection only in operations that have moved no byte yet: one cut in the middle of a message blocks
until the group's timeout, whatever happens to its sockets. So a wait lasts only moments at a time, and checks in
between whether the round is over.

*Runs in* the worker's main thread, which waits; any thread may end the round.
*Owns* the operations until they end, also abandoned ones.
*Fails by* RoundBrokenError when the round is over; errors of an operation pass through.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from datetime import timedelta
from typing import Any, Protocol

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter

MOMENT_S = 0.02
AWAITED_S = 30.0
"""Who waits for storage logs it this often."""
_MOMENT = timedelta(seconds=MOMENT_S)


class Work(Protocol):
    """The part of a ``torch.distributed`` operation that is used."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class Aside:
    """An action, or a wait, in a thread of its own: transfers, and the making of a group.

    gloo closes the connection when the wait for a transfer times out; in other waits it only looks at the clock. And
    the making of a group cannot be interrupted while it waits for a peer to connect.

    ``brief``: the interpreter's end waits for the thread, since C++ aborts if it returns to Python later.
    """

    def __init__(self, act: Callable[[], object], *, brief: bool = False) -> None:
        self._act = act
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.result: Any = None
        threading.Thread(target=self._run, name="aside", daemon=not brief).start()

    def _run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: the waiting thread raises it
            self._error = error
        finally:
            self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """RuntimeError if it failed, or has not ended after ``timeout``."""
        if not self._ended.wait(timeout.total_seconds() if timeout is not None else None):
            raise RuntimeError("this is still under way")
        if self._error is not None:
            raise self._error
        return True


@contextmanager
def storage_awaited() -> Iterator[None]:
    """The body waits for storage: an event says so every ``AWAITED_S``, since nobody else may be there to notice."""
    began, over = SYSTEM.monotonic(), threading.Event()

    def say() -> None:
        while not over.wait(AWAITED_S):
            waited_s = round(SYSTEM.monotonic() - began, 1)
            logger().warning("storage.awaited", waited_s=waited_s, effect="this process goes on when storage answers")

    threading.Thread(target=copy_context().run, args=(say,), name="storage-awaited", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class InterruptibleWaits:
    """See the module. ``interruptible`` False: each wait is a single one (the process has only one round).

    ``tracker`` notes when this process waits for others.
    """

    def __init__(self, tracker: HeartbeatReporter | None = None, *, interruptible: bool = False) -> None:
        self._tracker, self._interruptible = tracker, interruptible
        self._over = threading.Event()
        self._why = ""
        self._open: dict[int, Work] = {}
        self._aborts: list[Callable[[], object]] = []

    def begun(self, work: Work) -> Work:
        self._open[id(work)] = work
        return work

    def ended(self, work: Work) -> None:
        """``work`` has ended, whatever it says."""
        self._open.pop(id(work), None)

    def wait(self, work: Work) -> None:
        """Wait until ``work`` has ended: within its group's timeout, and in place no longer than the round lasts."""
        if self._tracker is not None:
            self._tracker.waits()
        try:
            self._wait(work)
        finally:
            if self._tracker is not None:
                self._tracker.goes_on()
            if work.is_completed():
                self._open.pop(id(work), None)

    def wait_for_own(self, work: Work) -> None:
        """:meth:`wait` for storage, which this process reads or writes itself: it is not waiting for others."""
        with storage_awaited():
            self._wait(work)

    def check(self) -> None:
        """RoundBrokenError in place, when the round is over."""
        if self._interruptible and self._over.is_set():
            raise RoundBrokenError(self._why)

    def _wait(self, work: Work) -> None:
        if self._interruptible:
            self._wait_by_moments(work)
        else:
            work.wait()

    def _wait_by_moments(self, work: Work) -> None:
        while True:
            try:
                work.wait(_MOMENT)
                return
            except RuntimeError:
                if work.is_completed():
                    self._outcome(work)  # the moment may have ended just before
                    return
            self.check()

    def _outcome(self, work: Work) -> None:
        """The result of finished ``work``: a failure after the end of its round is reported as that end."""
        try:
            work.wait()
        except RuntimeError as error:
            if self._over.is_set():
                raise RoundBrokenError(self._why) from error
            raise

    def end(self, why: str) -> None:
        """End all waits, because of ``why``. From any thread."""
        self._why = self._why or why
        self._over.set()

    def abort_with(self, act: Callable[[], object]) -> None:
        """``act`` frees what no wait can: a device's kernels that wait for a lost peer."""
        self._aborts.append(act)

    def abort(self) -> None:
        """Do that, when the round is over in the middle of a collective. From any thread."""
        for act in self._aborts:
            try:
                act()
            except RuntimeError as error:
                logger().warning("nccl.not_aborted", error=str(error).partition("\n")[0])

    def outlive(self) -> int:
        """Wait until all operations have ended, however they end; how many there were."""
        left = list(self._open.values())
        for work in left:
            with contextlib.suppress(RuntimeError):
                work.wait()
        self._open.clear()
        return len(left)
