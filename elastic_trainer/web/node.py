"""A node's endpoint: ``/metrics``, ``/healthz`` and ``/readyz``, optionally with a token and TLS.

The metrics are those of its ranks, from their pages at the time of the scrape, and of its store. Ranks that have ended
are missing from the next scrape on, since only the pages hold values.

*Runs in* the agent of a node; in a worker that has no agent. *Owns* the server.
*Fails by* ConfigError when it cannot listen, or cannot use a file that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic_trainer.errors import ConfigError
from elastic_trainer.ipc.page import Reading
from elastic_trainer.telemetry import families
from elastic_trainer.telemetry.families import GAUGES, Family
from elastic_trainer.web.server import (
    HEALTH,
    READINESS,
    Access,
    Answer,
    Request,
    Server,
    Site,
    is_loopback,
    metrics,
    refusal,
    text,
    tls_context,
)


class NodeCollector(Collector):
    """All families of Source.NODE. ``store()``: failed requests, and when it last answered; None: a process without."""

    def __init__(
        self,
        run: str,
        node: str,
        look: Callable[[], list[Reading]],
        nonfinite: Callable[[Reading], int],
        counters: Callable[[], dict[str, float]],
        store: Callable[[], tuple[int, float]] | None,
    ) -> None:
        self._run, self._node, self._look, self._nonfinite = run, node, look, nonfinite
        self._counters, self._store = counters, store

    def collect(self) -> Iterator[Metric]:
        placed = sorted((each for each in self._look() if each.pulse.rank >= 0), key=lambda each: each.pulse.round)
        newest = {each.pulse.rank: each for each in placed}  # another may still have the rank of the last round
        ranks = [(each, (self._run, str(rank))) for rank, each in sorted(newest.items())]
        yield _info(ranks)
        for gauge in GAUGES:
            yield _metric(gauge.metric, [(who, getattr(each.pulse, gauge.name)) for each, who in ranks])
        yield _metric(families.LAST_STEP, ((who, since(each)) for each, who in ranks))
        phases = families.PHASES
        yield _metric(
            families.PHASE,
            (((*who, phase), float(phase == each.phase)) for each, who in ranks for phase in phases),
        )
        yield _metric(families.NONFINITE, ((who, self._nonfinite(each)) for each, who in ranks))
        yield _metric(
            families.GPU_MEMORY,
            (
                ((*who, kind), value)
                for each, who in ranks
                if str(each.notes.get("device", "")).startswith("cuda")
                for kind, value in (("allocated", each.pulse.allocated), ("reserved", each.pulse.reserved))
            ),
        )
        here = (self._run, self._node)
        if self._store is not None:
            errors, answered_wall = self._store()
            yield _metric(families.STORE_ERRORS, [(here, errors)])
            yield _metric(families.STORE_SUCCESS, [(here, answered_wall)])
            yield _metric(families.WORKERS_KILLED, [(here, self._counters().get("workers_killed", 0.0))])


def since(reading: Reading) -> float:
    """When this rank committed its last step; before the first, when its process started."""
    return reading.pulse.stepped_wall or float(reading.notes.get("started_wall", 0.0))


def _info(ranks: Iterable[tuple[Reading, tuple[str, str]]]) -> Metric:
    family = families.RANK_INFO
    metric = Metric(f"{families.PREFIX}{family.name}", family.text, "info")
    for each, who in ranks:
        known = {name: str(each.notes.get(name, "")) for name in family.labels[2:]}
        metric.add_sample(family.full_name, {**dict(zip(families.RANK, who, strict=True)), **known}, 1.0)
    return metric


def _metric(family: Family, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    metric = Metric(f"{families.PREFIX}{family.name}", family.text, str(family.kind))
    for values, value in samples:
        metric.add_sample(family.full_name, dict(zip(family.labels, values, strict=True)), float(value))
    return metric


LEAST_TOKEN = 8


def node_site(collector: Collector, access: Access, not_ready: Callable[[], str | None]) -> Site:
    """A node's answers. ``not_ready()`` says why the node is not in a round; None if it is."""

    def answer(request: Request) -> Answer:
        unready = (not_ready() or "") if request.path == READINESS else ""
        refused = refusal(request, access, {HEALTH: "", READINESS: unready})
        if refused is not None or request.path != "/metrics":
            return refused or text(404, "not found")
        return metrics(collector, request.headers.get("accept", ""))

    return answer


class NodeEndpoint(Server):
    """The server of a node's site, started."""

    def __init__(
        self,
        address: str,
        port: int,
        collector: Collector,
        *,
        token_file: Path | None = None,
        cert: Path | None = None,
        key: Path | None = None,
        not_ready: Callable[[], str | None] = lambda: None,
    ) -> None:
        site = node_site(collector, Access(_token(token_file), is_loopback(address)), not_ready)
        tls = tls_context(cert, key) if cert is not None and key is not None else None
        super().__init__(address, port, site, tls, hint="change metrics_address or metrics_port")
        self.start()


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
