"""A node's endpoint: ``/metrics``, ``/healthz`` and ``/readyz``, optionally with a token and TLS.

*Runs in* the agent of a node; in a worker that has no agent.
*Owns* the server. *Fails by* ConfigError when it cannot listen, or cannot use a file that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.registry import Collector

from elastic_trainer.errors import ConfigError
from elastic_trainer.web.access import Access, guarded, is_loopback
from elastic_trainer.web.answers import Answer, Request, metrics, text
from elastic_trainer.web.server import Server, tls_context

LEAST_TOKEN = 8


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """The address to listen on, and the access control."""

    address: str
    port: int
    token_file: Path | None
    cert: Path | None
    key: Path | None


class NodeSite:
    """A node's answers. ``not_ready()`` says why the node is not in a round; None if it is."""

    def __init__(self, collector: Collector, access: Access, not_ready: Callable[[], str | None]) -> None:
        self._collector, self._access, self._not_ready = collector, access, not_ready

    def answer(self, request: Request) -> Answer:
        return guarded(
            request,
            self._access,
            health=lambda: text(200, "ok"),
            readiness=self._readiness,
            content=lambda: self._content(request),
        )

    def _readiness(self) -> Answer:
        reason = self._not_ready()
        return text(200, "ready") if reason is None else text(503, reason)

    def _content(self, request: Request) -> Answer:
        if request.path == "/metrics":
            return metrics(self._collector, request.headers.get("accept", ""))
        return text(404, "not found")


class NodeEndpoint:
    """The server of a node's site."""

    def __init__(
        self, options: EndpointOptions, collector: Collector, not_ready: Callable[[], str | None] = lambda: None
    ) -> None:
        self._host = options.address
        site = NodeSite(collector, Access(_token(options.token_file), is_loopback(self._host)), not_ready)
        tls = tls_context(options.cert, options.key) if options.cert is not None and options.key is not None else None
        self._scheme = "http" if tls is None else "https"
        self._server = Server(self._host, options.port, site, tls, hint="change metrics_address or metrics_port")
        self.port = self._server.port
        self._server.start()

    def url(self, address: str) -> str:
        """The endpoint's URL; ``address`` is this machine's, for an endpoint that listens on all addresses."""
        host = address if self._host in ("0.0.0.0", "::", "") else self._host
        return f"{self._scheme}://[{host}]:{self.port}" if ":" in host else f"{self._scheme}://{host}:{self.port}"

    def descriptors(self) -> list[int]:
        return self._server.descriptors()

    def close(self) -> None:
        self._server.stop()


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}", hint="check metrics_token_file") from error
    if not token.isascii() or any(each.isspace() for each in token):
        raise ConfigError(
            f"the token in {file} is not one word of ASCII", hint="HTTP headers carry nothing else safely"
        )
    if len(token) < LEAST_TOKEN:
        raise ConfigError(f"the token in {file} has fewer than {LEAST_TOKEN} characters", hint="use a longer one")
    return token
