"""Catches a script that would train alone: in place, every node starts its workers as rank 0 of a world of one.

A script without a Session would not notice. Its MASTER_PORT is therefore one that this package listens on: a worker
that connects there has called ``init_process_group`` by itself. Anybody else on this machine may connect, too, and
proves nothing by it: the kernel says whose sockets the connections are.

*Runs in* the agent: a thread named ``trap``. *Owns* a listening socket. *Fails by* calling ``caught`` once.
*Invariant*: however many connect, the kernel is asked a few times a second at most.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable

from elastic_trainer.agent.workers.local_sockets import sockets_of, sockets_to
from elastic_trainer.telemetry.logs import logger

PAUSE_S = 0.1
"""After a look at those that had connected."""
_WAITING = 128


class PlainScriptGuard:
    """Listens on 127.0.0.1 until closed. ``suspects()`` are the processes that may not connect."""

    def __init__(self, caught: Callable[[], None], suspects: Callable[[], Iterable[int]]) -> None:
        self._caught, self._suspects = caught, suspects
        self._closing = threading.Event()
        self._warned = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(_WAITING)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._watch, name="trap", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closing.wait(PAUSE_S):  # else this process has no descriptor left, for now
                    return
                continue
            with connection:  # whoever waits for an answer stays connected, and can be found
                guilty = self._find_suspect()
            if guilty:
                self._caught()
                return
            self._closing.wait(PAUSE_S)

    def _find_suspect(self) -> bool:
        """Whether a suspect is among all that are connected, or wait to be."""
        strangers = sockets_to("127.0.0.1", self.port)
        for pid in self._suspects():
            if strangers & sockets_of(pid):
                return True
        if not self._warned:
            self._warned = True
            logger().warning("connection.refused", port=self.port, reason="no worker without a Session has made it")
        return False

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
