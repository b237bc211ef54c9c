"""What is at an endpoint that does not answer as etcd."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_trainer.settings import Endpoint
from elastic_trainer.store.diagnosis import examine, judge

HERE = Endpoint(host="10.0.0.1", port=2379)
ETCD = b'HTTP/1.1 200 OK\r\n\r\n{"etcdserver":"3.5.1","etcdcluster":"3.5.0"}'
HTTPS = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"


@pytest.mark.parametrize(
    ("answer", "tls", "text", "permanent"),
    [
        (ETCD, False, "up but does not serve requests", False),
        (ETCD, True, "does not speak TLS", True),
        (HTTPS, False, "10.0.0.1:2379 speaks TLS", True),
        (HTTPS, True, "TLS handshake with 10.0.0.1:2379 fails", False),
        (b"\x15\x03\x01\x00\x02\x02\x16", False, "speaks TLS", True),
        (b"HTTP/1.1 404 Not Found\r\n\r\n<html>", False, "is a web server (HTTP/1.1 404), not etcd", True),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False, "is not etcd", True),
        (b"", False, "closes connections without an answer", False),
    ],
)
def test_judging_an_answer(answer: bytes, tls: bool, text: str, permanent: bool) -> None:
    """The sentence names the endpoint and what is wrong; only hopeless cases are permanent."""
    finding = judge(answer, HERE, tls=tls)
    assert text in finding.text
    assert "10.0.0.1:2379" in finding.text
    assert finding.permanent is permanent
    assert finding.hint


@contextmanager
def _server(answer: bytes | None) -> Iterator[Endpoint]:
    """Something that answers the first connection with ``answer``, or with silence."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                if answer is None:
                    done.wait(30.0)
                else:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
        finally:
            done.set()
            thread.join()


def test_examining_a_living_service() -> None:
    """An answer is judged; silence is told from a closed port."""
    with _server(ETCD) as endpoint:
        assert "up but does not serve" in examine(endpoint, tls=False, timeout_s=10.0).text
    with _server(None) as endpoint:
        assert "says nothing" in examine(endpoint, tls=False, timeout_s=0.2).text


def test_examining_nothing() -> None:
    """A closed port and an unknown name are findings, not exceptions."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
    assert examine(endpoint, tls=False, timeout_s=5.0).text == f"nothing listens at {endpoint}"
    unknown = examine(Endpoint(host="no-such-host.invalid", port=1), tls=False, timeout_s=5.0)
    assert "'no-such-host.invalid' is not known" in unknown.text
    assert not unknown.permanent
