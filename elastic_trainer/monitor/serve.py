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
from typing import Any, Self, TypeVar

from elastic_trainer.clock import SYSTEM, Clock, pause
from elastic_trainer.monitor import page
from elastic_trainer.monitor.metrics import MonitorCollector
from elastic_trainer.monitor.reading import FORGET_S, Pacing, Reader, StoreReading
from elastic_trainer.monitor.snapshot import Listing, RunSnapshot, as_json, as_values, listing, snapshot, summary
from elastic_trainer.store.api import Store
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.web.server import (
    HEALTH,
    HTML,
    JSON,
    NO_STORE,
    READINESS,
    Access,
    Answer,
    Body,
    Request,
    Server,
    Stream,
    metrics,
    refusal,
    text,
)

MadeT = TypeVar("MadeT")


class Board:
    """The newest reading; what answers need of it is made once for all readers."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock, self._changed, self._making = clock, threading.Condition(), threading.Lock()
        self.reading = StoreReading()
        """The newest."""
        self.closed = False
        """Whether no other reading will follow."""
        self._published_at = clock.monotonic()
        self._made: dict[str, Any] = {}
        self._made_of = -1

    @property
    def published_s(self) -> float:
        return self._clock.monotonic() - self._published_at

    @property
    def unread_s(self) -> float | None:
        """Seconds since the store was last read; None: never."""
        read_at = self.reading.read_at
        return None if read_at is None else self._clock.monotonic() - read_at

    def publish(self, reading: StoreReading) -> None:
        with self._changed:
            self.reading, self._published_at = reading, self._clock.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads; no other reading will follow."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wait(self, serial: int, timeout_s: float) -> StoreReading:
        """The newest reading, as soon as its serial differs from ``serial`` or ``timeout_s`` seconds have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self.reading.serial != serial or self.closed, timeout_s)
            return self.reading

    def listing(self) -> Listing:
        reading = self.reading
        rows = [summary(each.documents, each.seen) for each in reading.runs.values()]
        return listing(rows, reading.store, reading.wall)

    def of_run(self, run: str, make: Callable[[RunSnapshot], MadeT]) -> MadeT | None:
        """What ``make`` makes of the run's snapshot; None if there is no such run."""
        reading = self.reading
        found = reading.runs.get(run)
        return None if found is None else make(snapshot(found.documents, found.seen, reading.store))

    def run_body(self, run: str) -> Body | None:
        return self.once(f"run/{run}", lambda: self.of_run(run, lambda found: Body.compressed(as_json(found))))

    def run_update(self, run: str, choice: page.Choice) -> page.Update | None:
        """The page of the run for a reader's ``choice``, as an update."""
        return self._for_reader("update", run, choice, page.run_update)

    def run_page(self, run: str, choice: page.Choice) -> Body | None:
        """The same as a whole page."""
        return self._for_reader(
            "page", run, choice, lambda found, chosen: Body.compressed(page.run_page(found, chosen).encode())
        )

    def _for_reader(
        self, kind: str, run: str, choice: page.Choice, make: Callable[[dict[str, Any], page.Choice], MadeT]
    ) -> MadeT | None:
        """What ``make`` makes of the run; kept for the default choice alone, as the number of others is unbounded."""

        def made() -> MadeT | None:
            return self.of_run(run, lambda found: make(as_values(found), choice))

        return self.once(f"{kind}/{run}", made) if choice == page.ALL else made()

    def once(self, key: str, make: Callable[[], MadeT]) -> MadeT:
        """The result of ``make()`` for the newest reading, computed once."""
        with self._making:
            if self._made_of != self.reading.serial:
                self._made, self._made_of = {}, self.reading.serial
            if key not in self._made:
                self._made[key] = make()
            made: MadeT = self._made[key]
            return made


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

    def encoded() -> bytes | None:
        return None if (body := board.run_body(run)) is None else body.plain

    return _events(board, run, encoded, lambda: _event(None), KEEP_ALIVE_S)


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
        stuck, unread_s = self._board.published_s > STUCK_S, self._board.unread_s
        late = f"the store was last read {unread_s:.0f} s ago" if (unread_s or 0.0) > UNREAD_LIMIT_S else ""
        probes = {
            HEALTH: "the monitor has stopped reading the store" if stuck else "",
            READINESS: "the store has not been read yet" if unread_s is None else late,
        }
        return refusal(request, self._access, probes) or self._content(request.path, request)

    def _content(self, path: str, request: Request) -> Answer | Stream:
        board, choice = self._board, page.Choice.parse(request.query)
        match path.split("/")[1:]:
            case [""]:
                return self._list(HTML, "page", choice, lambda listed: page.runs_page(listed, choice).encode())
            case ["update"]:
                return self._list(JSON, "update", choice, lambda listed: page.message(page.runs_update(listed, choice)))
            case ["runs", run, *_] | ["api", "runs", run, *_] if run not in board.reading.runs:
                names = ", ".join(sorted(board.reading.runs)[:20]) or "none"
                return text(404, f"there is no run {run[:128]!r}; there are: {names}")
            case ["runs", run]:
                return _answer(HTML, board.run_page(run, choice))
            case ["runs", run, "update"]:
                found = board.run_update(run, choice)
                return _answer(JSON, Body.compressed(page.message(found)) if found is not None else None)
            case ["runs", run, "stream"]:
                return Stream(run, lambda: updates(board, run, choice))
            case ["static", name]:
                return _static(name, request.headers.get("if-none-match", ""))
            case ["api", "runs"]:
                return self._once(JSON, "list", lambda: as_json(board.listing()))
            case ["api", "runs", run]:
                return _answer(JSON, board.run_body(run))
            case ["api", "runs", run, "stream"]:
                return Stream(run, lambda: snapshots(board, run))
            case ["metrics"]:
                return metrics(self._collector, request.headers.get("accept", ""))
            case ["sd", "nodes"] if board.reading.read_at is None:
                # On an error Prometheus keeps its targets; an empty list would drop them.
                return text(503, "the store has not been read yet")
            case ["sd", "nodes"]:
                return _answer(JSON, Body.compressed(json.dumps(targets(board.reading, self._forget_s)).encode()))
        return text(404, "not found")

    def _list(self, kind: str, key: str, choice: page.Choice, make: Callable[[dict[str, Any]], bytes]) -> Answer:
        """What ``make`` makes of all runs; kept for the default choice alone."""

        def made() -> bytes:
            return make(as_values(self._board.listing()))

        return self._once(kind, key, made) if choice == page.ALL else _answer(kind, Body.compressed(made()))

    def _once(self, kind: str, key: str, make: Callable[[], bytes]) -> Answer:
        return _answer(kind, self._board.once(key, lambda: Body.compressed(make())))


