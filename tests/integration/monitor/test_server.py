"""The monitor's server over real connections: answers, streams, TLS, tokens, and clients that misbehave."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import ConfigError
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.monitor import serve as streams
from elastic_trainer.monitor.serve import Monitor
from elastic_trainer.store.api import Delete
from elastic_trainer.web import server as servers
from elastic_trainer.web.server import Access, tls_context
from tests.support.certificates import Authority
from tests.support.crowd import crowding
from tests.support.memory_store import MemoryBackend, MemoryStore
from tests.support.monitored import PREFIX, Writer, soon
from tests.support.waiting import eventually

LIMIT_S = 30.0


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def writer(backend: MemoryBackend) -> Writer:
    writer = Writer(MemoryStore(backend))
    writer.start()
    return writer


@pytest.fixture
def monitor(backend: MemoryBackend, writer: Writer) -> Iterator[Monitor]:
    with Monitor(MemoryStore(backend), PREFIX, port=0) as monitor:
        await_read(monitor)
        yield monitor


def await_read(monitor: Monitor) -> None:
    eventually(lambda: monitor.board.reading.runs, "nothing was read")


def await_answered(monitor: Monitor, but: int) -> None:
    """Wait until the server answers no connections ``but`` this number: a client has its answer somewhat earlier."""
    eventually(
        lambda: sum(client.answered for client in list(monitor._server._clients)) <= but, "answers are still under way"
    )


def get(monitor: Monitor, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=LIMIT_S)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def test_every_answer_carries_the_headers_that_keep_it_safe(monitor: Monitor) -> None:
    """Errors too: no foreign scripts, no guessing of types, no frames."""
    for path in ("/", "/api/runs", "/metrics", "/nothing", "/healthz"):
        response, _ = get(monitor, path)
        assert "default-src 'self'" in str(response.getheader("Content-Security-Policy")), path
        assert "frame-ancestors 'none'" in str(response.getheader("Content-Security-Policy")), path
        assert response.getheader("X-Content-Type-Options") == "nosniff"
        assert "Python" not in str(response.getheader("Server"))


def test_several_requests_share_a_connection(monitor: Monitor) -> None:
    """As Prometheus and browsers do it; a refused method with a body does not spoil what follows."""
    connection = http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=LIMIT_S)
    for path in ("/healthz", "/nothing", "/api/runs"):
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        assert response.getheader("Connection") is None
    connection.request("POST", "/api/runs", body=b"GET /metrics HTTP/1.1\r\n\r\n")
    response = connection.getresponse()
    assert (response.status, response.getheader("Connection")) == (405, "close")
    assert b"metrics" not in response.read()
    connection.close()


def test_a_client_that_never_completes_its_request_is_cut_off(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it sends something again and again, each time within the limit of the socket."""
    monkeypatch.setattr(servers, "REQUEST_LIMIT_S", 0.5)
    deadline = Deadline.after(LIMIT_S)
    with socket.create_connection(("127.0.0.1", monitor.port), timeout=0.1) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        while not deadline.expired:
            try:
                connection.sendall(b"X: y\r\n")
                if connection.recv(65536) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert not deadline.expired


