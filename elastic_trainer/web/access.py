"""Who may read: those with the token, as a bearer or as the password of a browser's login. Pure.

Without a token everybody who reaches the port may read. Web pages reach a loopback port too, through names that point
at 127.0.0.1 (DNS rebinding): so there only addresses and ``localhost`` get answers.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from elastic_trainer.web.answers import HEALTH, READINESS, Answer, Request, text

Content = TypeVar("Content")
CHALLENGE = 'Basic realm="elastic-trainer monitor", charset="UTF-8"'


@dataclass(frozen=True, slots=True)
class Access:
    """``token`` None: none is needed. ``loopback``: the port is one of this machine alone."""

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


def guarded(
    request: Request,
    access: Access,
    *,
    health: Callable[[], Answer],
    readiness: Callable[[], Answer],
    content: Callable[[], Content],
) -> Answer | Content:
    """The answer to ``request``. ``health`` and ``readiness`` need no token: a kubelet has none."""
    if request.method not in ("GET", "HEAD"):
        return text(405, "this server is to be read only", Allow="GET, HEAD")
    if request.path == HEALTH:
        return health()
    if request.path == READINESS:
        return readiness()
    if not access.knows_host(request.headers.get("host")):
        return text(421, "ask for localhost or for an address: without a token, other names are refused")
    if not access.allows(request.headers.get("authorization")):
        return text(401, "a token is needed", WWW_Authenticate=CHALLENGE)
    return content()


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
