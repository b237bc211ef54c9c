"""An HTTP server: reads requests, sends answers and streams, all within bounds.

From the bottom up: requests and answers as values; who may read (a token, or on a loopback port an address, since web
pages reach it through names that resolve to 127.0.0.1); HTTP/1.1, bytes in and bytes out, which no input makes raise;
and the server. A connection without a request costs it a descriptor but no thread: one thread waits for the requests of
all connections, and starts a thread for each complete one. It answers a kubelet's probes itself, so that no other
client of this port can make a healthy process look dead.

*Runs in* its own thread (``http``), and one for each answer in progress, at most 64.
*Owns* the listening socket and all connections.
*Fails by* ConfigError when it cannot listen; a failing connection affects no other.
*Invariant*: a request must be complete, and an answer read, within seconds. When all slots are taken a new connection
replaces the oldest waiting one of the address with the most connections.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import hmac
import ipaddress
import re
import selectors
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlsplit

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import ConfigError
from elastic_trainer.telemetry.logs import logger

GZIP_LEVEL = 1
"""Compression level: saves three quarters of what the highest level saves, in a tenth of the time."""
LEAST_GZIP = 1024
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
NO_STORE = {"Cache-Control": "no-store"}
HEALTH, READINESS = PROBES = "/healthz", "/readyz"
"""The paths of a kubelet's probes; their answers wait for nothing."""


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes to send, and the same compressed if that is worth it."""

    plain: bytes
    zipped: bytes | None

    @classmethod
    def compressed(cls, plain: bytes) -> Body:
        worth = len(plain) >= LEAST_GZIP
        return cls(plain, gzip.compress(plain, GZIP_LEVEL, mtime=0) if worth else None)


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request on which answers depend. Header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path without the query, decoded once."""
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> str:
        return urlsplit(self.target).query


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    status: int
    kind: str
    body: Body
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stream:
    """Server-sent events about ``name`` while a client reads them; ``pieces()`` waits between them."""

    name: str
    pieces: Callable[[], Iterator[bytes]] = field(compare=False)


Site = Callable[[Request], Answer | Stream]
"""Answers the requests of a server."""


def text(status: int, words: str, **headers: str) -> Answer:
    """A short answer for people."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, TEXT, Body(f"{words}\n".encode(), None), NO_STORE | named)


def metrics(collector: Collector, accept: str) -> Answer:
    """The metrics of ``collector``, in the format that the header ``Accept`` requests."""
    try:
        encode, kind = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is none
        encode, kind = choose_encoder("")
    return Answer(200, kind, Body.compressed(encode(collector)), NO_STORE)


CHALLENGE = 'Basic realm="elastic-trainer monitor", charset="UTF-8"'


@dataclass(frozen=True, slots=True)
class Access:
    """``token`` None: no token is needed. ``loopback``: only this machine can reach the port."""

    token: str | None = field(default=None, repr=False)
    loopback: bool = True

    def allows(self, authorization: str | None) -> bool:
        if self.token is None:
            return True
        # A constant-time comparison of bytes.
        return hmac.compare_digest(credential(authorization or "").encode(), self.token.encode())

    def knows_host(self, host: str | None) -> bool:
        """Whether a request with this header ``Host`` is for this server."""
        if self.token is not None or not self.loopback or not host:
            return True
        return is_local(host)


def refusal(request: Request, access: Access, probes: Mapping[str, str]) -> Answer | None:
    """The answer to a request that is not for content; None: it may have some.

    ``probes``: by path why something is not well, or nothing; they need no token, since a kubelet has none.
    """
    if request.method not in ("GET", "HEAD"):
        return text(405, "this server is read-only", Allow="GET, HEAD")
    if (problem := probes.get(request.path)) is not None:
        return text(503, problem) if problem else text(200, "ok" if request.path == HEALTH else "ready")
    if not access.knows_host(request.headers.get("host")):
        return text(421, "use localhost or an address: without a token, other host names are refused")
    if not access.allows(request.headers.get("authorization")):
        return text(401, "a token is needed", WWW_Authenticate=CHALLENGE)
    return None


def credential(authorization: str) -> str:
    """The token that the header carries; empty if none."""
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def is_local(host: str) -> bool:
    """Whether ``host`` (with or without a port) is an address or localhost: no foreign name server can redirect it."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


HEAD_LIMIT = 16384
"""Maximum bytes of a request line and its headers."""
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; object-src 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_END = re.compile(rb"\r?\n\r?\n")
_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/([0-9])\.([0-9])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")


@dataclass(frozen=True, slots=True)
class CompleteRequest:
    """A complete request. ``size``: bytes of its head; ``lasts``: another request may follow on its connection."""

    request: Request
    size: int
    lasts: bool


