"""Finds, signals and awaits processes: trees of descendants, and all processes with given environment variables.

*Runs in* the local cluster's process. *Owns* the handlers of termination signals while :class:`Interrupts` is entered.
*Fails by* returning the processes that remain; one that has already ended is never an error.
*Invariant*: a signal reaches only the process that was found (psutil compares creation times), so a reused pid is safe.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, Self

import psutil

from elastic_trainer.clock import Deadline, pause

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied)
_POLL_S = 0.02
_EXEC_S = 5.0
"""Upper bound on the wait for a new process to get its own image; a busy machine takes tens of milliseconds."""


def alive(process: psutil.Process) -> bool:
    """Whether any thread of it still runs; a zombie that waits to be reaped does not.

    A killed process appears as a zombie as soon as its first thread has ended, while others may still run.
    """
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def stands_still(process: psutil.Process) -> bool:
    """Whether it is stopped, or has ended."""
    try:
        return not alive(process) or process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return True


def tree(pid: int) -> list[psutil.Process]:
    """The process ``pid`` and all its descendants, itself first; empty if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def children(pid: int) -> list[psutil.Process]:
    """The processes that ``pid`` itself has started; empty if it has ended."""
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def environment(process: psutil.Process) -> Mapping[str, str]:
    """The environment that it was started with; empty if it has ended or is not ours.

    Waits for a process in the middle of exec: until the kernel has set up the new image, its environment and its
    command line both read empty, even though Popen has returned. Kernel threads look alike but have no executable.
    """
    deadline = Deadline.after(_EXEC_S)
    try:
        while not (found := process.environ()) and not deadline.expired:
            in_exec = not process.cmdline() and process.exe() and process.status() != psutil.STATUS_ZOMBIE
            if not in_exec:
                return process.environ()  # its exec may have ended since the look before
            pause(_POLL_S / 10)
    except _GONE:
        return {}
    return found


def marked(marks: Mapping[str, str]) -> list[psutil.Process]:
    """All living processes of this user that were started with these environment variables, except this one.

    Includes orphans.
    """
    me = psutil.Process().pid
    started = ((process, environment(process)) for process in psutil.process_iter() if process.pid != me)
    return [process for process, found in started if found and marks.items() <= found.items() and alive(process)]


def send(processes: Iterable[psutil.Process], signum: signal.Signals) -> None:
    """Signal all of them; skips those that have ended."""
    for process in processes:
        with contextlib.suppress(*_GONE):
            process.send_signal(signum)


def wait_gone(processes: Iterable[psutil.Process], deadline: Deadline) -> list[psutil.Process]:
    """Wait until all have ended; returns those that remain at the deadline."""
    remaining = [process for process in processes if alive(process)]
    while remaining and not deadline.expired:
        pause(min(_POLL_S, deadline.remaining_s()))
        remaining = [process for process in remaining if alive(process)]
    return remaining


def kill_all(
    processes: Iterable[psutil.Process], marks: Mapping[str, str] | None, deadline: Deadline
) -> list[psutil.Process]:
    """SIGKILL ``processes`` at once, then all others that carry ``marks``; returns those that remain at the deadline.

    The second part catches processes that one of them started between the search and the signal.
    """
    found = list(processes)
    send(found, signal.SIGKILL)
    remaining = wait_gone(found, deadline)
    while marks is not None and not deadline.expired and (late := marked(marks)):
        send(late, signal.SIGKILL)
        remaining = wait_gone(late, deadline)
    return remaining


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
