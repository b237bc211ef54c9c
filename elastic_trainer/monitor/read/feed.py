"""Reads one run from the store: only what may have changed, in pages of bounded size.

*Runs in* the thread that reads the store. *Owns* the run's decoded documents.
*Fails by* the store's errors; then it keeps what was read before.
*Invariant*: a node's counts are read exactly once, from its own document or from that of the nodes that have left, so
sums never decrease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from elastic_trainer.clock import Deadline
from elastic_trainer.ipc.messages import Progress
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import (
    GONE,
    Departure,
    DocumentError,
    Incident,
    JournalEntry,
    NodeHealth,
    NodeRecord,
    RoundDocument,
    Spec,
)
from elastic_trainer.model import is_name
from elastic_trainer.monitor.model.contents import RunDocuments
from elastic_trainer.monitor.read.document_cache import DocumentCache
from elastic_trainer.store.api import KeyValue, Read, RunKeys, Snapshot, Store, prefix_end
from elastic_trainer.store.untrusted import cleaned, plain

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
        self._health: DocumentCache[NodeHealth] = DocumentCache(lambda item: NodeHealth.decode(item.value, item.key))
        self._journal: DocumentCache[JournalEntry] = DocumentCache(
            lambda item: JournalEntry.decode(item.value, item.key)
        )
        self._incidents: DocumentCache[Incident] = DocumentCache(lambda item: Incident.decode(item.value, item.key))
        self._round_revision = 0

    def read(self, deadline: Deadline) -> RunDocuments:
        """Read the run."""
        keys = self._keys
        single = [Read(keys.spec), Read(keys.round), Read(keys.progress), Read(keys.departure)]
        pages = [_page(keys.nodes), _page(keys.health), _page(keys.incidents, keys_only=True)]
        *found, nodes, health, incidents = self._ask([*single, *pages], deadline)
        self._single.replace(item for snapshot in found for item in snapshot.items)
        self._nodes.replace(self._rest(keys.nodes, nodes, deadline))
        self._health.replace(self._undivided(health, deadline))
        listed = self._rest(keys.incidents, incidents, deadline, keys_only=True)
        self._newest(listed, self._incidents, self._most_incidents, deadline)
        self._read_journal(found[1], deadline)
        return self._documents()

    def read_history(self, deadline: Deadline) -> RunDocuments:
        """Read only journal and incidents."""
        reads = [Read(self._keys.round), _page(self._keys.incidents, keys_only=True)]
        round_, incidents = self._ask(reads, deadline)
        listed = self._rest(self._keys.incidents, incidents, deadline, keys_only=True)
        self._newest(listed, self._incidents, self._most_incidents, deadline)
        self._read_journal(round_, deadline)
        return self._documents()

    def _read_journal(self, round_: Snapshot, deadline: Deadline) -> None:
        revision = round_.first.mod_revision if round_.first is not None else 0
        if revision == self._round_revision:  # entries are written together with the round document
            return
        (first,) = self._ask([_page(self._keys.events, keys_only=True)], deadline)
        listed = self._rest(self._keys.events, first, deadline, keys_only=True)
        self._newest(listed, self._journal, self._most_journal, deadline)
        self._round_revision = revision

    def _newest(self, listed: Sequence[KeyValue], cache: DocumentCache[Any], count: int, deadline: Deadline) -> None:
        """Update ``cache`` to the ``count`` newest of the ``listed`` documents."""
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
        shelves: tuple[DocumentCache[Any], ...] = (
            self._single,
            self._nodes,
            self._health,
            self._journal,
            self._incidents,
        )
        single = {key: document for key, _, document in self._single.items}
        keys = (self._keys.spec, self._keys.round, self._keys.progress, self._keys.departure)
        spec, round_, progress, departure = (single.get(key) for key in keys)
        return RunDocuments(
            run=self._keys.run_id,
            spec=spec if isinstance(spec, Spec) else None,
            round=round_ if isinstance(round_, RoundDocument) else None,
            progress=progress if isinstance(progress, Progress) else None,
            departure=departure if isinstance(departure, Departure) else None,
            nodes={view.id: view for view in self._nodes.documents},
            health={
                name: document
                for key, _, document in self._health.items
                if is_name(name := key.removeprefix(self._keys.health)) or name == GONE
            },
            journal=tuple(document for _, _, document in sorted(self._journal.items, key=_by_revision)),
            incidents=tuple(document for _, _, document in sorted(self._incidents.items, key=_by_revision)),
            unreadable=tuple(plain(key) for cache in shelves for key in cache.refused),
            round_revision=self._round_revision,
            serial=self._first_serial + sum(cache.changes for cache in shelves),
        )

    def _decode_single(self, item: KeyValue) -> BaseModel:
        if item.key == self._keys.spec:
            return Spec.decode(item.value, item.key)
        if item.key == self._keys.round:
            return RoundDocument.decode(item.value, item.key)
        if item.key == self._keys.departure:
            return Departure.decode(item.value, item.key)
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


def _by_revision(item: tuple[str, int, Any]) -> int:
    return item[1]
