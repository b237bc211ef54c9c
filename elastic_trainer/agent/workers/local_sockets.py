"""Sockets of this machine, from the kernel (Linux): who is at the other end of a connection, and who listens at a port.

Netlink (``man 7 sock_diag``) lists only listening sockets, in about 20 us. ``/proc/net/tcp``, for kernels and sandboxes
without netlink, walks the table of all connections: milliseconds, and more on machines with much memory.

*Runs in* any thread of the agent. *Owns* nothing.
*Fails by* nothing where it reads processes: those that have ended, or that it may not read, are skipped; by OSError in
``listened_at`` if neither of the kernel's two interfaces is available.
"""

from __future__ import annotations

import os
import re
import socket
import struct
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


NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP = 4, 20, 0x301
TCP_LISTEN = 10
_HEADER, _FAMILIES, _SOCKET_ID_BYTES = struct.Struct("=IHHII"), (socket.AF_INET, socket.AF_INET6), 48
_ERROR, _LONGEST, _LIMIT_S = 2, 1 << 15, 5.0


def listened_at(port: int) -> bool:
    """Whether a process listens at ``port`` now, at any address of this process's network namespace."""
    try:
        return any(_answer(family, port) == SOCK_DIAG_BY_FAMILY for family in _FAMILIES)
    except OSError:
        return in_tables(port, Path("/proc/net"))


def _answer(family: int, port: int) -> int:
    """The type of the kernel's first message about sockets of ``family`` that listen at ``port``."""
    wanted = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 1 << TCP_LISTEN) + struct.pack("!H", port)
    body = wanted.ljust(8 + _SOCKET_ID_BYTES, b"\0")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_LIMIT_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0) + body)
        answer = kernel.recv(_LONGEST)
    kind: int = _HEADER.unpack_from(answer)[1]
    if kind == _ERROR:
        code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        raise OSError(code, os.strerror(code))
    return kind


def in_tables(port: int, tables: Path) -> bool:
    """The same, from the files ``tcp`` and ``tcp6`` in ``tables``."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in (tables / name).read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == f"{TCP_LISTEN:02X}" for row in rows)
