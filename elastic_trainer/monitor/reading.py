"""Reads all runs of the store at a bounded rate, for all readers: a request to the monitor causes none to etcd.

A running run is read in one request for each 500 nodes, and only changes are decoded. A run that is over or has no
nodes rests: it is only checked for signs of life, many runs in one request.

*Runs in* the thread that calls :meth:`Reader.poll`: the monitor's own, or the main thread of a command.
*Owns* the data that it has read. *Fails by* nothing in :meth:`Reader.poll`: while the store is unreachable it keeps
what was read before, and :attr:`StoreReading.store` gives its age.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import (
    GONE,
    Departure,
    Document,
    DocumentError,
    Incident,
    JournalEntry,
    NodeHealth,
    NodeRecord,
    RoundDocument,
    Spec,
)
from elastic_trainer.model import is_name
from elastic_trainer.monitor.snapshot import StoreStatus
from elastic_trainer.monitor.state import Observed, Observer, RunDocuments
from elastic_trainer.store.api import EventKind, KeyValue, Read, RunKeys, Snapshot, Store, WatchEvent, prefix_end
from elastic_trainer.store.untrusted import cleaned, plain
from elastic_trainer.telemetry.logs import logger

DocumentT = TypeVar("DocumentT")


class DocumentCache(Generic[DocumentT]):
    """See the module; ``decode`` raises ElasticTrainerError for content that it cannot read."""

    def __init__(self, decode: Callable[[KeyValue], DocumentT]) -> None:
        self._decode = decode
        self._kept: dict[str, tuple[int, DocumentT]] = {}
        self._refused: dict[str, int] = {}
        self.changes = 0
        """Increases with each change."""

    def replace(self, items: Iterable[KeyValue]) -> None:
        """Make ``items`` the complete contents."""
        present = set()
        for item in items:
            present.add(item.key)
            self.put(item)
        self.retain(present)

    def put(self, item: KeyValue) -> None:
        if self.knows(item):
            return
        self.changes += 1
        try:
            self._kept[item.key] = (item.mod_revision, self._decode(item))
            self._refused.pop(item.key, None)
        except ElasticTrainerError as error:
            if item.key not in self._refused:
                logger().warning("document.refused", key=plain(item.key), error=str(error))
            self._refused[item.key] = item.mod_revision

    def retain(self, keys: Iterable[str]) -> None:
        present = set(keys)
        for gone in [key for key in (*self._kept, *self._refused) if key not in present]:
            self.changes += 1
            self._kept.pop(gone, None)
            self._refused.pop(gone, None)

    def knows(self, item: KeyValue) -> bool:
        kept = self._kept.get(item.key)
        return (kept is not None and kept[0] == item.mod_revision) or self._refused.get(item.key) == item.mod_revision

    @property
    def items(self) -> list[tuple[str, int, DocumentT]]:
        return [(key, *self._kept[key]) for key in sorted(self._kept)]

    @property
    def refused(self) -> list[str]:
        return sorted(self._refused)


PAGE = 500
"""Maximum keys of one read: half a megabyte for nodes with 8 ranks each."""
BATCH = 32
"""Maximum single keys of one request: the journal entry of a round of 1,000 nodes has 25 KB."""
JOURNAL = 200
INCIDENTS = 100
ATTEMPTS = 3


class RunFeed:
    """See the module. Serials start at ``serial``."""

    def __init__(
        self, store: Store, keys: RunKeys, *, journal: int = JOURNAL, incidents: int = INCIDENTS, serial: int = 0
    ) -> None:
        self._store, self._keys, self._first_serial = store, keys, serial
        self._most_journal, self._most_incidents = journal, incidents
        self._single: DocumentCache[BaseModel] = DocumentCache(self._decode_single)
        self._nodes: DocumentCache[NodeView] = DocumentCache(self._decode_node)
        self._health = DocumentCache(lambda item: NodeHealth.decode(item.value, item.key))
        self._journal = DocumentCache(lambda item: JournalEntry.decode(item.value, item.key))
        self._incidents = DocumentCache(lambda item: Incident.decode(item.value, item.key))
        self._round_revision = 0

    def read(self, deadline: Deadline) -> RunDocuments:
        keys = self._keys
        single = [Read(keys.spec), Read(keys.round), Read(keys.progress), Read(keys.departure)]
        pages = [_page(keys.nodes), _page(keys.health), _page(keys.incidents, keys_only=True)]
        *found, nodes, health, incidents = self._ask([*single, *pages], deadline)
        self._single.replace(item for snapshot in found for item in snapshot.items)
        self._nodes.replace(self._rest(keys.nodes, nodes, deadline))
        self._health.replace(self._undivided(health, deadline))
        self._read_history(found[1], incidents, deadline)
        return self._documents()

    def read_history(self, deadline: Deadline) -> RunDocuments:
        """Read only journal and incidents."""
        reads = [Read(self._keys.round), _page(self._keys.incidents, keys_only=True)]
        round_, incidents = self._ask(reads, deadline)
        self._read_history(round_, incidents, deadline)
        return self._documents()

    def _read_history(self, round_: Snapshot, incidents: Snapshot, deadline: Deadline) -> None:
        listed = self._rest(self._keys.incidents, incidents, deadline, keys_only=True)
        self._newest(listed, self._incidents, self._most_incidents, deadline)
        revision = round_.first.mod_revision if round_.first is not None else 0
        if revision == self._round_revision:  # entries are written together with the round document
            return
        (first,) = self._ask([_page(self._keys.events, keys_only=True)], deadline)
        listed = self._rest(self._keys.events, first, deadline, keys_only=True)
        self._newest(listed, self._journal, self._most_journal, deadline)
        self._round_revision = revision

    def _newest(self, listed: Sequence[KeyValue], cache: DocumentCache[Any], count: int, deadline: Deadline) -> None:
        newest = sorted(listed, key=lambda item: item.mod_revision)[-count:]
        wanted = [item.key for item in newest if not cache.knows(item)]
        for start in range(0, len(wanted), BATCH):
            for snapshot in self._ask([Read(key) for key in wanted[start : start + BATCH]], deadline):
                for item in snapshot.items:
                    cache.put(item)
        cache.retain(item.key for item in newest)

    def _undivided(self, first: Snapshot, deadline: Deadline) -> list[KeyValue]:
        """All health documents; reads again if counts moved between documents between two pages."""
        keys = self._keys
        found: list[KeyValue] = []
        for _ in range(ATTEMPTS):
            found = self._rest(keys.health, first, deadline)
            if len(found) < PAGE:
                break
            (gone,) = self._ask([Read(keys.health + GONE, keys_only=True)], deadline)
            if gone.first is None or gone.first.mod_revision <= first.revision:
                break
            (first,) = self._ask([_page(keys.health)], deadline)
        return found

    def _rest(self, prefix: str, first: Snapshot, deadline: Deadline, *, keys_only: bool = False) -> list[KeyValue]:
        """All items below ``prefix``; ``first`` is their first page."""
        found, page = list(first.items), first
        while len(page.items) >= PAGE:
            (page,) = self._ask([_page(prefix, found[-1].key, keys_only=keys_only)], deadline)
            found += page.items
        return found

    def _ask(self, reads: Sequence[Read], deadline: Deadline) -> tuple[Snapshot, ...]:
        return self._store.transact([], reads, deadline=deadline).reads

    def _documents(self) -> RunDocuments:
        shelves: list[DocumentCache[Any]] = [self._single, self._nodes, self._health, self._journal, self._incidents]
        single = {key: document for key, _, document in self._single.items}
        keys = (self._keys.spec, self._keys.round, self._keys.progress, self._keys.departure)
        spec, round_, progress, departure = (single.get(key) for key in keys)
        return RunDocuments(
            run=self._keys.run_id,
            spec=spec if isinstance(spec, Spec) else None,
            round=round_ if isinstance(round_, RoundDocument) else None,
            progress=progress if isinstance(progress, Progress) else None,
            departure=departure if isinstance(departure, Departure) else None,
            nodes={view.id: view for _, _, view in self._nodes.items},
            health={
                name: document
                for key, _, document in self._health.items
                if is_name(name := key.removeprefix(self._keys.health)) or name == GONE
            },
            journal=tuple(document for _, _, document in sorted(self._journal.items, key=itemgetter(1))),
            incidents=tuple(document for _, _, document in sorted(self._incidents.items, key=itemgetter(1))),
            unreadable=tuple(plain(key) for cache in shelves for key in cache.refused),
            round_revision=self._round_revision,
            serial=self._first_serial + sum(cache.changes for cache in shelves),
        )

    def _decode_single(self, item: KeyValue) -> BaseModel:
        kinds: dict[str, type[Document]] = {
            self._keys.spec: Spec,
            self._keys.round: RoundDocument,
            self._keys.departure: Departure,
        }
        if item.key in kinds:
            return kinds[item.key].decode(item.value, item.key)
        try:
            return Progress.model_validate_json(cleaned(item.value))
        except ValueError as error:
            raise DocumentError(f"key {item.key!r} holds no progress of this version") from error

    def _decode_node(self, item: KeyValue) -> NodeView:
        name = self._keys.node_id(item.key)
        if name is None:
            raise DocumentError(f"key {item.key!r} has an invalid node name")
        return NodeView(name, item.create_revision, item.mod_revision, NodeRecord.decode(item.value, item.key))


def _page(prefix: str, after: str | None = None, *, keys_only: bool = False) -> Read:
    """The first keys below ``prefix`` after the key ``after``."""
    return Read(prefix if after is None else after + "\0", prefix_end(prefix), limit=PAGE, keys_only=keys_only)


class Changes:
    """Follows keys: each version of each comes once into ``queue``, whatever becomes of the connection.

    With when it came (monotonic seconds); None stands behind the first items of each of ``keys``. Closing the store
    ends it.
    """

    def __init__(self, store: Store, *keys: str, exact: bool = False) -> None:
        self.queue: SimpleQueue[tuple[KeyValue | None, float]] = SimpleQueue()
        self._seen: dict[str, int] = {}
        for key in keys:
            store.watch(key, self, exact=exact)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._put(snapshot.items)
        self.queue.put((None, SYSTEM.monotonic()))

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        self._put(event.item for event in events if event.kind is EventKind.PUT)

    def on_connected(self, connected: bool) -> None:
        """Nothing to do: the watch resumes by itself, and says so in the log."""

    def _put(self, items: Iterable[KeyValue]) -> None:
        for item in items:
            if self._seen.get(item.key) != item.mod_revision:  # a snapshot after an outage repeats what is known
                self._seen[item.key] = item.mod_revision
                self.queue.put((item, SYSTEM.monotonic()))


EVERY_S = 1.0
SHARE = 0.2
"""Maximum share of time in which polls may occupy the store and this process: longer polls cause longer pauses."""
DISCOVER_EVERY_S = 5.0
QUIET_S = 60.0
"""Seconds without a change after which a run without nodes rests."""
READ_LIMIT_S = 5.0
FORGET_S = 3600.0
DESERTED_S = 86400.0
REST_S = 600.0
"""A run that had ended this many seconds before the first look rests at once."""
DISCOVER_LIMIT_S = 2.0
"""Maximum seconds that a poll looks for runs; the next poll continues where it stopped."""
MOST_RUNS = 2000
AFTER_SLASH = chr(ord("/") + 1)
RESTING_BATCH = 50
"""Runs checked for signs of life in one request: two reads each, and etcd accepts 128."""


@dataclass(frozen=True, slots=True)
class RunReading:
    """One run: its documents, and its observations over time."""

    documents: RunDocuments
    seen: Observed

    def forgotten(self, forget_s: float) -> bool:
        """Whether it is no longer shown: over for ``forget_s`` seconds, or without nodes for a day."""
        limit_s = forget_s if self.documents.closed else max(forget_s, DESERTED_S)
        return self.seen.over_s is not None and self.seen.over_s >= limit_s


@dataclass(frozen=True, slots=True)
class StoreReading:
    """All runs by name."""

    runs: Mapping[str, RunReading] = field(default_factory=dict)
    store: StoreStatus = field(default=StoreStatus(False, None))
    read_at: float | None = None
    """When the store was last read (monotonic seconds); None: never."""
    read_wall: float | None = None
    """The same as Unix time."""
    wall: float = 0.0
    serial: int = 0
    """Increases with each poll."""
    problem: str = ""


class _Followed:
    """A run that is read repeatedly."""

    def __init__(self, store: Store, keys: RunKeys, now: float) -> None:
        self._store, self.keys = store, keys
        self._feed = RunFeed(store, keys)
        self._observer = Observer()
        self._changed_at = now
        self.documents = RunDocuments(keys.run_id)
        self.resting = False
        self._folded = False

    def read(self, deadline: Deadline, now: float) -> None:
        documents = self._feed.read(deadline)
        if documents.serial != self.documents.serial:
            self._changed_at = now
        self._folded, self.documents = False, documents
        self.resting = not documents.nodes and now - self._changed_at >= QUIET_S

    def look(self, now: float, wall: float, forget_s: float, *, known: bool) -> RunReading:
        reading = RunReading(self.documents, self._observer.observe(self.documents, now, wall, known=known))
        self.resting |= not self.documents.nodes and (reading.seen.over_s or 0.0) >= REST_S
        if self.resting and not self._folded and reading.forgotten(forget_s):
            self._folded, self.documents = True, self.documents.folded()
            self._feed = RunFeed(self._store, self.keys, serial=self.documents.serial + 1)
        return reading


class Reader:
    """See the module. ``only``: the one run to read. ``forget_s``: see RunReading.forgotten."""

    def __init__(
        self, store: Store, prefix: str, *, only: str | None = None, forget_s: float = FORGET_S, clock: Clock = SYSTEM
    ) -> None:
        self._store, self._prefix, self._only, self._forget_s, self._clock = store, prefix, only, forget_s, clock
        self._followed: dict[str, _Followed] = {}
        self._discover_at = clock.monotonic()
        self._found: set[str] = set()
        self._found_last = ""
        self._too_many = False
        self._read_at: float | None = None
        self._read_wall: float | None = None
        self._serial = 0
        self._problem = ""

    def poll(self, limit_s: float = READ_LIMIT_S) -> StoreReading:
        """Read what may have changed; a read of one run longer than ``limit_s`` seconds counts as unreachable."""
        try:
            self._read(limit_s)
        except ElasticTrainerError as error:
            if not self._problem:
                logger().warning("store.lost", error=str(error))
            self._problem = str(error)
        else:
            if self._problem:
                logger().info("store.regained")
            self._problem = ""
            self._read_at, self._read_wall = self._clock.monotonic(), self._clock.wall()
        return self._reading()

    def _read(self, limit_s: float) -> None:
        self._discover(limit_s)
        self._wake([each for each in self._followed.values() if each.resting], limit_s)
        for followed in self._followed.values():
            if not followed.resting:
                followed.read(Deadline.after(limit_s, self._clock), self._clock.monotonic())

    def _discover(self, limit_s: float) -> None:
        start = self._clock.monotonic()
        if start < self._discover_at:
            return
        complete = self._look_for_runs(limit_s)
        for run in sorted(self._found - self._followed.keys()):
            self._followed[run] = _Followed(self._store, RunKeys(self._prefix, run), start)
        if not complete:
            return
        for run in self._followed.keys() - self._found:
            del self._followed[run]
        self._found, self._found_last, now = set(), "", self._clock.monotonic()
        self._discover_at = now + max(DISCOVER_EVERY_S, (now - start) / SHARE)

    def _look_for_runs(self, limit_s: float) -> bool:
        """Collect the names of runs; returns whether that is all."""
        if self._only is not None:
            self._found.add(self._only)
            return True
        limit = Deadline.after(DISCOVER_LIMIT_S, self._clock)
        for name in run_names(self._store, self._prefix, limit_s, after=self._found_last, clock=self._clock):
            self._found.add(name)
            self._found_last = name
            if limit.expired or len(self._found) >= MOST_RUNS:
                break
        else:
            return True
        if len(self._found) < MOST_RUNS:
            return False
        if not self._too_many:
            logger().warning("runs.too_many", prefix=self._prefix, shown=MOST_RUNS)
        self._too_many = True
        return True

    def _wake(self, resting: Sequence[_Followed], limit_s: float) -> None:
        """Let those be read again that have a node, or another round document than when they came to rest."""
        for start in range(0, len(resting), RESTING_BATCH):
            batch, reads = resting[start : start + RESTING_BATCH], list[Read]()
            for keys in (each.keys for each in batch):
                reads.append(Read(keys.round, keys_only=True))
                reads.append(Read(keys.nodes, prefix_end(keys.nodes), limit=1, keys_only=True))
            answers = self._store.transact([], reads, deadline=Deadline.after(limit_s, self._clock)).reads
            for each, round_, nodes in zip(batch, answers[::2], answers[1::2], strict=True):
                revision = round_.first.mod_revision if round_.first is not None else 0
                each.resting = not nodes.items and revision == each.documents.round_revision

    def _reading(self) -> StoreReading:
        now, wall = self._clock.monotonic(), self._clock.wall()
        self._serial += 1
        looked = {
            run: each.look(now, wall, self._forget_s, known=not self._problem) for run, each in self._followed.items()
        }
        runs = {run: reading for run, reading in looked.items() if reading.documents.is_run}
        age_s = None if self._read_at is None else now - self._read_at
        store = StoreStatus(connected=not self._problem, age_s=age_s)
        return StoreReading(runs, store, self._read_at, self._read_wall, wall, self._serial, self._problem)


def run_names(store: Store, prefix: str, limit_s: float, *, after: str = "", clock: Clock = SYSTEM) -> Iterator[str]:
    """The runs below ``prefix``, each found by one small read, however many keys it has.

    In key order, starting after run ``after``; each read may take ``limit_s`` seconds.
    """
    root = f"{prefix}/"
    start = f"{root}{after}{AFTER_SLASH}" if after else root
    while True:
        read = Read(start, prefix_end(root), limit=1, keys_only=True)
        first = store.transact([], [read], deadline=Deadline.after(limit_s, clock)).reads[0].first
        if first is None:
            return
        name, slash, _rest = first.key.removeprefix(root).partition("/")
        start = f"{root}{name}{AFTER_SLASH}" if slash else first.key + "\0"
        if slash and is_name(name):
            yield name


class Pacing:
    """How long to wait between polls, so that they take no more than ``SHARE`` of the time.

    Of the last two polls the shorter one counts: a single long one may be that of a machine that was frozen for a
    moment, and a pause of four times that would make etcd look unreachable.
    """

    def __init__(self) -> None:
        self._last_s = math.inf

    def pause_s(self, poll_s: float, connected: bool) -> float:
        """Seconds to wait after a poll that took ``poll_s`` seconds; a failed poll does not count as work."""
        if not connected:
            return EVERY_S
        usual_s, self._last_s = min(poll_s, self._last_s), poll_s
        return max(EVERY_S - poll_s, usual_s * (1 - SHARE) / SHARE)
