"""HTTP requests and answers as values, without sockets."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import unquote, urlsplit

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

GZIP_LEVEL = 1
"""Compression level: saves three quarters of what the highest level saves, in a tenth of the time."""
LEAST_GZIP = 1024
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
NO_STORE = {"Cache-Control": "no-store"}
HEALTH, READINESS = PROBES = "/healthz", "/readyz"
"""The paths of a kubelet's probes; their answers wait for nothing."""


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes to send, and the same compressed if that is worth it."""

    plain: bytes
    zipped: bytes | None

    @classmethod
    def of(cls, plain: bytes) -> Body:
        worth = len(plain) >= LEAST_GZIP
        return cls(plain, gzip.compress(plain, GZIP_LEVEL, mtime=0) if worth else None)


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request on which answers depend. Header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path without the query, decoded once."""
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> str:
        return urlsplit(self.target).query


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    status: int
    kind: str
    body: Body
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stream:
    """Server-sent events about ``name`` while a client reads them; ``pieces()`` waits between them."""

    name: str
    pieces: Callable[[], Iterator[bytes]] = field(compare=False)


class Site(Protocol):
    """Answers the requests of a server."""

    def answer(self, request: Request) -> Answer | Stream: ...


def text(status: int, words: str, **headers: str) -> Answer:
    """A short answer for people."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, TEXT, Body(f"{words}\n".encode(), None), NO_STORE | named)


def metrics(collector: Collector, accept: str) -> Answer:
    """The metrics of ``collector``, in the format that the header ``Accept`` requests."""
    try:
        encode, kind = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is none
        encode, kind = choose_encoder("")
    return Answer(200, kind, Body.of(encode(collector)), NO_STORE)
