"""Slow clients of an HTTP server, more than it likes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Crowd:
    """Connections that send a byte now and then, and come back when they are cut off."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        self.returned = 0
        self._address = address
        self._ended = threading.Event()
        self._held = [self._connect() for _ in range(count)]
        self._thread = threading.Thread(target=self._press, name="crowd")
        self._thread.start()

    def _connect(self) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(self._address)
        return connection

    def _press(self) -> None:
        while not self._ended.wait(0.05):
            for place, connection in enumerate(self._held):
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    try:
                        connection.send(b"G" if self.returned % 2 else b"\x16")
                        gone = connection.recv(100) == b""
                    except ConnectionResetError:
                        gone = True
                    if gone:
                        connection.close()
                        self._held[place] = self._connect()
                        self.returned += 1

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        for connection in self._held:
            connection.close()


@contextlib.contextmanager
def crowding(port: int, count: int, host: str = "127.0.0.1") -> Iterator[Crowd]:
    """``count`` slow connections to ``port`` of ``host``."""
    crowd = Crowd((host, port), count)
    try:
        yield crowd
    finally:
        crowd.end()
