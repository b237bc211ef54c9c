"""A node's key: shown under a lease, changed only by its owner, shown again under a new incarnation after a loss.

*Runs in* torchrun's main thread (``show``) and the deciding thread (``return_from_loss``), one at a time.
*Owns* the lease session.
*Fails by* ConfigError when another live node uses the same id, TransientError past the deadline.
*Invariant*: the key is written only while it is absent or still holds what this object knows of, so that a write whose
outcome stayed unknown cannot come late and undo a newer one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import ConfigError, LeaseLostError, StoreUnavailableError, TransientError
from elastic_trainer.membership.documents import DocumentError, NodeRecord
from elastic_trainer.membership.leader_priority import SENIORS, STRAYS, written_by_nodes
from elastic_trainer.membership.probe import refuses
from elastic_trainer.store.api import (
    Delete,
    KeyValue,
    Order,
    Put,
    Read,
    Snapshot,
    Store,
    absent,
    prefix_end,
    unchanged,
)
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.session import LeaseSession
from elastic_trainer.telemetry.logs import logger

ATTEMPT_S = 3.0


class Presence:
    """The key of ``node_id``; ``create_revision`` is 0 until it is shown."""

    def __init__(self, store: Store, keys: RunKeys, node_id: str, session: LeaseSession, clock: Clock = SYSTEM) -> None:
        self._store, self._keys, self._session, self._clock = store, keys, session, clock
        self._key = keys.node(node_id)
        self._oldest = Read(
            keys.nodes, prefix_end(keys.nodes), limit=SENIORS + STRAYS, order=Order.CREATE_REVISION, keys_only=True
        )
        self.node_id = node_id
        self.create_revision = 0
        self.senior = False
        """Whether it was among the most senior nodes when its key was created."""
        self._record: NodeRecord | None = None
        self._shown: NodeRecord | None = None
        self._mod_revision = 0
        self._lock = threading.RLock()

    @property
    def record(self) -> NodeRecord:
        """What is, or is to be, shown."""
        if self._record is None:
            raise RuntimeError("nothing has been announced yet")
        return self._record

    @property
    def shown(self) -> NodeRecord | None:
        """What the key is known to hold; None before it is shown, while it may be gone, or hold what was sent last."""
        return None if self.lost or not self.create_revision else self._shown

    def put(self, record: NodeRecord) -> Put:
        """The write that shows ``record``, for a transaction guarded by the round and this key's create-revision."""
        return Put(self._key, record.encode(), self._session.lease_id)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around such a transaction: no other thread writes the key meanwhile."""
        with self._lock:
            self._shown = None
            yield

    def wrote(self, record: NodeRecord, revision: int) -> None:
        """Such a transaction went through, as ``revision`` of the store."""
        with self._lock:
            self._record = self._shown = record
            self._mod_revision = revision

    @property
    def ttl_s(self) -> float:
        """How long the key stays after its owner has fallen silent."""
        return self._session.ttl_s

    @property
    def lost(self) -> bool:
        """Whether the store has ended the lease, and with it the key."""
        return self._session.lost.is_set()

    @property
    def away(self) -> bool:
        """Whether the key is to be shown (again): its lease has ended, or no write of it is known to have worked."""
        return self._record is not None and (self.lost or self.create_revision == 0)

    def show(self, record: NodeRecord, deadline: Deadline) -> None:
        """Write ``record``; repeats over an outage of the store until ``deadline``."""
        while True:
            with self._lock:
                self._record = record
                try:
                    if self.lost:
                        self._session.renew(deadline.at_most(ATTEMPT_S))
                        self.create_revision = 0
                    self._write(deadline)
                    return
                except LeaseLostError:
                    self._session.lost.set()
                except TransientError:
                    if deadline.expired:
                        raise
            pause(0.1, clock=self._clock)

    def return_from_loss(self, deadline: Deadline) -> None:
        """After the lease was lost: show the same record as a new incarnation; once more if that remained unknown."""
        with self._lock:
            if not self.away:
                return
            if self.lost:
                self._session.renew(deadline)
                self.create_revision = 0
            self._write(deadline)
            logger().warning("node.returned", node=self.node_id, create_revision=self.create_revision)

    def show_again(self, deadline: Deadline) -> None:
        """Write what is shown once more: the store may hold an older record than it was given."""
        with self._lock:
            if self._record is None or self.away:
                return
            try:
                self._write(deadline)
            except LeaseLostError:
                self._session.lost.set()

    def close(self) -> None:
        """Take the key away; an unreachable store will do it when the lease ends."""
        self._session.close(revoke=True)

    def _write(self, deadline: Deadline) -> None:
        put = self.put(self.record)
        self._shown = None
        while self.create_revision:
            result = self._store.transact(
                [unchanged(self._key, self._mod_revision)],
                [put],
                [Read(self._key)],
                deadline=deadline.at_most(ATTEMPT_S),
            )
            there = result.reads[0].first if not result.succeeded else None
            if result.succeeded:
                self.wrote(self.record, result.revision)
                return
            if there is not None and there.create_revision == self.create_revision:
                self._mod_revision = there.mod_revision  # a write of ours, its answer lost; or a store that went back
            else:
                self.create_revision = 0
        self._create(put, deadline)

    def _create(self, put: Put, deadline: Deadline) -> None:
        waiting_until = Deadline.after(2 * self._session.ttl_s + 2.0, self._clock)
        while True:
            result = self._store.transact(
                [absent(self._key)], [put, self._oldest], [Read(self._key)], deadline=deadline.at_most(ATTEMPT_S)
            )
            if result.succeeded:
                self._created(result.revision, result.revision, result.reads[0])
                return
            left_behind = result.reads[0].first
            if left_behind is None:
                continue
            if left_behind.lease == self._session.lease_id:
                self._adopt(left_behind, put, deadline)
                return
            if _owner_is_dead(left_behind):
                guard = unchanged(self._key, left_behind.mod_revision)
                self._store.transact([guard], [Delete(self._key)], deadline=deadline.at_most(ATTEMPT_S))
            elif waiting_until.expired:
                raise ConfigError(
                    f"another live node is called {self.node_id!r} in this run",
                    hint="give each node its own --rdzv-conf node_id, or leave it out",
                )
            elif deadline.expired:
                raise StoreUnavailableError(f"the key of an earlier node {self.node_id!r} did not go in time")
            else:
                pause(0.1, clock=self._clock)

    def _adopt(self, mine: KeyValue, put: Put, deadline: Deadline) -> None:
        """An earlier write of ours went through unnoticed (its answer was lost)."""
        guard = unchanged(self._key, mine.mod_revision)
        result = self._store.transact([guard], [put, self._oldest], deadline=deadline.at_most(ATTEMPT_S))
        if result.succeeded:
            self._created(mine.create_revision, result.revision, result.reads[0])

    def _created(self, create_revision: int, mod_revision: int, oldest: Snapshot) -> None:
        first = written_by_nodes(oldest.items, self._keys)[:SENIORS]
        self.senior = any(name == self.node_id for name, _ in first)
        self.create_revision = create_revision
        self.wrote(self.record, mod_revision)


def _owner_is_dead(item: KeyValue) -> bool:
    try:
        record = NodeRecord.decode(item.value, item.key)
    except DocumentError:
        return False
    return record.probe_port > 0 and refuses(record.address, record.probe_port, timeout_s=0.2)
