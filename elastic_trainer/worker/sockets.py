"""Frees a rank that is blocked in gloo: finds the sockets of a process group and shuts them down.

gloo's own abort does not end a collective that waits for a peer which is frozen, or gone without a word. When a socket
is shut down for reading gloo reads its end, and raises in whoever waits. (``SHUT_RDWR`` leaves more of them blocked.)
Sockets of the group are those that appear in ``/proc/self/fd`` while it is formed.

*Runs in* any thread of a worker. *Owns* nothing: the descriptors stay gloo's.
*Fails by* nothing: a descriptor that is gone is passed over.
*Invariant*: a descriptor is touched only while it is the same socket (number and inode) that was seen, and never a
listening one (gloo would end the process).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

_DIRECTORY = "/proc/self/fd"


def open_sockets() -> dict[int, str]:
    """Descriptor number and kernel name (with the inode) of each socket of this process; empty off Linux."""
    found: dict[int, str] = {}
    try:
        names = os.listdir(_DIRECTORY)
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"{_DIRECTORY}/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


class Sockets:
    """The sockets of one process group at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[int, str] | None = None
        self._mine: dict[int, str] | None = None

    def forming(self) -> None:
        """What appears from now on belongs to the group."""
        with self._lock:
            self._before, self._mine = open_sockets(), None

    def formed(self) -> int:
        """The group is complete; how many sockets it has."""
        with self._lock:
            self._mine = self._appeared()
            for number in self._mine:
                with contextlib.suppress(OSError):
                    os.set_inheritable(number, False)  # gloo leaves them open in programs that the script starts
            return len(self._mine)

    def forget(self) -> None:
        """The group is given up: its descriptors may be used again for something else."""
        with self._lock:
            self._before = self._mine = None

    def descriptors(self) -> list[int]:
        """Those of a complete group that are still the same. Takes no lock, which a forked child could never get."""
        mine, now = self._mine or {}, open_sockets()
        return [number for number, name in mine.items() if now.get(number) == name]

    def sever(self) -> int:
        """Shut the group's connected sockets down for reading; how many."""
        with self._lock:
            if self._before is None:
                return 0
            mine = self._appeared() if self._mine is None else self._mine
            now = open_sockets()
            return sum(_shut(number) for number, name in mine.items() if now.get(number) == name)

    def _appeared(self) -> dict[int, str]:
        before = self._before or {}
        return {number: name for number, name in open_sockets().items() if before.get(number) != name}


def _shut(number: int) -> bool:
    """Shut one connected TCP socket down for reading; False if it is none."""
    try:
        duplicate = socket.socket(fileno=os.dup(number))
    except OSError:
        return False
    with duplicate:
        if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
            return False
        try:
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            duplicate.shutdown(socket.SHUT_RD)
        except OSError:
            return False
    return True
