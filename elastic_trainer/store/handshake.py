"""Finds out why a TLS handshake with etcd fails: which side's certificate is rejected, and why.

*Runs in* the thread that connects, only after a connection has failed.
*Owns* one short-lived socket. *Fails by* returning None; it raises nothing.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

from elastic_trainer.settings import Endpoint, StoreSettings

LISTEN_S = 0.5
"""Seconds to wait for a refusal before a request is sent: a healthy etcd sends nothing by itself."""
_REQUEST = b"GET /version HTTP/1.0\r\n\r\n"
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
    for request in (_REQUEST, b""):
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
        return _about_us(settings) if any(name in (error.reason or "") for name in _ABOUT_US) else None
    return None


def _receive(secured: ssl.SSLSocket) -> None:
    if not secured.recv(1):
        raise ConnectionResetError("the server closed the connection without a reason")


def _about_us(settings: StoreSettings) -> str:
    if settings.cert is None:
        return "it requires a client certificate, and none is configured"
    return "it rejects the certificate in cert, which has expired or is of another CA"
