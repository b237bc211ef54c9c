"""Who may read: whoever has the token, as a bearer or as the password of a browser's login. Pure.

Without a token everybody may who reaches the port. A loopback port is reached from web pages too, through names that
point at 127.0.0.1 (DNS rebinding): there only addresses and ``localhost`` are answered to.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from dataclasses import dataclass, field

CHALLENGE = 'Basic realm="elastic-trainer monitor", charset="UTF-8"'


@dataclass(frozen=True, slots=True)
class Access:
    """``token`` None: nobody is asked for one. ``loopback``: the port is one of this machine alone."""

    token: str | None = field(default=None, repr=False)
    loopback: bool = True

    def allows(self, authorization: str | None) -> bool:
        """Whether the value of the header ``Authorization`` lets its sender in."""
        if self.token is None:
            return True
        # Compared as bytes, in a time that says nothing about where they differ.
        return hmac.compare_digest(credential(authorization or "").encode(), self.token.encode())

    def knows_host(self, host: str | None) -> bool:
        """Whether a request with this header ``Host`` was meant for this server."""
        if self.token is not None or not self.loopback or not host:
            return True
        return is_local(host)


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
    """Whether ``host`` (with or without a port) is an address or localhost, which no foreign name server can move."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
