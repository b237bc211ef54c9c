"""What is at an endpoint that does not answer as etcd."""

from __future__ import annotations

import pytest

from elastic_trainer.settings import Endpoint
from elastic_trainer.store.connect import judge

HERE = Endpoint(host="10.0.0.1", port=2379)
ETCD = b'HTTP/1.1 200 OK\r\n\r\n{"etcdserver":"3.5.1","etcdcluster":"3.5.0"}'
HTTPS = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"


@pytest.mark.parametrize(
    ("answer", "tls", "text", "permanent"),
    [
        (ETCD, False, "up but does not serve requests", False),
        (ETCD, True, "does not use TLS", True),
        (HTTPS, False, "10.0.0.1:2379 requires TLS", True),
        (HTTPS, True, "TLS handshake with 10.0.0.1:2379 fails", False),
        (b"\x15\x03\x01\x00\x02\x02\x16", False, "requires TLS", True),
        (b"HTTP/1.1 404 Not Found\r\n\r\n<html>", False, "is a web server (HTTP/1.1 404), not etcd", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n<html>", False, "answers HTTP/1.1 503", False),  # a proxy's
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
