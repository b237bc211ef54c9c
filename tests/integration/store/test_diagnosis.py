"""What is at an endpoint, asked over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_trainer.settings import Endpoint
from elastic_trainer.store.connect import examine

ETCD = b'HTTP/1.1 200 OK\r\n\r\n{"etcdserver":"3.5.1","etcdcluster":"3.5.0"}'


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
        assert "does not answer" in examine(endpoint, tls=False, timeout_s=0.2).text


def test_examining_nothing() -> None:
    """A closed port and an unknown name are findings, not exceptions."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
    assert examine(endpoint, tls=False, timeout_s=5.0).text == f"nothing listens at {endpoint}"
    unknown = examine(Endpoint(host="no-such-host.invalid", port=1), tls=False, timeout_s=5.0)
    assert "'no-such-host.invalid' does not resolve" in unknown.text
    assert not unknown.permanent
