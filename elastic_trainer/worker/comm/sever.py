"""Frees a rank that is blocked in gloo: finds the sockets of a process group and shuts them down.

gloo's own abort does not end a collective that waits for a frozen or silently lost peer. Shutting a socket down for
reading makes gloo read end of file and raise in the waiting thread. (``SHUT_RDWR`` leaves more threads blocked.) A
group's sockets are those that appear in ``/proc/self/fd`` while it forms and that are connected to the round's store,
or connected to or listening at an address of a rank's gloo. Sockets that the script opens meanwhile stay open.

*Runs in* any thread of a worker. *Fails by* nothing: missing descriptors are skipped.
*Invariant*: a descriptor is touched only while it is the same socket (number and inode) as before, and never a
listening one (gloo would end the process).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from typing import Any

from elastic_trainer.data.child import open_sockets

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
