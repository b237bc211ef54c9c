"""A TCP proxy in front of a server, to cut and to delay the traffic of one client."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self

from elastic_trainer.local.hosts import reachable


class Proxy:
    """Forwards connections to ``host:port`` until told otherwise. A context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server((reachable(), 0))
        self._open = threading.Event()
        self._open.set()
        self._replies = threading.Event()
        self._replies.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def endpoint(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def cut(self) -> None:
        """Break all connections, and new ones at once."""
        self._open.clear()
        with self._lock:
            for each in self._sockets:
                _shut(each)

    def mend(self) -> None:
        self._open.set()

    def hold_replies(self) -> None:
        """Requests still arrive, their answers do not."""
        self._replies.clear()

    def close(self) -> None:
        self.cut()
        self._replies.set()
        _shut(self._listener)
        self._listener.close()
        for thread in self._threads:
            thread.join(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with client:
            if not self._open.is_set():
                return
            try:
                server = socket.create_connection(self._target, 10.0)
            except OSError:
                return
            server.settimeout(None)
            with server, self._listed(client), self._listed(server):
                answers = threading.Thread(target=self._forward, args=(server, client, self._replies), daemon=True)
                answers.start()
                self._forward(client, server)
                answers.join(10.0)

    @contextlib.contextmanager
    def _listed(self, each: socket.socket) -> Iterator[None]:
        with self._lock:
            self._sockets.add(each)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(each)

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket, allowed: threading.Event | None = None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if allowed is not None:
                    allowed.wait()
                sink.sendall(data)
        _shut(source)
        _shut(sink)


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
