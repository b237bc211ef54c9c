"""Distinguishes a collective that failed because of its peers from all other errors.

gloo raises plain RuntimeErrors, and scripts may raise them with any text ("S3 GET: socket timeout"). So a session marks
its own collectives (:func:`collective`). Errors from elsewhere in a step (DistributedDataParallel, the script's own
collectives) count if they have a type of torch.distributed or name a line of gloo's source. Even then nothing is
repeated until the agent has confirmed that the round is over.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from datetime import timedelta
from pathlib import Path
from traceback import walk_tb
from typing import Any, Protocol

import torch.distributed as dist

from elastic_trainer.clock import SYSTEM
from elastic_trainer.data.workers import open_sockets
from elastic_trainer.errors import RejoinError, RoundBrokenError, TransientError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.report import HeartbeatReporter

_REMOTE = re.compile(r"remote=\[([^\]\s]+)\]")
_PORT = re.compile(r"(remote=\[[^\]\s]+\]):\d+(?:\$\d+)?")
_IN_GLOO = re.compile(r"gloo/\S*\.(?:cc|h):\d+\]")


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from or during."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def summary(error: BaseException) -> str:
    """``error`` in a few words, without gloo's file names, advice, and the number of a pair that is gone."""
    text = str(error).partition("\n")[0]
    text = _PORT.sub(r"\1", re.sub(r"\[/[^\]]*\]\s*", "", text))
    return text.partition(". This is")[0][:160]


def tried(error: BaseException) -> str:
    """The address that gloo could not connect to, as far as its message says; a hint, since that is no interface."""
    found = (_REMOTE.search(str(each)) for each in chain(error))
    return next((match[1] for match in found if match is not None), "")


def trail(error: BaseException) -> list[str]:
    """``error`` and its causes, each with the calls that it came through, outermost first: for the log."""
    return [f"{type(each).__name__}: {summary(each)} ({_calls(each)})" for each in chain(error)]


def _calls(error: BaseException) -> str:
    codes = ((frame.f_code, line) for frame, line in walk_tb(error.__traceback__))
    return " > ".join(f"{Path(code.co_filename).name}:{line} {code.co_name}" for code, line in codes)


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Turns any error of the body, which only peers can cause, into a RoundBrokenError."""
    try:
        yield
    except RuntimeError as error:
        raise RoundBrokenError(f"a peer was lost ({what}: {summary(error)})") from error


def is_collective_failure(error: BaseException) -> bool:
    """Whether ``error`` or one of its causes is a collective that lost a peer."""
    return any(_is_of_a_collective(each) for each in chain(error))


def _is_of_a_collective(error: BaseException) -> bool:
    if isinstance(error, (RejoinError, TransientError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and _IN_GLOO.search(str(error)) is not None


End = tuple[str, int]
"""Address and port of one end of a connection."""


class Sockets:
    """The sockets of one process group at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[int, str] | None = None
        self._mine: dict[int, str] | None = None
        self._ends: frozenset[End] = frozenset()
        self._round = 0

    def forming(self, store: Collection[End], round_: int = 0) -> None:
        """Sockets opened from now on may belong to the group of ``round_``; those connected to its ``store`` do."""
        with self._lock:
            self._before, self._mine, self._ends = open_sockets(), None, frozenset(store)
            self._round = round_

    def formed(self, listening: Collection[End]) -> int:
        """The group is complete and its ranks listen at ``listening``; returns the number of its sockets."""
        with self._lock:
            self._ends |= frozenset(listening)
            self._mine = self._appeared()
            for number in self._mine:
                with contextlib.suppress(OSError):
                    os.set_inheritable(number, False)  # gloo would leave them open in programs started by the script
            return len(self._mine)

    def forget(self) -> None:
        """The group has ended: the kernel may reuse its descriptors."""
        with self._lock:
            self._before = self._mine = None

    def descriptors(self) -> list[int]:
        """The unchanged descriptors of a complete group. Takes no lock, which a forked child might never get."""
        mine, now = self._mine or {}, open_sockets()
        return [number for number, name in mine.items() if now.get(number) == name]

    def sever(self, round_: int | None = None) -> int:
        """Shut the group's connected sockets down for reading; returns how many. ``round_``: only if they are its own.

        Another thread cannot know whether the group is still the one that it means, however late it looked.
        """
        with self._lock:
            if self._before is None or round_ not in (None, self._round):
                return 0
            mine = self._appeared() if self._mine is None else self._mine
            now = open_sockets()
            return sum(_shut(number) for number, name in mine.items() if now.get(number) == name)

    def _appeared(self) -> dict[int, str]:
        before = self._before or {}
        found = {number: name for number, name in open_sockets().items() if before.get(number) != name}
        return {number: name for number, name in found.items() if not self._ends.isdisjoint(_of(number))}


def listening(published: bytes | None) -> list[End]:
    """Addresses at which sockets of this process listen and that are contained in ``published`` (None: all of them).

    gloo publishes its address as the kernel's own structure, among other things.
    """
    found = [end for number in open_sockets() for end in _ends(number, listens=True)]
    return [end for end in found if published is None or _packed(end) in published]


def resolved(host: str, port: int) -> list[End]:
    """All remote addresses that connections to ``host`` may have."""
    try:
        return [_plain(found[4]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _packed(end: End) -> bytes:
    """As in ``sockaddr_in`` or ``sockaddr_in6``."""
    address = ipaddress.ip_address(end[0])
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    flow = b"" if address.version == 4 else bytes(4)
    return struct.pack("=H", family) + struct.pack("!H", end[1]) + flow + address.packed


def _of(number: int) -> list[End]:
    return _ends(number) or _ends(number, listens=True)


def _ends(number: int, *, listens: bool = False) -> list[End]:
    """Both ends of a TCP connection, or the address at which a socket ``listens``; empty for any other descriptor."""
    with contextlib.suppress(OSError), _tcp(number) as duplicate:  # OSError: not connected
        if not listens:
            return [_plain(duplicate.getsockname()), _plain(duplicate.getpeername())]
        if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return [_plain(duplicate.getsockname())]
    return []


def _plain(address: Any) -> End:
    """One spelling for each address: no scope, and IPv4 not inside IPv6."""
    found = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), address[1]


def _shut(number: int) -> bool:
    """Shut ``number`` down for reading if it is a connected TCP socket; whether it was."""
    with contextlib.suppress(OSError), _tcp(number) as duplicate:
        if not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            duplicate.shutdown(socket.SHUT_RD)
            return True
    return False


@contextlib.contextmanager
def _tcp(number: int) -> Iterator[socket.socket]:
    """A duplicate of descriptor ``number``; OSError unless it is a TCP socket."""
    with socket.socket(fileno=os.dup(number)) as duplicate:
        if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
            raise OSError(errno.EPROTOTYPE, os.strerror(errno.EPROTOTYPE))
        yield duplicate


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