def _answer(kind: str, body: Body | None) -> Answer:
    return text(404, "not found") if body is None else Answer(200, kind, body, NO_STORE)


def targets(reading: StoreReading, forget_s: float = FORGET_S) -> list[dict[str, object]]:
    """The endpoints of all present nodes whose health document names one, in Prometheus's http_sd format."""
    return [
        {"targets": [told[2]], "labels": {"__scheme__": told[1], "run": run, "node": node}}
        for run, each in sorted(reading.runs.items())
        if not each.forgotten(forget_s)
        for node in sorted(each.documents.living_nodes.keys() & each.documents.health.keys())
        if (told := TARGET.fullmatch(each.documents.health[node].metrics)) is not None
    ]


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
    return Answer(200, kind, Body.compressed(content), headers)


DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9470
OPEN = Access()


class Monitor:
    """See the module. A context manager that starts and stops it."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        access: Access = OPEN,
        context: ssl.SSLContext | None = None,
        forget_s: float = FORGET_S,
    ) -> None:
        self._reader = Reader(store, prefix, forget_s=forget_s)
        self.board = Board()
        site = MonitorSite(self.board, access, forget_s=forget_s)
        self._server = Server(host, port, site.answer, context)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="monitor", daemon=True)
        self.port = self._server.port
        self.url = self._server.url()

    def __enter__(self) -> Self:
        self._thread.start()
        self._server.start()
        logger().info("monitor.started", url=self.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.board.close()
        self._server.close()
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
