"""Opens the store of the settings, or explains in one sentence why that fails.

After a failure each endpoint is examined: what answers there, and which certificate a TLS handshake rejects.

*Runs in* the main thread of an agent or command, at its start.
*Owns* one short-lived socket at a time: the returned store belongs to the caller.
*Fails by* ConfigError (wrong endpoint, TLS, credentials) at once, StoreUnavailableError at the deadline.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TypeVar

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import ConfigError, CredentialsError, ElasticTrainerError, StoreUnavailableError
from elastic_trainer.settings import Endpoint, StoreSettings
from elastic_trainer.store.api import RunKeys, Store
from elastic_trainer.store.retry import within
from elastic_trainer.telemetry.logs import logger

FIRST_TRY_S = 2.0
"""How long etcd may take to answer before its endpoints are examined."""
EXAMINE_S = 1.0
REFUSED_PAUSE_S = 1.0
"""Seconds between two attempts with refused credentials."""
_UNTRUSTED = "certificate_verify_failed"  # as etcd.reason() has it
ErrorT = TypeVar("ErrorT", bound=ElasticTrainerError)


def connect(settings: StoreSettings) -> Store:
    """The store at the endpoints of ``settings``. Sends nothing before the first call; imports grpc."""
    store: Store = import_module("elastic_trainer.store.etcd").EtcdStore(settings)
    return store


def connect_checked(settings: StoreSettings, deadline: Deadline, *, run: str | None = None) -> Store:
    """A store that has answered a read of the prefix, or of ``run``'s keys, which are all that a run's user may read.

    Waits for etcd to start until ``deadline``. Raises ConfigError as soon as it is clear that waiting cannot help,
    otherwise StoreUnavailableError, which says what is wrong with which endpoint.
    """
    try:
        return _tried(settings, run, deadline.at_most(FIRST_TRY_S))
    except StoreUnavailableError as error:
        _raise_if_hopeless(_examined(settings, deadline), error)
    try:
        return within(deadline, lambda: _tried(settings, run, deadline))
    except StoreUnavailableError as error:
        findings = _examined(settings, Deadline.after(EXAMINE_S))
        _raise_if_hopeless(findings, error)
        raise _explained(StoreUnavailableError, findings) from error


def connect_patiently(settings: StoreSettings, deadline: Deadline, *, run: str | None = None) -> Store:
    """As :func:`connect_checked`, for unattended nodes: password and certificate files may be in the middle of a
    replacement, so a refusal is final only at ``deadline``."""
    refused: CredentialsError | None = None
    while True:
        try:
            return connect_checked(settings, deadline, run=run)
        except CredentialsError as error:
            if not settings.renewable or deadline.remaining_s() <= REFUSED_PAUSE_S:
                raise
            if refused is None:
                logger().warning("store.refused", error=str(error))
            refused = error
        except StoreUnavailableError as error:
            if refused is None:
                raise
            raise refused from error  # etcd was too slow for the last attempt, but the cause is known
        pause(REFUSED_PAUSE_S)


def _tried(settings: StoreSettings, run: str | None, deadline: Deadline) -> Store:
    root = f"{settings.prefix}/" if run is None else RunKeys(settings.prefix, run).root
    store = connect(settings)
    try:
        store.range(root, deadline, limit=1, keys_only=True)
    except BaseException:
        store.close()
        raise
    return store


def _examined(settings: StoreSettings, deadline: Deadline) -> list[StoreFault]:
    """What is wrong at each endpoint; of a failed handshake with its cause, which waiting does not repair."""
    tls, timeout_s = settings.ca_cert is not None, min(EXAMINE_S, max(0.2, deadline.remaining_s()))
    findings = [examine(endpoint, tls=tls, timeout_s=timeout_s) for endpoint in settings.endpoints]
    for i, (finding, endpoint) in enumerate(zip(findings, settings.endpoints, strict=True)):
        if finding.handshake and (cause := refusal(endpoint, settings, EXAMINE_S)) is not None:
            findings[i] = replace(finding, text=f"{finding.text}: {cause}", permanent=True)
    return findings


def _raise_if_hopeless(findings: Sequence[StoreFault], error: StoreUnavailableError) -> None:
    """Raise ConfigError if waiting cannot repair the fault."""
    hopeless = all(finding.permanent for finding in findings) or any(finding.for_all for finding in findings)
    if _UNTRUSTED in error.message or hopeless:
        refused = any(finding.handshake and finding.permanent for finding in findings)
        raise _explained(CredentialsError if refused else ConfigError, findings) from error


def _explained(kind: type[ErrorT], findings: Sequence[StoreFault]) -> ErrorT:
    """With the most specific hint: faults of all endpoints, then an etcd without a quorum before its dead members."""
    hints = [finding.hint for finding in sorted(findings, key=lambda finding: not finding.for_all)]
    reasons = "; ".join(dict.fromkeys(finding.text for finding in findings))
    return kind(f"cannot use the store: {reasons}", hint=next((h for h in hints if h != START_HINT), hints[0]))


# ---- what answers at an endpoint

_REQUEST = "GET /version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
_ANSWER_BYTES = 4096
_TLS_ALERT = b"\x15\x03"
_TLS_WANTED = b"HTTP request to an HTTPS server"
START_HINT = "start etcd or correct the endpoint"


@dataclass(frozen=True, slots=True)
class StoreFault:
    """What is wrong at an endpoint. ``permanent``: waiting will not help; ``for_all``: nor will any other endpoint."""

    text: str
    permanent: bool
    hint: str
    for_all: bool = False
    handshake: bool = False
    """Whether both sides use TLS but the handshake fails."""


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
        text = f"{endpoint} accepts no connection or does not answer"
        return StoreFault(text, False, "check address, firewall and etcd")
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
        hint = "set ca_cert (and cert and key if etcd requires them)"
        return StoreFault(f"{endpoint} requires TLS", True, hint, for_all=True)
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
        text = f"{endpoint} closes connections without an answer"
        return StoreFault(text, False, "check that it is etcd's client port")
    return StoreFault(f"{endpoint} is not etcd", True, "correct the endpoint")


# ---- why a TLS handshake fails

LISTEN_S = 0.5
"""Seconds to wait for a refusal before a request is sent: a healthy etcd sends nothing by itself."""
_BARE_REQUEST = b"GET /version HTTP/1.0\r\n\r\n"
_ABOUT_US = ("CERTIFICATE_REQUIRED", "CERTIFICATE_EXPIRED", "UNKNOWN_CA", "BAD_CERTIFICATE", "UNSUPPORTED_CERTIFICATE")
"""Parts of OpenSSL's names for the alerts by which etcd rejects a client's certificate. Which alert etcd sends depends
on the Go version that it was built with, not on the fault."""


def refusal(endpoint: Endpoint, settings: StoreSettings, timeout_s: float) -> str | None:
    """Why a handshake with the files of ``settings`` fails, in words; None if it works or fails for another reason."""
    try:
        context = ssl.create_default_context(cafile=str(settings.ca_cert))
        if settings.cert is not None and settings.key is not None:
            context.load_cert_chain(settings.cert, settings.key)
    except (ssl.SSLError, OSError) as error:
        mismatch = "KEY_VALUES_MISMATCH" in str(error)
        return "cert and key do not match" if mismatch else "ca_cert, cert or key is damaged"
    for request in (_BARE_REQUEST, b""):
        try:
            return _refused(endpoint, settings, context, timeout_s, request)
        except OSError:
            continue  # our request closed the connection before its reason arrived: connect again and only read
    return None


def _refused(
    endpoint: Endpoint, settings: StoreSettings, context: ssl.SSLContext, timeout_s: float, request: bytes
) -> str | None:
    """One handshake. OSError if the connection ends without a reason."""
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), timeout_s) as connection,
            context.wrap_socket(connection, server_hostname=endpoint.host) as secured,
        ):
            # In TLS 1.3 a rejection of our certificate arrives after the handshake. Sending meanwhile may lose it.
            secured.settimeout(min(LISTEN_S, timeout_s) if request else timeout_s)
            with contextlib.suppress(TimeoutError):
                _receive(secured)
            if request:
                secured.settimeout(timeout_s)
                secured.sendall(request)
                _receive(secured)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is rejected: {error.verify_message}"
    except ssl.SSLEOFError as error:
        raise ConnectionResetError(str(error)) from error
    except ssl.SSLError as error:
        if not any(name in (error.reason or "") for name in _ABOUT_US):
            return None
        if settings.cert is None:
            return "it requires a client certificate, and none is configured"
        return "it rejects the certificate in cert, which has expired or is of another CA"
    return None


def _receive(secured: ssl.SSLSocket) -> None:
    if not secured.recv(1):
        raise ConnectionResetError("the server closed the connection without a reason")
