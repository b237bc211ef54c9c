"""HTTP/1.1 as values: request bytes in, answer bytes out. Pure; no input makes it raise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import urlsplit

from elastic_trainer.web.answers import Answer, Request, text

HEAD_LIMIT = 16384
"""Maximum bytes of a request line and its headers."""
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
class CompleteRequest:
    """A complete request. ``size``: bytes of its head; ``lasts``: another request may follow on its connection."""

    request: Request
    size: int
    lasts: bool


def parse_request(received: bytes) -> CompleteRequest | Answer | None:
    """The first request of ``received``; an error as an answer; None while it is incomplete."""
    end = _END.search(received)
    if end is None:
        return text(431, "the headers of this request are too long") if len(received) > HEAD_LIMIT else None
    first, *rest = received[: end.start()].decode("latin-1").replace("\r\n", "\n").split("\n")
    line, headers = _LINE.fullmatch(first), _headers(rest)
    if line is None or headers is None or not _is_target(line[2]):
        return text(400, "this is not an HTTP request")
    if line[3] != "1":
        return text(505, "this server supports only HTTP/1.1")
    # A body is not read, and must not be parsed as the next request.
    body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    closes = "close" in headers.get("connection", "").lower() or line[4] == "0"
    return CompleteRequest(Request(line[1], line[2], headers), end.end(), lasts=not (body or closes))


def _headers(lines: list[str]) -> dict[str, str] | None:
    """The headers by lower-case name; None if one of ``lines`` is no header."""
    found: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            return None
        name, value = header[1].lower(), header[2].strip()
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _is_target(target: str) -> bool:
    """Whether ``target`` can be split into its parts, as the answering code does."""
    try:
        return target.startswith(("/", "http://", "https://")) and bool(urlsplit(target).path or target)
    except ValueError:  # http://[
        return False


def rendered(answer: Answer, request: Request | None, *, lasts: bool) -> bytes:
    """The bytes of ``answer`` to ``request`` (None: it was invalid), without content for a HEAD request."""
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
    """Whether the header ``Accept-Encoding`` accepts gzip with a weight above 0."""
    for part in accepted.split(","):
        coding, _, weight = part.replace(" ", "").partition(";")
        if coding.lower() in ("gzip", "*"):
            return weight.lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
