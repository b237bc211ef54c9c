"""Serves this node's snapshots to workers of other nodes, and keeps copies of another node's shards.

A model that is sharded over all nodes loses shards with a node. Each node therefore leaves a copy of its own with the
next one (checkpoint.neighbours has the protocol), and the workers that start after a failure read all parts from the
agents that have them. There are two copies of each worker's part: one is whole while the other is overwritten.

*Runs in* a thread that accepts, and one for each connection.
*Owns* the port, and the memory files of the copies, empty at first: workers that start before learn their paths.
*Fails by* nothing: a client that breaks the protocol, is silent for long or lacks the key is hung up on.
*Invariant*: a copy without its seal is none. The copy that the sender needs is never overwritten.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from contextlib import suppress
from typing import Any

from elastic_trainer.checkpoint.arena import KEPT_FREE, MEMORY_NAME, SLOTS, available
from elastic_trainer.checkpoint.image import PIECE
from elastic_trainer.checkpoint.neighbours import IDLE_S, LONGEST_REQUEST, admitted, framed
from elastic_trainer.checkpoint.snapshot import DATA, break_seal, read, reseal
from elastic_trainer.clock import pause
from elastic_trainer.errors import CheckpointError
from elastic_trainer.ipc.listening import listen
from elastic_trainer.membership.documents import MOST_WORKERS
from elastic_trainer.telemetry.logs import logger

_MOST_AT_ONCE = 1024
_RETRY_S = 0.05


class NeighbourCopies:
    """See the module."""

    def __init__(self, address: str, workers: int) -> None:
        self._copies = {number: _memory(number) for number in range(workers)}
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._closing = False
        self._key = secrets.token_hex(16)
        self._socket = listen(address)
        self._port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="neighbour-copies", daemon=True).start()

    @property
    def here(self) -> str:
        """Port and key, for other nodes."""
        return f"{self._port} {self._key}"

    @property
    def files(self) -> list[int]:
        """The memory files of the copies."""
        with self._lock:
            return [each for slots in self._copies.values() for each in slots]

    def stop(self) -> None:
        """Stop serving."""
        self._closing = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop serving, and free the memory."""
        self.stop()
        with self._lock:
            copies, self._copies = self._copies, {}
        for each in copies.values():
            for descriptor in each:
                os.close(descriptor)

    def _accept(self) -> None:
        with self._socket:
            while not self._closing:
                try:
                    client, _ = self._socket.accept()
                except OSError:
                    if not self._closing:
                        pause(_RETRY_S)  # for example out of descriptors
                    continue
                if not self._places.acquire(blocking=False):
                    client.close()
                    continue
                try:
                    threading.Thread(target=self._serve, args=(client,), name="neighbour", daemon=True).start()
                except RuntimeError as error:  # the limit of processes is reached
                    logger().warning("neighbour_copies.refused", reason=str(error))
                    client.close()
                    self._places.release()

    def _serve(self, client: socket.socket) -> None:
        try:
            with framed(client) as link:
                if not admitted(link, self._key):
                    logger().warning("neighbour_copies.refused", reason="a client does not know the key")
                    return
                while not self._closing and link.poll(IDLE_S):
                    request = json.loads(link.recv_bytes(LONGEST_REQUEST))
                    if "read" in request:
                        self._send(link, request)
                    else:
                        self._keep(link, request)
        except EOFError:
            pass  # it has what it wanted
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger().debug("neighbour_copies.hung_up", reason=str(error) or type(error).__name__)
        finally:
            self._places.release()

    def _send(self, link: Any, request: dict[str, Any]) -> None:
        descriptor = int(str(request["read"]).rpartition("/")[2])
        begin, end = int(request["begin"]), int(request["begin"]) + int(request["size"])
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{MEMORY_NAME}"):
            raise ValueError(f"{request['read']} is not a memory file of a snapshot")
        while begin < end and not self._closing:
            piece = os.pread(descriptor, min(PIECE, end - begin), begin)
            link.send_bytes(piece)
            if not piece:
                return
            begin += len(piece)

    def _keep(self, link: Any, request: dict[str, Any]) -> None:
        number, size = int(request["put"]), int(request["size"])
        if not (0 <= number < MOST_WORKERS and size > DATA):
            raise ValueError(f"a copy of worker {number} with {size} bytes")
        descriptor = self._oldest(number, tuple(request["keep"] or ()))
        refused = _make_room(descriptor, size)
        link.send_bytes(refused.encode())
        if refused:
            return
        break_seal(descriptor)
        begin = DATA
        while begin < size:
            begin += os.pwrite(descriptor, link.recv_bytes(PIECE), begin)
        reseal(descriptor, link.recv_bytes(LONGEST_REQUEST), size)
        link.send_bytes(b"")

    def _oldest(self, number: int, keep: tuple[Any, ...]) -> int:
        """The memory file of worker ``number`` to overwrite: that with the older copy, but not the one to ``keep``."""
        with self._lock:
            if self._closing:
                raise ValueError("this agent leaves")
            if number not in self._copies:
                self._copies[number] = _memory(number)
            return min(self._copies[number], key=lambda each: (_order(each) == keep, _order(each)))


def _memory(number: int) -> list[int]:
    return [os.memfd_create(f"{MEMORY_NAME}copy-{number}") for _ in range(SLOTS)]


def _order(descriptor: int) -> tuple[int, int]:
    try:
        found = read(descriptor)
    except CheckpointError:
        return -1, -1
    return found.order if found is not None else (-1, -1)


def _make_room(descriptor: int, size: int) -> str:
    """Let the file have ``size`` bytes; why not, if there is too little memory."""
    there, free = os.fstat(descriptor).st_size, available()
    if size <= there:
        return ""
    if free is not None and free < size - there + KEPT_FREE:
        return f"a copy needs {size / 1e6:,.0f} MB of memory on the next node, which has {free / 1e6:,.0f} MB left"
    os.ftruncate(descriptor, size)
    return ""
