"""Which process is at the other end of a connection within this machine, from the kernel's ``/proc`` (Linux).

*Runs in* any thread of the agent. *Owns* nothing.
*Fails by* nothing: processes that have ended, or that it may not read, are skipped.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")
_REMOTE, _INODE = 2, 9
"""Columns of /proc/net/tcp."""


def descendants(pid: int, without: Collection[int] = ()) -> Iterator[int]:
    """The descendants of ``pid``, without the processes in ``without`` and their descendants."""
    for task in (_PROC / str(pid) / "task").glob("*/children"):
        for child in map(int, _text(task).split()):
            if child not in without:
                yield child
                yield from descendants(child, without)


def sockets_to(address: str, port: int) -> frozenset[int]:
    """The inodes of this network namespace's TCP sockets that are connected, or connecting, to ``address:port``."""
    number = int.from_bytes(socket.inet_aton(address), sys.byteorder)  # as the kernel writes it
    wanted = f"{number:08X}:{port:04X}"
    rows = (row.split() for name in ("tcp", "tcp6") for row in _text(_PROC / "net" / name).splitlines()[1:])
    return frozenset(int(row[_INODE]) for row in rows if row[_REMOTE].endswith(wanted))


def sockets_of(pid: int) -> frozenset[int]:
    """The inodes of the sockets that process ``pid`` holds."""
    names = _PROC / str(pid) / "fd"
    try:
        found = [_SOCKET.fullmatch(_target(names / name)) for name in os.listdir(names)]
    except OSError:
        return frozenset()
    return frozenset(int(match[1]) for match in found if match is not None)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