def parse_request(received: bytes) -> CompleteRequest | Answer | None:
    """The first request of ``received``; an error as an answer; None while it is incomplete."""
    end = _END.search(received)
    if end is None:
        return text(431, "the headers of this request are too long") if len(received) > HEAD_LIMIT else None
    first, *rest = received[: end.start()].decode("latin-1").replace("\r\n", "\n").split("\n")
    line, headers = _LINE.fullmatch(first), _headers(rest)
    if line is None or headers is None or not _is_target(line[2]):
        return text(400, "this is not an HTTP request")
    if line[3] != "1":
        return text(505, "this server supports only HTTP/1.1")
    # A body is not read, and must not be parsed as the next request.
    body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    closes = "close" in headers.get("connection", "").lower() or line[4] == "0"
    return CompleteRequest(Request(line[1], line[2], headers), end.end(), lasts=not (body or closes))


def _headers(lines: list[str]) -> dict[str, str] | None:
    """The headers by lower-case name; None if one of ``lines`` is no header."""
    found: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            return None
        name, value = header[1].lower(), header[2].strip()
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _is_target(target: str) -> bool:
    """Whether ``target`` can be split into its parts, as the answering code does."""
    try:
        return target.startswith(("/", "http://", "https://")) and bool(urlsplit(target).path or target)
    except ValueError:  # http://[
        return False


def rendered(answer: Answer, request: Request | None, *, lasts: bool) -> bytes:
    """The bytes of ``answer`` to ``request`` (None: it was invalid), without content for a HEAD request."""
    content, headers = answer.body.plain, dict(answer.headers)
    if answer.body.zipped is not None:
        headers["Vary"] = "Accept-Encoding"
        if request is not None and takes_gzip(request.headers.get("accept-encoding", "")):
            content, headers["Content-Encoding"] = answer.body.zipped, "gzip"
    if answer.status != HTTPStatus.NOT_MODIFIED:
        headers["Content-Length"] = str(len(content))
    whole = request is None or request.method != "HEAD"
    return head(answer.status, {"Content-Type": answer.kind, **headers}, lasts=lasts) + (content if whole else b"")


def head(status: int, headers: Mapping[str, str], *, lasts: bool) -> bytes:
    """Status line and headers of an answer."""
    own = {"Server": "elastic-trainer", "Date": formatdate(usegmt=True)}
    named = {**own, **headers, **SECURITY} | ({} if lasts else {"Connection": "close"})
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def takes_gzip(accepted: str) -> bool:
    """Whether the header ``Accept-Encoding`` accepts gzip with a weight above 0."""
    for part in accepted.split(","):
        coding, _, weight = part.replace(" ", "").partition(";")
        if coding.lower() in ("gzip", "*"):
            return weight.lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


MOST_CONNECTIONS = 256
MOST_ANSWERS = 64
MOST_ANSWERS_TO_ONE = 48
"""Maximum for one address: a proxy may serve many readers, but must not take all slots."""
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
        self.connected, self.address, self.handshake = connected, address, context
        """With what to begin TLS; None once that is done."""
        self.received = b""
        self.answered = False
        """Whether a thread is answering it."""
        self.wait()

    def wait(self) -> None:
        self.answered, self.limit = False, SYSTEM.monotonic() + REQUEST_LIMIT_S

    def read(self) -> bool:
        """Read the available bytes; False at end of file. BlockingIOError or ssl.SSLWantReadError if there are none."""
        if self.handshake is not None:
            if not isinstance(self.connected, ssl.SSLSocket):
                # Of a reset connection wrap_socket would leave the descriptor open.
                self.connected.recv(1, socket.MSG_PEEK)
                wrap, plain = self.handshake.wrap_socket, self.connected
                self.connected = wrap(plain, server_side=True, do_handshake_on_connect=False)
            self.connected.do_handshake()
            self.handshake = None
        piece = self.connected.recv(_PIECE)
        self.received += piece
        return bool(piece)

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
    """Serves what ``site`` answers on ``host`` and ``port`` (0: a free one), with TLS if ``context`` is given."""

    def __init__(
        self,
        host: str,
        port: int,
        site: Site,
        context: ssl.SSLContext | None = None,
        *,
        hint: str = "choose another --listen",
    ) -> None:
        self._host, self._site, self._context = host, site, context
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

    def close(self) -> None:
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

    def url(self, address: str = "") -> str:
        """Where it answers; ``address`` is this machine's, for a server that listens on all addresses."""
        host = address if address and self._host in ("0.0.0.0", "::", "") else self._host
        scheme = "http" if self._context is None else "https"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

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
        except Exception:  # noqa: BLE001 - a connection's edge: the others must not wait for what this one has sent
            logger().exception("request.failed")
            if client in self._clients:
                self._end(client)

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
            return self._site(request)
        except Exception:  # noqa: BLE001 - edge: the client is answered, and the next request is another
            logger().exception("request.failed", path=request.path)
            return text(500, "this request failed; the server's log says why")

    def _stream(self, client: _Client, stream: Stream, request: Request) -> None:
        if not self._streams.acquire(blocking=False):
            busy = text(503, "too many streams are open", Retry_After="10")
            client.send(rendered(busy, request, lasts=False))
            return
        try:
            headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no", **NO_STORE}
            client.send(head(200, headers, lasts=False))
            for piece in stream.pieces() if request.method != "HEAD" else ():
                client.send(piece)
        finally:
            self._streams.release()


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
