"""Finds out why the store does not answer at an endpoint, and what answers there instead.

*Runs in* the thread that connects, only after a connection has failed.
*Owns* one short-lived socket at a time. *Fails by* returning a finding; it raises nothing.
"""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass

from elastic_trainer.settings import Endpoint

_REQUEST = "GET /version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
_ANSWER_BYTES = 4096
_TLS_ALERT = b"\x15\x03"
_TLS_WANTED = b"HTTP request to an HTTPS server"


@dataclass(frozen=True, slots=True)
class StoreFault:
    """What is wrong at an endpoint. ``permanent``: waiting will not help; ``for_all``: nor will any other endpoint."""

    text: str
    permanent: bool
    hint: str
    for_all: bool = False
    handshake: bool = False
    """Whether both sides use TLS but the handshake fails."""


START_HINT = "start etcd or correct the endpoint"


def examine(endpoint: Endpoint, *, tls: bool, timeout_s: float) -> StoreFault:
    """Request etcd's version from ``endpoint`` over HTTP, which etcd serves on its client port; judge the answer."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(_REQUEST.format(host=endpoint.host).encode())
            answer = _received(connection)
    except socket.gaierror:
        return StoreFault(f"the host name {endpoint.host!r} does not resolve", False, "check the name and DNS")
    except ConnectionRefusedError:
        return StoreFault(f"nothing listens at {endpoint}", False, START_HINT)
    except TimeoutError:
        return StoreFault(
            f"{endpoint} accepts no connection or does not answer", False, "check address, firewall and etcd"
        )
    except OSError as error:
        return StoreFault(f"{endpoint} cannot be reached: {error.strerror or error}", False, START_HINT)
    if not answer and _speaks_tls(endpoint, timeout_s):
        answer = _TLS_ALERT  # an etcd with TLS closes plaintext connections without an answer
    return judge(answer, endpoint, tls=tls)


def _speaks_tls(endpoint: Endpoint, timeout_s: float) -> bool:
    """Whether a TLS handshake gets an answer; an alert, such as for a missing client certificate, is one too."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: only the protocol matters
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), timeout_s) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False


def _received(connection: socket.socket) -> bytes:
    answer = b""
    while len(answer) < _ANSWER_BYTES:
        try:
            part = connection.recv(_ANSWER_BYTES)
        except ConnectionResetError:
            break
        if not part:
            break
        answer += part
    return answer


def judge(answer: bytes, endpoint: Endpoint, *, tls: bool) -> StoreFault:
    """What the answer to the version request reveals about its sender. Pure."""
    if answer.startswith(_TLS_ALERT) or _TLS_WANTED in answer:
        if tls:
            text = f"the TLS handshake with {endpoint} fails"
            return StoreFault(text, False, "check ca_cert, cert and key", handshake=True)
        return StoreFault(
            f"{endpoint} requires TLS", True, "set ca_cert (and cert and key if etcd requires them)", for_all=True
        )
    if b'"etcdserver"' in answer:
        if tls:
            return StoreFault(f"etcd at {endpoint} does not use TLS", True, "omit ca_cert, cert and key", for_all=True)
        return StoreFault(f"etcd at {endpoint} is up but does not serve requests", False, "check that it has a quorum")
    if answer.startswith(b"HTTP/"):
        status = re.match(rb"HTTP/\S+ (\d+)", answer)
        said = status.group().decode() if status else "HTTP"
        if status and status[1] in (b"502", b"503", b"504"):  # a proxy whose etcd is away
            return StoreFault(f"{endpoint} answers {said}", False, "check that it is etcd, and is up")
        return StoreFault(f"{endpoint} is a web server ({said}), not etcd", True, "correct the endpoint")
    if not answer:
        return StoreFault(
            f"{endpoint} closes connections without an answer", False, "check that it is etcd's client port"
        )
    return StoreFault(f"{endpoint} is not etcd", True, "correct the endpoint")
