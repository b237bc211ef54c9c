"""The pending collectives of one round; the end of the round interrupts every wait for them.

gloo notices a lost connection only in operations that have transferred no byte yet: one that is cut in the middle of a
message blocks until the group's timeout, whatever happens to its sockets. So each wait is split into short ones, and
checks in between whether the round is over.

*Runs in* the worker's main thread, which waits; any thread may end the round.
*Owns* the operations, including abandoned ones, until they end.
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
"""Seconds between log entries of a wait for storage."""
_MOMENT = timedelta(seconds=MOMENT_S)
_FEW = 64


class Work(Protocol):
    """The part of a ``torch.distributed`` operation that is used."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class ThreadedWork:
    """An action, or a wait, in a separate thread: transfers, and the creation of a group.

    gloo closes the connection when the wait for a transfer times out; other waits only check the clock. And the
    creation of a group cannot be interrupted while it waits for a peer to connect.

    ``brief``: the interpreter waits for the thread at exit, since C++ aborts if it returns to Python later.
    """

    def __init__(self, act: Callable[[], object], *, brief: bool = False) -> None:
        self._act = act
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.result: Any = None
        threading.Thread(target=self._run, name="threaded-work", daemon=not brief).start()

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
            raise RuntimeError("the operation is still in progress")
        if self._error is not None:
            raise self._error
        return True


@contextmanager
def storage_awaited() -> Iterator[None]:
    """While the body waits for storage, log it every ``AWAITED_S`` seconds: no other process may notice."""
    began, over = SYSTEM.monotonic(), threading.Event()

    def say() -> None:
        while not over.wait(AWAITED_S):
            waited_s = round(SYSTEM.monotonic() - began, 1)
            logger().warning("storage.awaited", waited_s=waited_s, effect="this process continues when storage answers")

    threading.Thread(target=copy_context().run, args=(say,), name="storage-awaited", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class InterruptibleWaits:
    """See the module. ``interruptible`` False: waits are not split (the process has only one round).

    ``tracker`` notes when this process waits for others.
    """

    def __init__(self, tracker: HeartbeatReporter | None = None, *, interruptible: bool = False) -> None:
        self._tracker, self._interruptible = tracker, interruptible
        self.over = threading.Event()
        """Set when the round is over."""
        self._why = ""
        self._open: dict[int, Work] = {}
        self._most = _FEW
        self._aborts: list[Callable[[], object]] = []

    def begun(self, work: Work) -> Work:
        """It is kept until it was waited for; one that nobody waits for, until some time after it has completed."""
        if len(self._open) >= self._most:
            for each in list(self._open.values()):
                if each.is_completed():
                    self.ended(each)
            self._most = max(_FEW, 2 * len(self._open))
        self._open[id(work)] = work
        return work

    def ended(self, work: Work) -> None:
        """Treat ``work`` as ended, whatever it reports."""
        self._open.pop(id(work), None)

    def wait(self, work: Work) -> None:
        """Wait until ``work`` has ended, at most for its group's timeout, and in place no longer than the round."""
        if self._tracker is not None:
            self._tracker.waits()
        try:
            self._wait(work)
        finally:
            if self._tracker is not None:
                self._tracker.resumes()
            if work.is_completed():
                self._open.pop(id(work), None)

    def wait_for_own(self, work: Work) -> None:
        """:meth:`wait` for storage, which this process reads or writes itself: it is not waiting for others."""
        with storage_awaited():
            self._wait(work)

    def check(self) -> None:
        """In place, raise RoundBrokenError if the round is over."""
        if self._interruptible and self.over.is_set():
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
        """Raise the error of finished ``work``, if any; after the end of its round as RoundBrokenError."""
        try:
            work.wait()
        except RuntimeError as error:
            if self.over.is_set():
                raise RoundBrokenError(self._why) from error
            raise

    def end(self, why: str) -> None:
        """End all waits, because of ``why``. From any thread."""
        self._why = self._why or why
        self.over.set()

    def abort_with(self, act: Callable[[], object]) -> None:
        """Register ``act``, which frees a device's kernels that wait for a lost peer; no wait can do that."""
        self._aborts.append(act)

    def abort(self) -> None:
        """Call the registered action: the round is over in the middle of a collective. From any thread."""
        for act in self._aborts:
            try:
                act()
            except RuntimeError as error:
                logger().warning("nccl.not_aborted", error=str(error).partition("\n")[0])

    def outlive(self) -> int:
        """Wait until all operations have ended, successfully or not; returns how many there were."""
        left = list(self._open.values())
        for work in left:
            with contextlib.suppress(RuntimeError):
                work.wait()
        self._open.clear()
        return len(left)
