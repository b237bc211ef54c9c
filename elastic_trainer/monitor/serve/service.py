"""The monitor: one thread that reads the store, and a server that answers from the newest reading.

*Runs in* the process of ``elastic-trainer monitor``.
*Owns* the polling thread (``monitor``) and the server; the store is its caller's.
*Fails by* ConfigError when it cannot listen. It survives an unreachable store.
*Invariant*: it keeps state only in memory, so several may run and any may be restarted.
"""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass, field
from typing import Self

from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.monitor.read.reading import FORGET_S, Pacing, Reader
from elastic_trainer.monitor.serve.answers import MonitorSite
from elastic_trainer.monitor.serve.board import Board
from elastic_trainer.store.api import Store
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.web.access import Access
from elastic_trainer.web.server import Server

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9470


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """The address to listen on, and the access control."""

    prefix: str
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    access: Access = field(default_factory=Access)
    context: ssl.SSLContext | None = None
    forget_s: float = FORGET_S


class Monitor:
    """See the module. A context manager that starts and stops it."""

    def __init__(self, store: Store, options: MonitorOptions) -> None:
        self._reader = Reader(store, options.prefix, forget_s=options.forget_s)
        self.board = Board()
        site = MonitorSite(self.board, options.access, forget_s=options.forget_s)
        self._server = Server(options.host, options.port, site, options.context)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="monitor", daemon=True)
        scheme = "https" if options.context is not None else "http"
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"{scheme}://{host}:{self._server.port}"

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    def __enter__(self) -> Self:
        self._thread.start()
        self._server.start()
        logger().info("monitor.started", url=self.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.board.close()
        self._server.stop()
        self._thread.join(timeout=2.0)  # a poll may be waiting for the store; the thread is a daemon
        logger().info("monitor.stopped")

    def _poll(self) -> None:
        pacing = Pacing()
        while not self._stopped.is_set():
            began = SYSTEM.monotonic()
            connected = False
            try:
                reading = self._reader.poll()
                connected = reading.store.connected
                self.board.publish(reading)
            except Exception:  # noqa: BLE001 - thread edge: an unexpected document must not stop the monitor
                logger().exception("poll.failed")
            pause(pacing.pause_s(SYSTEM.monotonic() - began, connected), self._stopped)
