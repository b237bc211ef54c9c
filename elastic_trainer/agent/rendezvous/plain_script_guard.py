"""Detects a script that would train alone: in place, every node starts its workers as rank 0 of a world of one.

A script without a Session would not notice. Therefore this guard listens at its MASTER_PORT: a worker that connects
there has called ``init_process_group`` by itself. Other processes of this machine may connect too, which proves
nothing: the kernel says which process owns each connection.

*Runs in* the agent: a thread named ``plain-script-guard``. *Owns* a listening socket. *Fails by* calling ``caught``
once.
*Invariant*: however many processes connect, it asks the kernel a few times a second at most.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable

from elastic_trainer.agent.workers.local_sockets import sockets_of, sockets_to
from elastic_trainer.telemetry.logs import logger

PAUSE_S = 0.1
"""Pause after each check of the open connections."""
_WAITING = 128


class PlainScriptGuard:
    """Listens on 127.0.0.1 until closed. ``suspects()`` returns the processes that may not connect."""

    def __init__(self, caught: Callable[[], None], suspects: Callable[[], Iterable[int]]) -> None:
        self._caught, self._suspects = caught, suspects
        self._closing = threading.Event()
        self._warned = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(_WAITING)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._watch, name="plain-script-guard", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closing.wait(PAUSE_S):  # otherwise this process is out of descriptors for now
                    return
                continue
            with connection:  # a worker that waits for an answer stays connected, and can be found
                guilty = self._find_suspect()
            if guilty:
                self._caught()
                return
            self._closing.wait(PAUSE_S)

    def _find_suspect(self) -> bool:
        """Whether a suspect is connected, or is waiting to be accepted."""
        strangers = sockets_to("127.0.0.1", self.port)
        for pid in self._suspects():
            if strangers & sockets_of(pid):
                return True
        if not self._warned:
            self._warned = True
            logger().warning("connection.refused", port=self.port, reason="it is not of a worker without a Session")
        return False

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
