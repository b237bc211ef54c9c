"""Find out why a TLS handshake with etcd fails: whose certificate is not accepted, and why.

*Runs in* the thread that connects, only after a connection has failed.
*Owns* one short-lived socket. *Fails by* saying nothing (None); it raises nothing.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

from elastic_trainer.settings import Endpoint, StoreSettings

LISTEN_S = 0.5
"""How long a refusal may take before we ask something: a healthy etcd says nothing by itself."""
_REQUEST = b"GET /version HTTP/1.0\r\n\r\n"
_ABOUT_US = ("CERTIFICATE_REQUIRED", "CERTIFICATE_EXPIRED", "UNKNOWN_CA", "BAD_CERTIFICATE", "UNSUPPORTED_CERTIFICATE")
"""Parts of the names that OpenSSL has for what etcd says of a client's certificate. Which one it says depends on the
version of Go that etcd was built with, not on what is wrong."""


def refusal(endpoint: Endpoint, settings: StoreSettings, timeout_s: float) -> str | None:
    """Why a handshake with the files of ``settings`` fails, in words; None where it does not, or not for that."""
    try:
        context = ssl.create_default_context(cafile=str(settings.ca_cert))
        if settings.cert is not None and settings.key is not None:
            context.load_cert_chain(settings.cert, settings.key)
    except (ssl.SSLError, OSError) as error:
        mismatch = "KEY_VALUES_MISMATCH" in str(error)
        return "cert and key do not belong together" if mismatch else "ca_cert, cert or key is damaged"
    for request in (_REQUEST, b""):
        try:
            return _refused(endpoint, settings, context, timeout_s, request)
        except OSError:
            continue  # it hung up on what we said before we had its reason: connect once more, and only listen
    return None


def _refused(
    endpoint: Endpoint, settings: StoreSettings, context: ssl.SSLContext, timeout_s: float, request: bytes
) -> str | None:
    """One handshake. OSError where the connection ends without a reason."""
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), timeout_s) as connection,
            context.wrap_socket(connection, server_hostname=endpoint.host) as secured,
        ):
            # In TLS 1.3 a refusal of our certificate comes after the handshake. Who says more meanwhile may lose it.
            secured.settimeout(min(LISTEN_S, timeout_s) if request else timeout_s)
            with contextlib.suppress(TimeoutError):
                _hear(secured)
            if request:
                secured.settimeout(timeout_s)
                secured.sendall(request)
                _hear(secured)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not accepted: {error.verify_message}"
    except ssl.SSLEOFError as error:
        raise ConnectionResetError(str(error)) from error
    except ssl.SSLError as error:
        return _about_us(settings) if any(name in (error.reason or "") for name in _ABOUT_US) else None
    return None


def _hear(secured: ssl.SSLSocket) -> None:
    if not secured.recv(1):
        raise ConnectionResetError("it hung up without a word")


def _about_us(settings: StoreSettings) -> str:
    if settings.cert is None:
        return "it asks for a certificate, and none is given"
    return "it does not accept the certificate in cert, which has expired or is of another CA"
