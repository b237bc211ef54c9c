"""Whether a process listens at a TCP port of this machine, found without connecting to it.

*Runs in* any thread. *Fails by* OSError if neither of the kernel's two interfaces is available.

Netlink (``man 7 sock_diag``) lists only listening sockets, in about 20 us. ``/proc/net/tcp``, for kernels and sandboxes
without netlink, walks the table of all connections: milliseconds, and more on machines with much memory.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

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
