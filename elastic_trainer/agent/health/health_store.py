"""What nodes publish about their workers: each node writes its own document to the store.

*Runs in* any thread. *Fails by* nothing: a document that cannot be written is replaced by the next one; the
caller keeps an incident that could not be written (ElasticTrainerError passes through there).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.membership.documents import GONE, DocumentError, Incident, NodeHealth, added_up
from elastic_trainer.store.api import Delete, KeyValue, Operation, Put, Read, RunKeys, Store, absent, unchanged
from elastic_trainer.store.session import Slot
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger

WRITE_S: Final = 3.0
READ_S: Final = 5.0
INCIDENTS_KEPT: Final = 1000
GONE_KEPT: Final = 256
"""Documents of nodes that are gone that stay; when there are more they are added up."""
_AT_ONCE: Final = 50


def told_by_all(store: Store, keys: RunKeys) -> dict[str, NodeHealth]:
    """The newest document of each node, by name, of those that are gone too. Empty if the store is away."""
    try:
        items = store.range(keys.health, Deadline.after(READ_S)).items
    except ElasticTrainerError as error:
        logger().debug("health.unread", error=str(error))
        return {}
    found = {}
    for item in items:
        try:
            found[item.key.removeprefix(keys.health)] = NodeHealth.decode(item.value, item.key)
        except DocumentError as error:
            logger().debug("health.unreadable", key=plain(item.key), error=str(error))
    return found


class HealthStore:
    """See the module."""

    def __init__(self, store: Store, keys: RunKeys, node: str) -> None:
        self._store, self._keys, self._node = store, keys, node
        self._mine = Slot(store, keys.node_health(node))

    def write(self, health: NodeHealth) -> None:
        try:
            self._mine.replace(health.encode(), Deadline.after(WRITE_S))
        except ElasticTrainerError as error:
            logger().debug("health.not_written", error=str(error))

    def told(self) -> dict[str, NodeHealth]:
        return told_by_all(self._store, self._keys)

    def write_incident(self, incident: Incident) -> None:
        """Add ``incident``, once however often it is tried. Raises ElasticTrainerError when it could not be written."""
        number = int(incident.wall * 1000.0)
        while True:  # two incidents in one millisecond
            key, put = self._keys.incident(number), incident.encode()
            guards, deadline = [absent(key)], Deadline.after(WRITE_S)
            done = self._store.transact(guards, [Put(key, put)], [Read(key)], deadline=deadline)
            there = done.reads[0].first if not done.succeeded else None
            if done.succeeded or (there is not None and there.value == put):
                break
            number += 1
        kept = self._store.range(self._keys.incidents, Deadline.after(READ_S), keys_only=True).items
        if len(kept) > INCIDENTS_KEPT:
            first, last = kept[0].key, kept[-INCIDENTS_KEPT].key
            self._store.transact([], [Delete(first, range_end=last)], deadline=Deadline.after(WRITE_S))

    def fold(self, present: Mapping[str, object]) -> None:
        """If many nodes are gone, add up their counters: the sums stay, their documents are deleted.

        ``present`` are nodes known to be there; the store is asked too, as not every node follows all others.
        What this node counted in a life before is added at once, since its document is about to be replaced.
        """
        try:
            mine = self._store.get(self._keys.node_health(self._node), Deadline.after(READ_S)).first
            if mine is not None:
                self._fold([mine])
            # By name first: each node of many does this when it comes, and all documents are megabytes.
            documents = self._store.range(self._keys.health, Deadline.after(READ_S), keys_only=True).items
            there = self._store.range(self._keys.nodes, Deadline.after(READ_S), keys_only=True).items
            here = {*present, self._node, GONE, *(item.key.removeprefix(self._keys.nodes) for item in there)}
            names = {item.key for item in documents if item.key.removeprefix(self._keys.health) not in here}
            if len(names) <= GONE_KEPT:
                return
            items = self._store.range(self._keys.health, Deadline.after(READ_S)).items
            gone = [item for item in items if item.key in names]
            for begin in range(0, len(gone), _AT_ONCE):
                self._fold(gone[begin : begin + _AT_ONCE])
        except ElasticTrainerError as error:
            logger().debug("health.unfolded", error=str(error))

    def _fold(self, gone: list[KeyValue]) -> None:
        """In one write: the sum is only replaced where it, and all that goes into it, is as it was read."""
        key = self._keys.health + GONE
        before = self._store.get(key, Deadline.after(READ_S)).first
        documents = [NodeHealth.decode(item.value, item.key) for item in (*gone, *([before] if before else []))]
        total = NodeHealth(
            node=GONE,
            wall=max(document.wall for document in documents),
            counters=added_up(document.counters for document in documents),
        )
        guards = [unchanged(item.key, item.mod_revision) for item in gone]
        guards.append(unchanged(key, before.mod_revision if before else 0))
        writes: list[Operation] = [Delete(item.key) for item in gone]
        self._store.transact(guards, [Put(key, total.encode()), *writes], deadline=Deadline.after(WRITE_S))
