"""An HTTP server: reads requests, sends answers and streams, all within bounds.

A connection without a request costs a descriptor but no thread: one thread waits for the requests of all connections,
and starts a thread for each complete one. It answers a kubelet's probes itself, so that no other client of this port
can make a healthy process look dead.

*Runs in* its own thread (``http``), and one for each answer in progress, at most 64.
*Owns* the listening socket and all connections.
*Fails by* ConfigError when it cannot listen; a failing connection affects no other.
*Invariant*: a request must be complete, and an answer read, within seconds. When all places are taken a new connection
replaces the oldest waiting one of the address with the most connections.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import ConfigError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.web.answers import PROBES, Answer, Request, Site, Stream, text
from elastic_trainer.web.exchange import CompleteRequest, head, parse_request, rendered

MOST_CONNECTIONS = 256
MOST_ANSWERS = 64
MOST_ANSWERS_TO_ONE = 48
"""Maximum for one address: a proxy may serve many readers, but must not take all places."""
MOST_STREAMS = 24
REQUEST_LIMIT_S = 20.0
"""Time limit of a request, from the end of the previous one, including TLS. Not a usual scrape interval of Prometheus:
a connection that closes just as it is reused would be a failed scrape."""
ANSWER_LIMIT_S = 30.0
"""Time limit for a client to read an answer, or one piece of a stream."""
LOOK_EVERY_S = 0.1
CROWDED_PAUSE_S = 0.002
"""The pause after a connection has replaced another, which slows down clients that reconnect at once."""
_WAITING = 1024
_PIECE = 65536


class _Client:
    """A connection, and the received part of its next request."""

    __slots__ = ("address", "answered", "connected", "handshake", "limit", "received")

    def __init__(self, connected: socket.socket, address: str, context: ssl.SSLContext | None) -> None:
        self.connected, self.address = connected, address
        self.handshake = context
        """With what to begin TLS; None once that is done."""
        self.received = b""
        self.answered = False
        """Whether a thread is answering it."""
        self.wait()

    def wait(self) -> None:
        """Start to wait for a request."""
        self.answered, self.limit = False, SYSTEM.monotonic() + REQUEST_LIMIT_S

    def read(self) -> bool:
        """Read the available bytes; False at end of file. BlockingIOError or ssl.SSLWantReadError if there are none."""
        if self.handshake is not None:
            self._shake_hands(self.handshake)
            self.handshake = None
        piece = self.connected.recv(_PIECE)
        self.received += piece
        return bool(piece)

    def _shake_hands(self, context: ssl.SSLContext) -> None:
        if not isinstance(self.connected, ssl.SSLSocket):
            self.connected.recv(1, socket.MSG_PEEK)  # of a reset connection wrap_socket would leave the descriptor open
            self.connected = context.wrap_socket(self.connected, server_side=True, do_handshake_on_connect=False)
        self.connected.do_handshake()

    def send(self, content: bytes) -> None:
        """Send all of it within seconds; TimeoutError if the client does not read it."""
        deadline, rest = Deadline.after(ANSWER_LIMIT_S), memoryview(content)
        while rest:
            if deadline.expired:
                raise TimeoutError
            self.connected.settimeout(deadline.remaining_s())
            rest = rest[self.connected.send(rest[:_PIECE]) :]

    def close(self) -> None:
        """Read the remaining input, without which the kernel could discard the answer; then close."""
        with suppress(OSError):
            self.connected.setblocking(False)
            socket.socket.shutdown(self.connected, socket.SHUT_WR)
            socket.socket.recv(self.connected, _PIECE)
        self.connected.close()


class Server:
    """Serves ``site`` on ``host`` and ``port`` (0: a free one), with TLS if ``context`` is given."""

    def __init__(
        self,
        host: str,
        port: int,
        site: Site,
        context: ssl.SSLContext | None = None,
        *,
        hint: str = "choose another --listen",
    ) -> None:
        self._site, self._context = site, context
        self._streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._clients: dict[_Client, None] = {}
        """The waiting connections, the longest waiting first."""
        self._returned: deque[tuple[_Client, bool]] = deque()
        """Answered connections, and whether another request may follow on each."""
        self._crowded_until = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._listener = _listening(host, port)
        except (OSError, OverflowError) as error:
            reason = str(error).partition(" (while")[0]  # socket.create_server repeats the address
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}", hint=hint) from error
        self.port = int(self._listener.getsockname()[1])
        self._alarm, self._alarmed = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._listener, self._alarmed, self._alarm):
            each.setblocking(False)
        for each in (self._listener, self._alarmed):
            self._selector.register(each, selectors.EVENT_READ)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Accept no more connections, and close all."""
        self._stopping.set()
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        for client in list(self._clients):
            with suppress(OSError):
                # Bypasses TLS, whose state belongs to the answering thread.
                socket.socket.shutdown(client.connected, socket.SHUT_RDWR)
            if not client.answered:
                client.connected.close()
        self._close_unreturned()
        for each in (self._listener, self._alarm, self._alarmed):
            each.close()

    def descriptors(self) -> list[int]:
        own = [self._listener, self._alarm, self._alarmed, *(client.connected for client in self._clients)]
        return [each.fileno() for each in own]

    # ---- the waiting thread

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look()
            except Exception:  # noqa: BLE001 - thread edge: later clients must still be answered
                logger().exception("server.failed")
                self._stopping.wait(LOOK_EVERY_S)

    def _look(self) -> None:
        for key, _ in self._selector.select(LOOK_EVERY_S if not self._crowded_until else CROWDED_PAUSE_S):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._alarmed:
                self._alarmed.recv(_PIECE)
            elif key.data in self._clients and not key.data.answered:
                self._receive(key.data)
        while self._returned:
            self._take_back(*self._returned.popleft())
        now = SYSTEM.monotonic()
        for client in [each for each in self._clients if each.limit < now and not each.answered]:
            self._end(client)
        if self._crowded_until and self._crowded_until <= now:
            self._crowded_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            connected, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # the client has closed already, or no descriptor is left
            self._pause()
            return
        connected.setblocking(False)
        client = _Client(connected, str(address[0]), self._context)
        if len(self._clients) >= MOST_CONNECTIONS:
            self._pause()
            if not self._make_room():
                client.close()
                return
        self._clients[client] = None
        self._selector.register(client.connected, selectors.EVENT_READ, client)
        self._receive(client)

    def _pause(self) -> None:
        """Accept no connection for a moment."""
        if not self._crowded_until:
            self._selector.unregister(self._listener)
        self._crowded_until = SYSTEM.monotonic() + CROWDED_PAUSE_S

    def _make_room(self) -> bool:
        """Close the oldest waiting connection of the address with the most; False if all are being answered."""
        held = Counter(client.address for client in self._clients)
        waiting = [client for client in self._clients if not client.answered]
        if not waiting:
            return False
        self._end(max(waiting, key=lambda client: held[client.address]))  # the first of those, which is the oldest
        return True

    def _receive(self, client: _Client) -> None:
        try:
            if not client.read():
                self._end(client)
                return
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return  # a handshake's answers are short and fit into the send buffer
        except (OSError, ValueError):
            self._end(client)
            return
        self._answer(client)

    def _answer(self, client: _Client) -> None:
        """Answer each complete request, until one needs a thread."""
        try:
            self._answer_complete(client)
        except Exception:  # noqa: BLE001 - a connection's edge: the others must not wait for what this one has sent
            logger().exception("request.failed")
            if client in self._clients:
                self._end(client)

    def _answer_complete(self, client: _Client) -> None:
        while client in self._clients and not client.answered:
            found = parse_request(client.received)
            if found is None:
                return
            if isinstance(found, Answer):
                self._reply(client, found, None, lasts=False)
                return
            client.received = client.received[found.size :]
            if found.request.path in PROBES:
                self._reply(client, self._made(found.request), found.request, lasts=found.lasts)
            else:
                self._begin(client, found)

    def _begin(self, client: _Client, found: CompleteRequest) -> None:
        """Answer the request in a new thread, unless too many are in progress."""
        answered = Counter(each.address for each in self._clients if each.answered)
        if answered.total() >= MOST_ANSWERS or answered[client.address] >= MOST_ANSWERS_TO_ONE:
            self._reply(client, text(503, "too many requests are being answered", Retry_After="1"), None, lasts=False)
            return
        self._selector.unregister(client.connected)
        client.answered = True
        try:
            threading.Thread(
                target=self._answer_in_thread, args=(client, found), name="http-answer", daemon=True
            ).start()
        except RuntimeError:  # no thread can be started
            self._end(client)

    def _reply(self, client: _Client, answer: Answer | Stream, request: Request | None, *, lasts: bool) -> None:
        """Send a short answer at once, or end the connection if its buffer is full."""
        content = rendered(answer, request, lasts=lasts) if isinstance(answer, Answer) else b""
        try:
            taken = client.connected.send(content) == len(content)
        except (OSError, ValueError):
            taken = False
        if not taken or not lasts:
            self._end(client)
        else:
            self._renew(client)

    def _take_back(self, client: _Client, lasts: bool) -> None:
        if not lasts:
            self._end(client)
            return
        client.connected.setblocking(False)
        self._selector.register(client.connected, selectors.EVENT_READ, client)
        self._renew(client)
        self._answer(client)

    def _renew(self, client: _Client) -> None:
        """Put it at the end of the waiting connections."""
        client.wait()
        del self._clients[client]
        self._clients[client] = None

    def _end(self, client: _Client) -> None:
        del self._clients[client]
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.connected)
        client.close()

    def _close_unreturned(self) -> None:
        """Close answered connections that were not handed back."""
        with suppress(IndexError):
            while True:
                self._returned.popleft()[0].connected.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._alarm.send(b"\0")

    # ---- the answering threads

    def _answer_in_thread(self, client: _Client, found: CompleteRequest) -> None:
        lasts = False
        try:
            answer = self._made(found.request)
            if isinstance(answer, Answer):
                client.send(rendered(answer, found.request, lasts=found.lasts))
                lasts = found.lasts
            else:
                self._stream(client, answer, found.request)
        except OSError:  # the client has closed or does not read; includes ssl.SSLError and TimeoutError
            pass
        except Exception:  # noqa: BLE001 - thread edge: the connection ends, and the next request is another
            logger().exception("request.failed", path=found.request.path)
        finally:
            self._returned.append((client, lasts))
            if self._stopping.is_set():
                self._close_unreturned()
            else:
                self._wake()

    def _made(self, request: Request) -> Answer | Stream:
        try:
            return self._site.answer(request)
        except Exception:  # noqa: BLE001 - edge: the client is answered, and the next request is another
            logger().exception("request.failed", path=request.path)
            return text(500, "this request failed; the server's log says why")

    def _stream(self, client: _Client, stream: Stream, request: Request) -> None:
        if not self._streams.acquire(blocking=False):
            busy = text(503, "too many streams are open", Retry_After="10")
            client.send(rendered(busy, request, lasts=False))
            return
        try:
            client.send(head(200, {"Content-Type": "text/event-stream", **_STREAM}, lasts=False))
            for piece in _pieces(stream, request):
                client.send(piece)
        finally:
            self._streams.release()


_STREAM = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def _pieces(stream: Stream, request: Request) -> Iterator[bytes]:
    return stream.pieces() if request.method != "HEAD" else iter(())


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; an IPv6 socket also accepts IPv4 if the system supports it."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=_WAITING, dualstack_ipv6=dual)


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer with this certificate; ConfigError if it cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use {certificate} with {key}: {error}", hint="check both files") from error
    return context