def test_there_is_a_limit_to_connections(
    backend: MemoryBackend, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it the one that has waited longest gives up its place, unless it is being answered."""
    monkeypatch.setattr(servers, "MOST_CONNECTIONS", 3)
    with Monitor(MemoryStore(backend), PREFIX, port=0) as monitor:
        await_read(monitor)
        stream = Listener(monitor)
        stream.snapshot()
        held = [http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=LIMIT_S) for _ in range(2)]
        for connection in (*held, held[0]):
            connection.request("GET", "/api/runs")
            assert connection.getresponse().read()
            await_answered(monitor, but=1)
        assert get(monitor, "/healthz")[0].status == 200
        assert held[1].sock.recv(1) == b""
        held[0].request("GET", "/healthz")
        assert held[0].getresponse().read() == b"ok\n"
        writer.round(2, {"n0": 2}, RoundState.BROKEN)
        assert stream.snapshot()["state"] == "recovering"
        stream.close()
        for connection in held:
            connection.close()


def test_slow_connections_keep_nobody_from_asking(backend: MemoryBackend, writer: Writer, tmp_path: Path) -> None:
    """Seventy that never complete a request over TLS: probes and pages are answered beside them, from one address."""
    authority = Authority(tmp_path)
    server = tls_context(*authority.issue("localhost"))
    client = ssl.create_default_context(cafile=str(authority.certificate))
    with (
        Monitor(MemoryStore(backend), PREFIX, port=0, context=server) as monitor,
        crowding(monitor.port, 70),
    ):
        await_read(monitor)
        for path in ("/healthz", "/readyz", "/api/runs") * 5:
            assert asked(monitor, path, client) == 200


@pytest.mark.parametrize("kind", ["reset at once", "reset in the handshake", "reset after it", "silent", "slow"])
def test_connections_that_break_tls_keep_nobody_from_asking(
    backend: MemoryBackend, writer: Writer, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever they reset, the server goes on with the others at once, and nothing of them is left."""
    authority = Authority(tmp_path)
    context = tls_context(*authority.issue("localhost"))
    client = ssl.create_default_context(cafile=str(authority.certificate))
    with Monitor(MemoryStore(backend), PREFIX, port=0, context=context) as monitor:
        await_read(monitor)
        held = [broken(monitor.port, kind, client) for _ in range(50)]
        for path in ("/healthz", "/readyz", "/api/runs"):
            assert asked(monitor, path, client) == 200
        for connection in held:
            connection.close()
        eventually(lambda: not monitor._server._clients, "connections are left")
        assert asked(monitor, "/healthz", client) == 200
    said = capsys.readouterr()
    assert "failed" not in said.out + said.err


def broken(port: int, kind: str, context: ssl.SSLContext) -> socket.socket:
    """A connection that has just been reset, or that is in the middle of a handshake."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    hello, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(hello, outgoing, server_hostname="localhost").do_handshake()
    first = outgoing.read()
    if kind == "reset in the handshake":
        connection.sendall(first)
        assert connection.recv(1)  # the server has answered, and waits for the rest
    elif kind == "reset after it":
        connection = context.wrap_socket(connection, server_hostname="localhost")
    elif kind == "slow":
        for byte in first[:8]:
            connection.sendall(bytes([byte]))
    if kind.startswith("reset"):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    return connection


def test_probes_are_answered_when_nothing_else_is(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads are busy with clients that take nothing; another request is told to come again."""
    monkeypatch.setattr(servers, "MOST_ANSWERS", 1)
    with Monitor(MemoryStore(backend), PREFIX, port=0) as monitor:
        answering, release = threading.Event(), threading.Event()

        def listing() -> None:
            answering.set()
            release.wait(LIMIT_S)

        monkeypatch.setattr(monitor.board, "listing", listing)
        with socket.create_connection(("127.0.0.1", monitor.port), timeout=LIMIT_S) as connection:
            connection.sendall(b"GET /api/runs HTTP/1.1\r\n\r\n")
            assert answering.wait(LIMIT_S)
            assert asked(monitor, "/healthz") == 200
            response, _ = get(monitor, "/static/page.css")
            assert (response.status, response.getheader("Retry-After")) == (503, "1")
            release.set()
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_no_request_makes_the_server_fail(monitor: Monitor, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is sent: it is refused in a word, with no error in the server, which goes on to answer others."""
    chance = random.Random(0)
    for number in range(400):
        with socket.create_connection(("127.0.0.1", monitor.port), timeout=LIMIT_S) as connection:
            connection.sendall(malformed(chance, number))
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        assert not answer or re.match(rb"HTTP/1\.1 [2-4]\d\d |HTTP/1\.1 50[35] ", answer), answer
    assert asked(monitor, "/healthz") == 200
    said = capsys.readouterr()
    assert "failed" not in said.out + said.err


def malformed(chance: random.Random, number: int) -> bytes:
    """A request of which some part is wrong, by chance."""
    paths = ["http://[", "//[", "/%", "/%zz", "/\x00", "http://[::1", "/runs/" + "%c3" * 40, "/api/runs/..%2f", "*", ""]
    texts = ["[", "[::", "::]", "\x00", "é" * 9, ",;=,", "Basic ====", "Bearer", 'text/plain;q="', "gzip;q=;", "9" * 50]
    names = ["Host", "Accept", "Authorization", "Accept-Encoding", "If-None-Match", "Content-Length", "No name", ""]
    method, version = chance.choice(["GET", "HEAD", "G T", ""]), chance.choice(["1.1", "1.0", "x"])
    lines = [f"{method} {chance.choice(paths)} HTTP/{version}"]
    lines += [
        f"{chance.choice(names)}{chance.choice([': ', ':', ' '])}{chance.choice(texts)}" for _ in range(number % 4)
    ]
    sent = bytearray("\r\n".join([*lines, "", ""]).encode())
    for _ in range(number % 3):
        sent[chance.randrange(len(sent))] = chance.randrange(256)
    return bytes(sent)


def asked(monitor: Monitor, path: str, context: ssl.SSLContext | None = None) -> int:
    """The status of the answer to one request, which comes within the time that a kubelet gives it."""
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=10.0)
    else:
        connection = http.client.HTTPSConnection("localhost", monitor.port, timeout=10.0, context=context)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


class Listener:
    """Reads a stream of events."""

    def __init__(self, monitor: Monitor, path: str = "/api/runs/r/stream") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=LIMIT_S)
        self._connection.request("GET", path)
        self.response = self._connection.getresponse()

    def block(self) -> str:
        """The lines up to the next empty one; empty at the end."""
        lines = []
        while (line := self.response.readline().decode()).strip():
            lines.append(line)
        return "".join(lines)

    def snapshot(self) -> dict[str, Any]:
        while not (block := self.block()).startswith("data: "):
            assert block, "the stream has ended"
        values: dict[str, Any] = json.loads(block.removeprefix("data: "))
        return values

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def test_a_stream_sends_a_snapshot_at_once_and_when_something_changed(
    monitor: Monitor, writer: Writer, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that the store is away, and back: what is shown has an age. Where nothing is new it is kept alive by
    comments, so that proxies do not end it and a listener that is gone is noticed. It ends with its run, and the next
    attempt of a browser is told that there is none."""
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.1)
    listeners = [Listener(monitor), Listener(monitor)]
    for listener in listeners:
        assert listener.response.getheader("Content-Type") == "text/event-stream"
        assert listener.block() == "retry: 2000\n"
        assert listener.snapshot()["round"] == 1
    writer.round(2, {"n0": 2}, RoundState.BROKEN)
    for listener in listeners:
        assert listener.snapshot()["state"] == "recovering"
    first, second = listeners
    second.close()
    for down in (True, False):
        with backend.changed:
            backend.down = down
        assert first.snapshot()["store"]["connected"] is not down
    assert [first.block() for _ in range(2)] == [": nothing new\n"] * 2
    writer.store.transact([], [Delete(writer.keys.root, f"{PREFIX}/r0")], deadline=soon())
    deadline = Deadline.after(LIMIT_S)
    while first.block():
        assert not deadline.expired
    assert get(monitor, "/api/runs/r/stream")[0].status == 404


def test_the_stream_of_a_page_sends_what_has_changed(
    monitor: Monitor, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole page at first; ages go on where nothing else does."""
    monkeypatch.setattr(streams, "AGES_EVERY_S", 0.1)
    listener = Listener(monitor, "/runs/r/stream")
    whole = listener.snapshot()
    assert whole["full"]
    assert any("Training" in line for line in whole["view"][0][2])
    assert "full" not in listener.snapshot()
    writer.round(2, {"n0": 2}, RoundState.BROKEN)
    deadline = Deadline.after(LIMIT_S)
    while not any("Recovering" in line for edit in listener.snapshot()["view"] for line in edit[2]):
        assert not deadline.expired
    listener.close()


def test_there_is_a_limit_to_streams(backend: MemoryBackend, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MOST_STREAMS", 1)
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.1)
    with Monitor(MemoryStore(backend), PREFIX, port=0) as monitor:
        await_read(monitor)
        first = Listener(monitor)
        first.snapshot()
        refused = Listener(monitor)
        assert (refused.response.status, refused.response.getheader("Retry-After")) == (503, "10")
        refused.close()
        first.close()
        deadline = Deadline.after(LIMIT_S)
        while (again := Listener(monitor)).response.status != 200:
            assert not deadline.expired
            again.close()
            pause(0.05)
        again.close()


def test_streams_end_when_the_monitor_stops(backend: MemoryBackend, writer: Writer) -> None:
    with Monitor(MemoryStore(backend), PREFIX, port=0) as monitor:
        await_read(monitor)
        listener = Listener(monitor)
        listener.snapshot()
    while listener.block():
        pass
    listener.close()


def test_over_tls_with_a_token(backend: MemoryBackend, writer: Writer, tmp_path: Path) -> None:
    """With the token all is told, without it nothing; a client that speaks no TLS gets nothing and harms nobody."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("localhost")
    context = ssl.create_default_context(cafile=str(authority.certificate))
    with Monitor(
        MemoryStore(backend), PREFIX, port=0, access=Access("token"), context=tls_context(certificate, key)
    ) as monitor:
        await_read(monitor)
        assert monitor.url == f"https://127.0.0.1:{monitor.port}"
        with socket.create_connection(("127.0.0.1", monitor.port), timeout=LIMIT_S) as plain:
            plain.sendall(b"GET /api/runs HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"200" not in plain.recv(1000)
        for token, status in (("token", 200), ("wrong", 401)):
            connection = http.client.HTTPSConnection("localhost", monitor.port, timeout=LIMIT_S, context=context)
            connection.request("GET", "/api/runs/r", headers={"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            assert (response.status, b'"round"' in response.read()) == (status, status == 200)
            connection.close()


def test_certificates_that_cannot_be_used_are_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot use"):
        tls_context(tmp_path / "x.pem", tmp_path / "x.pem")


def test_a_port_that_is_taken_is_a_user_error(monitor: Monitor, backend: MemoryBackend) -> None:
    """Two monitors need two ports; so does a name that nobody has."""
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
        Monitor(MemoryStore(backend), PREFIX, port=monitor.port)
    with pytest.raises(ConfigError, match="cannot listen on"):
        Monitor(MemoryStore(backend), PREFIX, host="192.0.2.1", port=0)
