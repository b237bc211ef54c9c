"""Ports and name of a node: its liveness port, and ports reserved for rank 0's store.

*Owns* sockets; each is closed by its owner's ``close``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading

from elastic_trainer.agent.suspicion.liveness_server import Answering, LivenessServer
from elastic_trainer.ipc.listening import listen


def default_node_id() -> str:
    """A name that is unique among all processes: host name, process id, a few random digits."""
    host = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "-" for c in socket.gethostname())
    return f"{host.lstrip('-.')[:80] or 'node'}-{os.getpid()}-{secrets.token_hex(2)}"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class LivenessPort:
    """Listens while this process lives: a refused connection proves to a peer that the process is dead.

    A peer that sends a question gets ``answer(question)``.
    """

    def __init__(self, address: str, answer: Answering) -> None:
        self._socket = listen(address)
        self._closing = False
        self.port: int = self._socket.getsockname()[1]
        server = LivenessServer(self._socket, answer, lambda: self._closing)
        self._thread = threading.Thread(target=server.run, name="liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the thread closes the socket, which it may still be using."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class ReservedPort:
    """A free port that the kernel assigns to no other process while a worker of this node may need it.

    The socket stays bound without listening. Both sides set SO_REUSEADDR: then Linux lets a second socket bind and
    listen, but skips the port in its automatic choice.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(_family(address), socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()
