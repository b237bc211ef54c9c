"""The monitor: one thread that reads the store, and a server that answers from the newest reading.

*Runs in* the process of ``elastic-trainer monitor``.
*Owns* the polling thread (``monitor``) and the server; the store is its caller's.
*Fails by* ConfigError when it cannot listen. It survives an unreachable store.
*Invariant*: it keeps state only in memory, so several may run and any may be restarted.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

from elastic_trainer.clock import SYSTEM, Clock, pause
from elastic_trainer.monitor import page
from elastic_trainer.monitor.metrics import MonitorCollector
from elastic_trainer.monitor.reading import FORGET_S, Pacing, Reader, RunReading, StoreReading
from elastic_trainer.monitor.snapshot import Listing, RunSnapshot, as_json, as_values, listing, snapshot, summary
from elastic_trainer.store.api import Store
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.web.server import (
    HTML,
    JSON,
    NO_STORE,
    Access,
    Answer,
    Body,
    Request,
    Server,
    Stream,
    guarded,
    metrics,
    text,
)


class Board:
    """See the module."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._reading = StoreReading()
        self._published_at = clock.monotonic()
        self._making = threading.Lock()
        self._bodies: dict[str, Body] = {}
        self._updates: dict[str, page.Update | None] = {}
        self._bodies_of = -1
        self._closed = False

    @property
    def reading(self) -> StoreReading:
        """The newest reading."""
        return self._reading

    @property
    def closed(self) -> bool:
        """Whether no other reading will follow."""
        return self._closed

    @property
    def published_s(self) -> float:
        """Seconds since the newest reading was published."""
        return self._clock.monotonic() - self._published_at

    @property
    def unread_s(self) -> float | None:
        """Seconds since the store was last read; None: never."""
        read_at = self._reading.read_at
        return None if read_at is None else self._clock.monotonic() - read_at

    def publish(self, reading: StoreReading) -> None:
        """Make ``reading`` the newest."""
        with self._changed:
            self._reading, self._published_at = reading, self._clock.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads; no other reading will follow."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, serial: int, timeout_s: float) -> StoreReading:
        """The newest reading, as soon as its serial differs from ``serial`` or ``timeout_s`` seconds have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._reading.serial != serial or self._closed, timeout_s)
            return self._reading

    def snapshot(self, run: str) -> RunSnapshot | None:
        """The run of this name; None if there is none."""
        reading = self._reading
        found = reading.runs.get(run)
        return None if found is None else snapshot(found.documents, found.seen, reading.store)

    def listing(self) -> Listing:
        """All runs."""
        reading = self._reading
        rows = [summary(each.documents, each.seen) for each in reading.runs.values()]
        return listing(rows, reading.store, reading.wall)

    def run_body(self, run: str) -> Body | None:
        """The JSON of a run."""
        return self.body(f"run/{run}", lambda: _encoded(self.snapshot(run)))

    def list_body(self) -> Body | None:
        """The JSON of the list."""
        return self.body("list", lambda: _encoded(self.listing()))

    def runs_update(self) -> page.Update:
        """The page of the list."""
        return page.runs_update(as_values(self.listing()))

    def run_update(self, run: str, choice: page.Choice) -> page.Update | None:
        """The page of the run for a reader's ``choice``; the default one is rendered once for all."""
        if choice != page.Choice():
            return self._update(run, choice)
        with self._making:
            self._forget_older()
            if run not in self._updates:
                self._updates[run] = self._update(run, choice)
            return self._updates[run]

    def _update(self, run: str, choice: page.Choice) -> page.Update | None:
        found = self.snapshot(run)
        return None if found is None else page.run_update(as_values(found), choice)

    def body(self, key: str, make: Callable[[], bytes | None]) -> Body | None:
        """The result of ``make()`` for the newest reading, computed once; None is not cached."""
        with self._making:
            self._forget_older()
            if key not in self._bodies:
                content = make()
                if content is None:
                    return None
                self._bodies[key] = Body.of(content)
            return self._bodies[key]

    def _forget_older(self) -> None:
        """Drop the bodies of the previous reading."""
        serial = self._reading.serial
        if serial != self._bodies_of:
            self._bodies, self._updates, self._bodies_of = {}, {}, serial


def _encoded(value: object | None) -> bytes | None:
    return None if value is None else as_json(value)


