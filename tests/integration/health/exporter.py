"""A small exporter that shows what a test says, under the names of ``telemetry.families``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elastic_trainer.telemetry.families import PREFIX, Family, MetricKind

Row = tuple[Family, dict[str, str], float]


class FakeExporter(Collector):
    """Shows what ``rows`` returns at each scrape. ``endpoint`` is its host and port."""

    def __init__(self, rows: Callable[[], list[Row]]) -> None:
        self._rows = rows
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        self.endpoint = f"127.0.0.1:{self._server.server_port}"
        self._lock = threading.Lock()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for family, labels, value in self._rows():
            kind = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
            metric = found.setdefault(family.name, kind(PREFIX + family.name, family.text, labels=list(labels)))
            metric.add_metric(list(labels.values()), value)
        yield from found.values()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
