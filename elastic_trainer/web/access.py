"""Access control: clients with the token, as a bearer token or as the password of a browser's login. Pure.

Without a token every client that reaches the port may read. Web pages can reach a loopback port too, through names that
resolve to 127.0.0.1 (DNS rebinding): so on a loopback port only requests to addresses and ``localhost`` are answered.
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
    """``token`` None: no token is needed. ``loopback``: only this machine can reach the port."""

    token: str | None = field(default=None, repr=False)
    loopback: bool = True

    def allows(self, authorization: str | None) -> bool:
        """Whether the value of the header ``Authorization`` grants access."""
        if self.token is None:
            return True
        # A constant-time comparison of bytes.
        return hmac.compare_digest(credential(authorization or "").encode(), self.token.encode())

    def knows_host(self, host: str | None) -> bool:
        """Whether a request with this header ``Host`` is for this server."""
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
    """The answer to ``request``. ``health`` and ``readiness`` need no token, since a kubelet has none."""
    if request.method not in ("GET", "HEAD"):
        return text(405, "this server is read-only", Allow="GET, HEAD")
    if request.path == HEALTH:
        return health()
    if request.path == READINESS:
        return readiness()
    if not access.knows_host(request.headers.get("host")):
        return text(421, "use localhost or an address: without a token, other host names are refused")
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
    """Whether ``host`` (with or without a port) is an address or localhost: no foreign name server can redirect it."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
