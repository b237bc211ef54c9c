"""An HTTP server: takes requests, sends answers and streams, all within bounds.

*Runs in* a thread of its own (``http``), and one for each connection, of which there are at most 64.
*Owns* the listening socket and all connections.
*Fails by* ConfigError when it cannot listen; a connection that fails ends alone.
*Invariant*: no connection lasts without getting on: a request must be complete, and an answer taken, within seconds.
"""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import ConfigError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.web.answers import Answer, Request, Site, Stream, text

MOST_CONNECTIONS = 64
MOST_STREAMS = 24
REQUEST_LIMIT_S = 20.0
"""For a whole request, from the end of the one before, TLS included. No interval that Prometheus is usually given: a
connection that is closed just as it is used again is a failed scrape."""
ANSWER_LIMIT_S = 30.0
"""For an answer to be made and taken, and for each piece of a stream."""
LOOK_EVERY_S = 0.1
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Server(ThreadingHTTPServer):
    """Answers for ``site`` on ``host`` and ``port`` (0: any that is free), over TLS with a ``context``."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        site: Site,
        context: ssl.SSLContext | None = None,
        *,
        hint: str = "choose another --listen",
    ) -> None:
        self.site, self._context = site, context
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._limits: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family = found[0][0]
            super().__init__((str(found[0][4][0]), port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}", hint=hint) from error

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    def start(self) -> None:
        """Answer from now on."""
        self._thread = threading.Thread(target=self.serve_forever, args=(LOOK_EVERY_S,), name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more connections, and end those that there are."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
        self.server_close()

    @contextmanager
    def limited(self, connection: socket.socket, seconds: float) -> Iterator[None]:
        """``connection`` is cut off if this takes longer than ``seconds``."""
        with self._lock:
            self._limits[connection] = SYSTEM.monotonic() + seconds
        try:
            yield
        finally:
            with self._lock:
                self._limits.pop(connection, None)

    def server_bind(self) -> None:
        """Without asking the name service who we are, which http.server does and which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "elastic-trainer", self.port

    def service_actions(self) -> None:
        """Called by the serving thread between two connections: cut off those that take too long."""
        now = SYSTEM.monotonic()
        with self._lock:
            late = [connection for connection, limit in self._limits.items() if limit < now]
            for connection in late:
                self._limits.pop(connection)
                with suppress(OSError):
                    # Past TLS, whose state belongs to the thread that waits in it.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, or turn it away when there are too many."""
        if not self._room.acquire(blocking=False):
            self._turn_away(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's thread: TLS, then its requests."""
        if self._context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(REQUEST_LIMIT_S)
        with self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as secured:
            with self.limited(secured, REQUEST_LIMIT_S):
                secured.do_handshake()
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that ended, for whatever reason of its own, is nothing to report."""
        if not isinstance(sys.exception(), OSError):  # ssl.SSLError and TimeoutError are ones
            logger().exception("request.failed")

    def _turn_away(self, request: socket.socket) -> None:
        if self._context is None:
            request.setblocking(False)
            with suppress(OSError):
                request.send(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.shutdown_request(request)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "elastic-trainer"
    sys_version = ""
    timeout = REQUEST_LIMIT_S
    wbufsize = -1

    def handle_one_request(self) -> None:
        """Bounded as a whole: a client may otherwise send a byte at a time, each within the socket's limit."""
        with self.server.limited(self.connection, REQUEST_LIMIT_S):
            super().handle_one_request()

    def do_GET(self) -> None:
        """Any method: the site says which it takes."""
        with self.server.limited(self.connection, ANSWER_LIMIT_S):
            if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
                self.close_connection = True  # its body is not read, and must not be taken for the next request
            answer = self._answer()
            if isinstance(answer, Answer):
                self._send(answer)
                return
        self._stream(answer)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server finds wrong with a request."""
        self.close_connection = True
        self._send(text(code, message or HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _answer(self) -> Answer | Stream:
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            return self.server.site.answer(Request(self.command, self.path, headers))
        except Exception:  # noqa: BLE001 - thread edge: the client is told, and the next request is another
            logger().exception("request.failed", path=self.path)
            return text(500, "this request failed; the server's log says why")

    def _send(self, answer: Answer) -> None:
        content, headers = answer.body.plain, dict(answer.headers)
        if answer.body.zipped is not None:
            headers["Vary"] = "Accept-Encoding"
            if _takes_gzip(self._header("Accept-Encoding")):
                content, headers["Content-Encoding"] = answer.body.zipped, "gzip"
        if answer.status != HTTPStatus.NOT_MODIFIED:
            headers["Content-Length"] = str(len(content))
        self._send_head(answer.status, answer.kind, headers)
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def _send_head(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **headers, **SECURITY}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _header(self, name: str) -> str:
        headers = getattr(self, "headers", None)  # missing where the request line was wrong already
        return str(headers.get(name, "")) if headers is not None else ""

    def _stream(self, stream: Stream) -> None:
        if not self.server.streams.acquire(blocking=False):
            self._send(text(503, "too many streams are open", Retry_After="10"))
            return
        try:
            self.close_connection = True  # its end is the end of the stream
            with self._piece():
                self._send_head(200, "text/event-stream", {"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
            if self.command != "HEAD":
                for piece in stream.pieces():
                    self._send_piece(piece)
        finally:
            self.server.streams.release()

    def _send_piece(self, content: bytes) -> None:
        with self._piece():
            self.wfile.write(content)

    @contextmanager
    def _piece(self) -> Iterator[None]:
        """What is written within is sent, in a bounded time."""
        with self.server.limited(self.connection, ANSWER_LIMIT_S):
            yield
            self.wfile.flush()


def _takes_gzip(accepted: str) -> bool:
    """Whether the header ``Accept-Encoding`` names gzip, and not with a weight of 0."""
    for part in accepted.split(","):
        coding, _, weight = part.replace(" ", "").partition(";")
        if coding.lower() in ("gzip", "*"):
            return weight.lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer with this certificate; ConfigError if it cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use {certificate} with {key}: {error}", hint="check both files") from error
    return context
