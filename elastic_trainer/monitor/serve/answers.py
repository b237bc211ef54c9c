"""Maps request paths to answers, without sockets.

*Runs in* the answering threads. *Owns* nothing. *Fails by* nothing that a request can cause.
"""

from __future__ import annotations

import hashlib
import json
import re

from elastic_trainer.monitor import page
from elastic_trainer.monitor.model.snapshot import as_values
from elastic_trainer.monitor.read.reading import FORGET_S, RunReading, StoreReading
from elastic_trainer.monitor.serve.board import Board
from elastic_trainer.monitor.serve.metrics import MonitorCollector
from elastic_trainer.monitor.serve.streams import snapshots, updates
from elastic_trainer.web.access import Access, guarded
from elastic_trainer.web.answers import HTML, JSON, NO_STORE, Answer, Body, Request, Stream, metrics, text

UNREAD_LIMIT_S = 60.0
"""Seconds without a read of the store after which a monitor is not ready."""
STUCK_S = 120.0
"""Each run's read is bounded to seconds: a poll this long counts as hung."""
STATIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
TARGET = re.compile(r"(https?)://([^\s/@?#]+:\d{1,5})/?")


class MonitorSite:
    """All paths of the monitor."""

    def __init__(self, board: Board, access: Access, *, forget_s: float = FORGET_S) -> None:
        self._board, self._access, self._forget_s = board, access, forget_s
        self._collector = MonitorCollector(lambda: board.reading, forget_s=forget_s)

    def answer(self, request: Request) -> Answer | Stream:
        """The answer to ``request``."""
        return guarded(
            request,
            self._access,
            health=self._health,
            readiness=self._readiness,
            content=lambda: self._content(request.path, request),
        )

    def _content(self, path: str, request: Request) -> Answer | Stream:
        match path.split("/")[1:]:
            case [""]:
                return self._answer(HTML, self._board.body("page", self._runs_page))
            case ["update"]:
                return self._answer(JSON, self._board.body("update", lambda: page.message(self._board.runs_update())))
            case ["runs", run, *_] | ["api", "runs", run, *_] if run not in self._board.reading.runs:
                return self._no_run(run)
            case ["runs", run]:
                return self._answer(HTML, self._run_page(run, page.Choice.of(request.query)))
            case ["runs", run, "update"]:
                return self._answer(JSON, self._run_update(run, page.Choice.of(request.query)))
            case ["runs", run, "stream"]:
                choice = page.Choice.of(request.query)
                return Stream(run, lambda: updates(self._board, run, choice))
            case ["static", name]:
                return _static(name, request.headers.get("if-none-match", ""))
            case ["api", "runs"]:
                return self._answer(JSON, self._board.list_body())
            case ["api", "runs", run]:
                return self._answer(JSON, self._board.run_body(run))
            case ["api", "runs", run, "stream"]:
                return Stream(run, lambda: snapshots(self._board, run))
            case ["metrics"]:
                return metrics(self._collector, request.headers.get("accept", ""))
            case ["sd", "nodes"]:
                return self._targets()
        return text(404, "not found")

    def _health(self) -> Answer:
        stuck = self._board.published_s > STUCK_S
        return text(503, "the monitor has stopped reading the store") if stuck else text(200, "ok")

    def _readiness(self) -> Answer:
        unread_s = self._board.unread_s
        if unread_s is None:
            return text(503, "the store has not been read yet")
        if unread_s > UNREAD_LIMIT_S:
            return text(503, f"the store was last read {unread_s:.0f} s ago")
        return text(200, "ready")

    def _no_run(self, run: str) -> Answer:
        names = ", ".join(sorted(self._board.reading.runs)[:20]) or "none"
        return text(404, f"there is no run {run[:128]!r}; there are: {names}")

    def _answer(self, kind: str, body: Body | None) -> Answer:
        return text(404, "not found") if body is None else Answer(200, kind, body, NO_STORE)

    def _runs_page(self) -> bytes:
        return page.runs_page(as_values(self._board.listing())).encode()

    def _run_page(self, run: str, choice: page.Choice) -> Body | None:
        """The page of a run; pages with a reader's choice are not cached, since their number is unbounded."""
        if choice == page.Choice():
            return self._board.body(f"page/{run}", lambda: self._written(run, choice))
        content = self._written(run, choice)
        return None if content is None else Body.of(content)

    def _written(self, run: str, choice: page.Choice) -> bytes | None:
        found = self._board.snapshot(run)
        return None if found is None else page.run_page(as_values(found), choice).encode()

    def _run_update(self, run: str, choice: page.Choice) -> Body | None:
        update = self._board.run_update(run, choice)
        return None if update is None else Body.of(page.message(update))

    def _targets(self) -> Answer:
        reading = self._board.reading
        if reading.read_at is None:  # on an error Prometheus keeps its targets; an empty list would drop them
            return text(503, "the store has not been read yet")
        return Answer(200, JSON, Body.of(json.dumps(targets(reading, self._forget_s)).encode()), NO_STORE)


def targets(reading: StoreReading, forget_s: float = FORGET_S) -> list[dict[str, object]]:
    """The endpoints of all present nodes, in Prometheus's http_sd format."""
    return [
        {"targets": [address], "labels": {"__scheme__": scheme, "run": run, "node": node}}
        for run, each in sorted(reading.runs.items())
        if not each.forgotten(forget_s)
        for node, scheme, address in _endpoints(each)
    ]


def _endpoints(run: RunReading) -> list[tuple[str, str, str]]:
    """Name, scheme and address of each node whose health document names an endpoint."""
    found = []
    for name in sorted(run.documents.live):
        health = run.documents.health.get(name)
        told = TARGET.fullmatch(health.metrics) if health is not None else None
        if told is not None:
            found.append((name, told[1], told[2]))
    return found


def _static(name: str, known: str) -> Answer:
    """A file of the page, looked up by its name among the existing ones, never opened as a path."""
    found = page.static(name) if STATIC_NAME.fullmatch(name) else None
    if found is None:
        return text(404, "there is no such file")
    content, kind = found
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}  # cached, but revalidated each time
    if tag in {each.strip().removeprefix("W/") for each in known.split(",")}:
        return Answer(304, kind, Body(b"", None), headers)
    return Answer(200, kind, Body.of(content), headers)
