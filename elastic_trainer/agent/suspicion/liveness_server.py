"""The server of the liveness port: one line in, one line out.

The kernel of a frozen agent still accepts connections, but no answer comes: therefore peers send a question. A peer
that only connects and closes has learned that the agent's process exists.

*Runs in* a thread of the agent that does nothing else and never blocks on a lock, the store or a slow peer.
*Owns* the listening socket, and a bounded number of accepted connections: it closes the oldest first.
*Fails by* nothing: a peer that sends no question gets no answer.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from typing import Final

from elastic_trainer.clock import pause
from elastic_trainer.telemetry.logs import logger

LONGEST_QUESTION: Final = 512
MOST_AT_ONCE: Final = 64
LOOKS_UP_S: Final = 1.0
"""How late it notices that it is closing, on systems where shutting down the socket does not wake it."""
_RETRY_S: Final = 0.05

Answering = Callable[[bytes], bytes | None]


class LivenessServer:
    """See the module. ``answer(question)`` returns the line to send, or None."""

    def __init__(self, listening: socket.socket, answer: Answering, closing: Callable[[], bool]) -> None:
        self._listening, self._answer, self._closing = listening, answer, closing
        self._said: dict[socket.socket, bytes] = {}
        """The bytes received from each client, oldest client first."""

    def run(self) -> None:
        with self._listening, selectors.DefaultSelector() as self._selector:
            self._listening.setblocking(False)
            self._selector.register(self._listening, selectors.EVENT_READ)
            while not self._closing():
                try:
                    self._turn()
                except Exception:  # noqa: BLE001 - the edge of a thread: without answers this node would look frozen
                    logger().exception("liveness_server.failed")
                    pause(_RETRY_S)
            for client in list(self._said):
                self._close_client(client)

    def _turn(self) -> None:
        for key, _ in self._selector.select(LOOKS_UP_S):
            if key.fileobj is self._listening:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._said:
                self._listen(key.fileobj)

    def _accept(self) -> None:
        if len(self._said) >= MOST_AT_ONCE:
            self._close_client(next(iter(self._said)))
        try:
            client, _ = self._listening.accept()
        except BlockingIOError:
            return  # the client has closed already
        except OSError:
            if not self._closing():
                pause(_RETRY_S)  # for example out of descriptors
            return
        client.setblocking(False)
        self._said[client] = b""
        self._selector.register(client, selectors.EVENT_READ)

    def _listen(self, client: socket.socket) -> None:
        try:
            received = client.recv(LONGEST_QUESTION)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        question, end, _ = (self._said[client] + received).partition(b"\n")
        if received and not end and len(question) <= LONGEST_QUESTION:
            self._said[client] = question
            return
        if end and (line := self._answer(question)) is not None:
            with contextlib.suppress(OSError):
                client.send(line)  # cannot block: the send buffer is empty
        self._close_client(client)

    def _close_client(self, client: socket.socket) -> None:
        del self._said[client]
        self._selector.unregister(client)
        client.close()
