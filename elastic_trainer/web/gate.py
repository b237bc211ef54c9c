"""What all sites answer alike: methods, the two questions of a kubelet, and who may read the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elastic_trainer.web.access import CHALLENGE, Access
from elastic_trainer.web.answers import HEALTH, READINESS, Answer, Request, text

Content = TypeVar("Content")


def guarded(
    request: Request,
    access: Access,
    *,
    health: Callable[[], Answer],
    readiness: Callable[[], Answer],
    content: Callable[[], Content],
) -> Answer | Content:
    """The answer to ``request``. ``health`` and ``readiness`` are told without a token: a kubelet has none."""
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