STREAM_EVERY_S = 0.9
"""Seconds between two events of a stream: a poll of the store, less its jitter."""
STREAM_BYTES_PER_S = 1e6
"""Snapshots of thousands of ranks are sent less often: a megabyte is about 4,000 ranks."""
KEEP_ALIVE_S = 15.0
AGES_EVERY_S = 5.0
"""Seconds after which a page is updated although only ages have changed; the page treats 10 s of silence as a dead
stream."""
WAIT_STEP_S = 1.0
RETRY_MS = 2000


def snapshots(board: Board, run: str) -> Iterator[bytes]:
    """A snapshot when the run has changed, a comment when it has not for a while."""

    def snapshot() -> bytes | None:
        body = board.run_body(run)
        return None if body is None else body.plain

    return _events(board, run, snapshot, lambda: b": nothing new\n\n", KEEP_ALIVE_S)


def updates(board: Board, run: str, choice: page.Choice) -> Iterator[bytes]:
    """The whole page, then its changes."""
    before = page.NOTHING

    def update() -> bytes | None:
        nonlocal before
        now = board.run_update(run, choice)
        if now is None:
            return None
        told = page.message(now, before)
        before = now
        return told

    return _events(board, run, update, lambda: _event(update()), AGES_EVERY_S)


def _events(
    board: Board, run: str, make: Callable[[], bytes | None], idle: Callable[[], bytes], idle_s: float
) -> Iterator[bytes]:
    """The result of ``make`` when the run has changed, ``idle`` when it has not for ``idle_s`` seconds."""
    reading, sent, sent_at, due_at = board.reading, None, SYSTEM.monotonic(), -math.inf
    yield f"retry: {RETRY_MS}\n\n".encode()
    while not board.closed and run in reading.runs:
        now, mark = SYSTEM.monotonic(), (reading.runs[run].documents.serial, reading.store.connected)
        if mark != sent and now >= due_at and (content := make()) is not None:
            yield _event(content)
            sent, sent_at = mark, now
            due_at = now + max(STREAM_EVERY_S, len(content) / STREAM_BYTES_PER_S)
        elif now - sent_at >= idle_s:
            yield idle()
            sent_at = now
        wait_s = WAIT_STEP_S if mark == sent else min(WAIT_STEP_S, max(0.0, due_at - now))
        reading = board.wait(reading.serial, wait_s)


def _event(content: bytes | None) -> bytes:
    return b": nothing new\n\n" if content is None else b"data: " + content + b"\n\n"


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
                names = ", ".join(sorted(self._board.reading.runs)[:20]) or "none"
                return text(404, f"there is no run {run[:128]!r}; there are: {names}")
            case ["runs", run]:
                return self._answer(HTML, self._run_page(run, page.Choice.of(request.query)))
            case ["runs", run, "update"]:
                found = self._board.run_update(run, page.Choice.of(request.query))
                return self._answer(JSON, Body.of(page.message(found)) if found is not None else None)
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


DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9470


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """The address to listen on, and the access control."""

    prefix: str
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    access: Access = field(default_factory=Access)
    context: ssl.SSLContext | None = None
    forget_s: float = FORGET_S


class Monitor:
    """See the module. A context manager that starts and stops it."""

    def __init__(self, store: Store, options: MonitorOptions) -> None:
        self._reader = Reader(store, options.prefix, forget_s=options.forget_s)
        self.board = Board()
        site = MonitorSite(self.board, options.access, forget_s=options.forget_s)
        self._server = Server(options.host, options.port, site, options.context)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="monitor", daemon=True)
        scheme = "https" if options.context is not None else "http"
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"{scheme}://{host}:{self._server.port}"

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    def __enter__(self) -> Self:
        self._thread.start()
        self._server.start()
        logger().info("monitor.started", url=self.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.board.close()
        self._server.stop()
        self._thread.join(timeout=2.0)  # a poll may be waiting for the store; the thread is a daemon
        logger().info("monitor.stopped")

    def _poll(self) -> None:
        pacing = Pacing()
        while not self._stopped.is_set():
            began = SYSTEM.monotonic()
            connected = False
            try:
                reading = self._reader.poll()
                connected = reading.store.connected
                self.board.publish(reading)
            except Exception:  # noqa: BLE001 - thread edge: an unexpected document must not stop the monitor
                logger().exception("poll.failed")
            pause(pacing.pause_s(SYSTEM.monotonic() - began, connected), self._stopped)
