"""Memory files of other nodes' agents: read from there, and copies of this node's shards left there.

A client connects to the agent's port and sends the line COPIES. From then on it and the server (agent.workers.rescue)
send each other messages as multiprocessing.connection frames them. The server begins with a nonce; the client answers
with its HMAC-SHA256 (RFC 2104) under the key, then asks in JSON::

    {"read": PATH, "begin": BYTE, "size": BYTES}
    {"put": NUMBER, "size": BYTES, "keep": [ROUND, STEP]}

The answer to "read" are the bytes, in messages of at most PIECE; an empty one means that the file ends. The answer to
"put" is empty, or says why not; then the client sends the file from DATA on and its seal, which an empty message
confirms. "keep" may be null. A client whose key is the digest of the agent's compile cache can read that alone.

*Runs in* any thread; one at a time uses a connection. *Owns* its connection, until ``close``.
*Fails by* OSError if the agent does not answer (when reading: twice); RefusedError if it has no memory for a copy.
*Invariant*: a copy is sealed last. What is read is verified by its reader, as any snapshot.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import BufferTooShort
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

from elastic_trainer.checkpoint.manifest import PIECE
from elastic_trainer.checkpoint.memory import DATA, extent
from elastic_trainer.clock import SYSTEM

SILENCE_S = 5
"""Seconds without a byte in a message after which either side gives up; also how long a client keeps a connection that
it does not use."""
IDLE_S = 2 * SILENCE_S
"""Seconds without a request after which the server hangs up."""
COPIES = b"copies\n"
"""The first line of a client of this protocol, at a port where others ask other things."""
LONGEST_REQUEST = 4096
_NONCE = 32
_ERRORS = (OSError, EOFError, BufferTooShort)


class RefusedError(Exception):
    """The agent does not take the copy."""


class MemoryAddress(NamedTuple):
    """Where an agent serves its memory files, and the key (hexadecimal) to them."""

    host: str
    port: int
    key: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """``HOST PORT KEY``. ValueError for anything else."""
        host, port, key = text.split()
        return cls(host, int(port), key)


def framed(link: socket.socket) -> Connection:
    """``link`` as a connection, which gives up after SILENCE_S."""
    link.settimeout(None)
    for each in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, each, struct.pack("@ll", SILENCE_S, 0))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(link.detach())


def proof(nonce: bytes, key: str) -> bytes:
    """Shows that its sender knows the ``key``."""
    return hmac.new(bytes.fromhex(key), nonce, hashlib.sha256).digest()


def admitted(link: Connection, *keys: str) -> str:
    """The server's part: which of these ``keys`` the client at ``link`` knows; empty for none."""
    nonce = os.urandom(_NONCE)
    link.send_bytes(nonce)
    shown = link.recv_bytes(LONGEST_REQUEST)
    return next((key for key in keys if hmac.compare_digest(shown, proof(nonce, key))), "")


class _Client:
    """A connection that is made when it is needed, and anew after an error or a pause."""

    def __init__(self, address: MemoryAddress) -> None:
        self._address, self._link, self._asked_at = address, None, 0.0
        self._lock = threading.Lock()

    _link: Connection | None

    def _ask(self, request: dict[str, object]) -> Connection:
        now, before = SYSTEM.monotonic(), self._asked_at
        self._asked_at = now
        if now - before > SILENCE_S:
            self.close()
        if self._link is None:
            connected = socket.create_connection(self._address[:2], SILENCE_S)
            self._link = link = framed(connected)
            os.write(link.fileno(), COPIES)
            link.send_bytes(proof(link.recv_bytes(LONGEST_REQUEST), self._address.key))
        self._link.send_bytes(json.dumps(request).encode())
        return self._link

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


class RemoteMemory(_Client):
    """The memory file that the agent at ``address`` calls ``path``; see memory.SnapshotMemory."""

    def __init__(self, address: MemoryAddress, path: str) -> None:
        super().__init__(address)
        self._path = path

    def read_into(self, buffer: memoryview, position: int) -> bool:
        """Asks once more after an error: without these bytes all ranks resume from an older state."""
        with self._lock:
            try:
                return self._read(buffer, position)
            except _ERRORS:
                self.close()
            try:
                return self._read(buffer, position)
            except _ERRORS as error:
                self.close()
                raise _lost(self._address, error) from error

    def _read(self, buffer: memoryview, position: int) -> bool:
        link = self._ask({"read": self._path, "begin": position, "size": len(buffer)})
        while buffer:
            count = link.recv_bytes_into(buffer)
            if not count:
                return False
            buffer = buffer[count:]
        return True


class Neighbour(_Client):
    """The agent that keeps copies of what this process, the ``number``-th of its node, holds of a sharded state."""

    def __init__(self, address: MemoryAddress, number: int) -> None:
        super().__init__(address)
        self._number = number

    def __str__(self) -> str:
        return f"{self._address.host}:{self._address.port}"

    def keep(self, descriptor: int, but: tuple[int, int] | None, stopped: Callable[[], bool]) -> None:
        """Leave a copy of the sealed memory file ``descriptor`` there, in place of the older of two, but never of the
        one of the round and step ``but``. Ends early once it is ``stopped()``.
        """
        with self._lock:
            try:
                seal, end = extent(descriptor)
                link = self._ask({"put": self._number, "size": end, "keep": but})
                _accepted(link)
                for begin in range(DATA, end, PIECE):
                    if stopped():
                        self.close()
                        return
                    link.send_bytes(os.pread(descriptor, min(PIECE, end - begin), begin))
                link.send_bytes(seal)
                _accepted(link)
            except _ERRORS as error:
                self.close()
                raise _lost(self._address, error) from error


def _accepted(link: Connection) -> None:
    reason = link.recv_bytes(LONGEST_REQUEST)
    if reason:
        raise RefusedError(reason.decode(errors="replace"))


def _lost(address: MemoryAddress, error: Exception) -> OSError:
    return ConnectionError(f"the agent at {address.host}:{address.port} does not answer: {error or 'it hung up'}")
