"""Catches a script that would train alone: in place, every node starts its workers as rank 0 of a world of one.

A script without a Session would not notice. Its MASTER_PORT is therefore one that this package listens on: whoever
connects there has called ``init_process_group`` by itself.

*Runs in* the agent: a thread named ``trap``. *Owns* a listening socket. *Fails by* calling ``caught`` once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Trap:
    """Listens on 127.0.0.1 until closed."""

    def __init__(self, caught: Callable[[], None]) -> None:
        self._caught = caught
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(8)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._watch, name="trap", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        connection.close()
        self._caught()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
