"""HTTP/1.1 as values: the bytes of a request in, the bytes of an answer out. Pure; whatever is sent raises nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import urlsplit

from elastic_trainer.web.answers import Answer, Request, text

HEAD_LIMIT = 16384
"""Bytes of a request line and its headers."""
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; object-src 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_END = re.compile(rb"\r?\n\r?\n")
_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/([0-9])\.([0-9])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is complete. ``size``: of its head, in bytes; ``lasts``: another may follow on its connection."""

    request: Request
    size: int
    lasts: bool


def asked(received: bytes) -> Asked | Answer | None:
    """The first request of ``received``; what is wrong with it, as an answer; None while it is not complete."""
    end = _END.search(received)
    if end is None:
        return text(431, "the headers of this request are too long") if len(received) > HEAD_LIMIT else None
    first, *rest = received[: end.start()].decode("latin-1").replace("\r\n", "\n").split("\n")
    line, headers = _LINE.fullmatch(first), _headers(rest)
    if line is None or headers is None or not _is_target(line[2]):
        return text(400, "this is no request of HTTP")
    if line[3] != "1":
        return text(505, "this server speaks HTTP/1.1")
    # A body is not read, and must not pass for the next request.
    body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    closes = "close" in headers.get("connection", "").lower() or line[4] == "0"
    return Asked(Request(line[1], line[2], headers), end.end(), lasts=not (body or closes))


def _headers(lines: list[str]) -> dict[str, str] | None:
    """By name, in lower case; None if one of ``lines`` is none."""
    found: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            return None
        name, value = header[1].lower(), header[2].strip()
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _is_target(target: str) -> bool:
    """Whether it can be split into its parts, as those do who answer."""
    try:
        return target.startswith(("/", "http://", "https://")) and bool(urlsplit(target).path or target)
    except ValueError:  # http://[
        return False


def rendered(answer: Answer, request: Request | None, *, lasts: bool) -> bytes:
    """``answer`` to ``request`` (None: it was none), with its content unless it asks for the head."""
    content, headers = answer.body.plain, dict(answer.headers)
    if answer.body.zipped is not None:
        headers["Vary"] = "Accept-Encoding"
        if request is not None and takes_gzip(request.headers.get("accept-encoding", "")):
            content, headers["Content-Encoding"] = answer.body.zipped, "gzip"
    if answer.status != HTTPStatus.NOT_MODIFIED:
        headers["Content-Length"] = str(len(content))
    whole = request is None or request.method != "HEAD"
    return head(answer.status, {"Content-Type": answer.kind, **headers}, lasts=lasts) + (content if whole else b"")


def head(status: int, headers: Mapping[str, str], *, lasts: bool) -> bytes:
    """Status line and headers of an answer."""
    own = {"Server": "elastic-trainer", "Date": formatdate(usegmt=True)}
    named = {**own, **headers, **SECURITY} | ({} if lasts else {"Connection": "close"})
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def takes_gzip(accepted: str) -> bool:
    """Whether the header ``Accept-Encoding`` names gzip, and not with a weight of 0."""
    for part in accepted.split(","):
        coding, _, weight = part.replace(" ", "").partition(";")
        if coding.lower() in ("gzip", "*"):
            return weight.lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
