"""A server of the status page that a test controls: what it answers, what it streams, and when it breaks off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from elastic_trainer.monitor import page
from elastic_trainer.web.server import SECURITY
from tests.support.snapshots import Json

CSP = SECURITY["Content-Security-Policy"]


class StatusServer:
    """Serves snapshots on a port of its own until it is closed."""

    def __init__(self) -> None:
        self.runs: dict[str, Json] = {}
        self.list: Json = {"runs": []}
        self.down = False
        """Whether it cuts every connection without an answer."""
        self.streams = True
        """Whether streams are answered; without, the page has to ask."""
        self.garbled = False
        """Whether updates are of a kind that no page understands."""
        self._turned = threading.Condition()
        self._turn = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the list is."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def show(self, snapshot: Json) -> str:
        """Let ``snapshot`` be the newest of its run, told to all streams; the address of its page."""
        with self._turned:
            self.runs[snapshot["run"]] = snapshot
            self._turn += 1
            self._turned.notify_all()
        return f"{self.url}/runs/{snapshot['run']}"

    def fall_silent(self) -> None:
        """Cut all streams, and every connection from now on."""
        with self._turned:
            self.down = True
            self._turned.notify_all()

    def come_back(self) -> None:
        """Answer again."""
        self.down = False

    def close(self) -> None:
        """Stop; streams end."""
        self.fall_silent()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def content(self, path: str, query: str) -> tuple[bytes, str] | None:
        """What is at ``path``."""
        choice = page.Choice.of(query)
        match path.split("/")[1:]:
            case [""]:
                return page.runs_page(self.list).encode(), "text/html; charset=utf-8"
            case ["runs", run] if run in self.runs:
                return page.run_page(self.runs[run], choice).encode(), "text/html; charset=utf-8"
            case ["static", name]:
                return page.static(name)
            case ["update"]:
                return page.message(page.runs_update(self.list)), "application/json"
            case ["runs", run, "update"] if run in self.runs:
                return self._message(page.run_update(self.runs[run], choice), page.NOTHING), "application/json"
        return None

    def _message(self, now: page.Update, before: page.Update) -> bytes:
        return b'{"view": 7}' if self.garbled else page.message(now, before)

    def follow(self, run: str, query: str, send: Callable[[bytes], bool]) -> None:
        """Send what each new snapshot changes until the server falls silent, or nobody listens."""
        seen, before = -1, page.NOTHING
        while True:
            with self._turned:
                if self._turn == seen and not self.down:
                    self._turned.wait(timeout=5)
                if self.down:
                    return
                news, seen = self._turn != seen, self._turn
            now = page.run_update(self.runs[run], page.Choice.of(query))
            if not send(b"data: " + self._message(now, before) + b"\n\n" if news else b":\n\n"):
                return
            before = now

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = urlsplit(self.path)
                path = unquote(asked.path)
                if site.down:
                    self.close_connection = True
                    return
                if path.endswith("/stream") and site.streams:
                    self._head(200, "text/event-stream")
                    site.follow(path.split("/")[2], asked.query, self._send)
                    return
                found = site.content(path, asked.query)
                self._head(200 if found else 404, found[1] if found else "text/plain", found[0] if found else b"")

            def _head(self, status: int, kind: str, body: bytes | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Security-Policy", CSP)
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Cache-Control", "no-store")
                if body is not None:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if body:
                    self._send(body)

            def _send(self, data: bytes) -> bool:
                """Whether somebody takes it: a browser that goes away is not an error."""
                try:
                    self.wfile.write(data)
                    self.wfile.flush()
                except OSError:
                    self.close_connection = True
                    return False
                return True

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: requests are no news in a test."""

        return Handler
