"""A unix socket between a node's agent and its workers: lines in both directions, only for peers of the same user.

*Runs in* the agent (one thread accepts, one reads each worker) and in each worker (its control thread reads).
*Owns* the socket and its private directory; the next agent removes the directory of a killed one.
*Fails by* ChannelClosedError when the other end is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from elastic_trainer.clock import pause
from elastic_trainer.errors import RejoinError
from elastic_trainer.ipc.folders import PrivateFolder
from elastic_trainer.ipc.messages import LONGEST_LINE, Message
from elastic_trainer.telemetry.logs import logger

SEND_TIMEOUT_S = 5.0
_RETRY_S = 0.1
_PREFIX = "elastic-trainer-agent-"
_UCRED = struct.Struct("3i")
_LONGEST_ADDRESS = 107
"""Bytes of a unix socket's address on Linux (unix(7)); a TMPDIR of a batch system may be longer."""


class ChannelClosedError(RejoinError):
    """The other end of the channel is gone."""


class Connection:
    """One end of a connected channel. Sending is thread-safe and bounded in time; only one thread may read."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_TIMEOUT_S), 0))
        self._lock = threading.Lock()

    def peer(self) -> tuple[int, int]:
        """The peer's process id and user id, from the kernel."""
        pid, uid, _ = _UCRED.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return pid, uid

    def fileno(self) -> int:
        """-1 once closed."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises ChannelClosedError when the other end is gone or does not read."""
        try:
            with self._lock:
                self._socket.sendall(message.encode())
        except OSError as error:
            raise ChannelClosedError(f"the channel is closed: {error}") from error

    def lines(self) -> Iterator[bytes]:
        """Complete lines until the other end closes."""
        pending = b""
        while True:
            try:
                received = self._socket.recv(65536)
            except OSError:
                return
            if not received:
                return
            *complete, pending = (pending + received).split(b"\n")
            if len(pending) > LONGEST_LINE:
                return
            yield from complete

    def close(self) -> None:
        """Close; a reader in another thread ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Listener:
    """The agent's end: a socket in a directory that only this user can enter.

    ``serve(connection)`` is called in a separate thread for each worker, and returns when the worker is gone.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._serve, self._closing = serve, False
        self._folder = PrivateFolder(_PREFIX)
        self.path = self._folder.path / "agent.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self.path) as address:
                self._socket.bind(address)
            self._socket.listen(64)
        except OSError:
            self._socket.close()
            self._folder.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="channel", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                if not self._closing:
                    pause(_RETRY_S)  # for example out of descriptors
                continue
            connection = Connection(connected)
            pid, uid = connection.peer()
            if uid != os.geteuid():
                logger().warning("channel.refused", pid=pid, reason=f"it belongs to another user, {uid}")
                connection.close()
                continue
            try:
                threading.Thread(target=self._run, args=(connection,), name=f"worker-{pid}", daemon=True).start()
            except RuntimeError as error:  # the limit of processes is reached
                logger().warning("channel.refused", pid=pid, reason=str(error))
                connection.close()

    def _run(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except Exception:  # noqa: BLE001 - the edge of a thread: the worker is treated as gone
            logger().exception("channel.failed")
        finally:
            connection.close()

    def close(self) -> None:
        """Stop listening and remove the directory; open connections stay."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._folder.close()


def connect(path: Path) -> Connection:
    """The worker's end. Raises ChannelClosedError when the agent does not listen."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            connected.connect(address)
    except OSError as error:
        connected.close()
        raise ChannelClosedError(f"the node's agent does not listen at {path}: {error}") from error
    return Connection(connected)


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """``path`` as an address of a unix socket: if it is too long for one, by way of its open directory."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
