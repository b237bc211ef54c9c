"""Takes the messages that Alertmanager sends, in the place of people.

*Runs in* a test. *Owns* one HTTP server on a free port of the loopback, and its thread. *Fails by* nothing.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One alert of one message."""

    receiver: str
    status: str
    """``firing`` or ``resolved``."""
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def name(self) -> str:
        """The alert's."""
        return self.labels.get("alertname", "")


class Mailbox:
    """See the module."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._lock = threading.Lock()
        mailbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                mailbox.take(self.path.strip("/"), json.loads(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="mailbox", daemon=True)
        self._thread.start()

    def take(self, receiver: str, content: dict[str, Any]) -> None:
        """One message, as Alertmanager's webhooks have it."""
        with self._lock:
            self._messages += [
                Message(receiver, each["status"], each["labels"], each["annotations"]) for each in content["alerts"]
            ]

    @property
    def messages(self) -> list[Message]:
        """All so far."""
        with self._lock:
            return list(self._messages)

    def close(self) -> None:
        """Take no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
