"""The key of one node: what to write next, given what the store answered. Pure.

Each procedure is a generator of requests, so a thread and a simulator perform the same steps.

*Invariant*: the key is written only while it is absent or at the version that this object knows, so a delayed write of
unknown outcome cannot undo a newer one.
"""

from __future__ import annotations

from typing import Final, Protocol

from elastic_trainer.clock import Clock, Deadline
from elastic_trainer.errors import ConfigError, LeaseLostError, ReplacedError, StoreUnavailableError, TransientError
from elastic_trainer.membership.documents import DocumentError, NodeRecord, NodeState, RoundMember
from elastic_trainer.membership.effects import Pause, ProbePort, Renew, Request, Steps, Transaction
from elastic_trainer.membership.leader_priority import SENIORS, oldest_keys, written_by_nodes
from elastic_trainer.store.api import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    Read,
    Snapshot,
    TransactionResult,
    absent,
    unchanged,
)
from elastic_trainer.store.keys import RunKeys

ATTEMPT_S: Final = 3.0
AGAIN_S: Final = 0.1


class LostFlag(Protocol):
    """Whether a lease is gone."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...


class HeldLease(Protocol):
    """The lease that the key is bound to."""

    @property
    def lease_id(self) -> int: ...

    @property
    def ttl_s(self) -> float: ...

    @property
    def lost(self) -> LostFlag: ...


class OwnKey:
    """The key of ``node_id``; ``create_revision`` is 0 until the key exists."""

    def __init__(self, keys: RunKeys, node_id: str, lease: HeldLease, clock: Clock) -> None:
        self._keys, self._lease, self._clock = keys, lease, clock
        self._key = keys.node(node_id)
        self._oldest = oldest_keys(keys, SENIORS)
        self.node_id = node_id
        self.create_revision = 0
        self.senior = False
        """Whether it was among the most senior nodes when its key was created."""
        self.record: NodeRecord | None = None
        """The record that the key holds or should hold."""
        self.at_work = False
        """In restart mode: whether this life's workers were started. They cannot join another round."""
        self.written: NodeRecord | None = None
        """What the key is known to hold while its lease lives; None while the outcome of a write is unknown."""
        self._mod_revision = 0
        self._was_there = False
        """Whether the key has existed: then another node with this name came later."""
        self._taken: tuple[float, float] | None = None
        """When the key was seen to be that of another node that may live: first, in several attempts, and last."""

    @property
    def lost(self) -> bool:
        """Whether the lease has ended in the store, and the key with it."""
        return self._lease.lost.is_set()

    @property
    def published(self) -> NodeRecord | None:
        """The record that the key is known to hold; None if it may be absent or may already hold a newer record."""
        return None if self.lost or not self.create_revision else self.written

    @property
    def away(self) -> bool:
        """Whether the key must be written (again): its lease has ended, or no write is known to have succeeded."""
        return self.record is not None and (self.lost or self.create_revision == 0)

    def is_mine(self, member: RoundMember | None) -> bool:
        """Whether ``member`` of a round is the present life of this node."""
        mine = (self.create_revision, self.record.life) if self.record is not None else None
        return member is not None and (member.create_revision, member.life) == mine

    def put(self, record: NodeRecord) -> Put:
        """The write of ``record``, for a transaction guarded by the round and this key's create-revision."""
        return Put(self._key, record.encode(), self._lease.lease_id)

    def wrote(self, record: NodeRecord, revision: int) -> None:
        """Take note that such a write succeeded, at ``revision`` of the store."""
        self.record = self.written = record
        self._mod_revision = revision

    def publishing(self, record: NodeRecord, deadline: Deadline) -> Steps:
        """Write ``record``; retries during an outage of the store until ``deadline``."""
        self.at_work = False
        while True:
            self.record = record
            try:
                if self.lost:
                    yield Renew(min(ATTEMPT_S, deadline.remaining_s()))
                    self.create_revision = 0
                yield from self._write(record, deadline)
                return
            except LeaseLostError:
                self._lease.lost.set()
            except TransientError:
                if deadline.expired:
                    raise
            yield Pause(AGAIN_S, shared=True)

    def returning(self, deadline: Deadline) -> Steps:
        """After the lease was lost: write the same record as a new incarnation; again if the outcome was unknown.

        A life that is at work is not shown as ready: it is no member of any round under its new key.
        """
        if self.record is None or not self.away:
            return
        if self.lost:
            yield Renew(deadline.remaining_s())
            self.create_revision = 0
        state = NodeState.WARMING if self.at_work else self.record.state
        yield from self._write_again(self.record.model_copy(update={"state": state}), deadline)

    def publishing_again(self, deadline: Deadline) -> Steps:
        """Write the present record once more: a restored store may hold an older one."""
        if self.record is not None and not self.away:
            yield from self._write_again(self.record, deadline)

    def _write_again(self, record: NodeRecord, deadline: Deadline) -> Steps:
        try:
            yield from self._write(record, deadline)
        except LeaseLostError:
            self._lease.lost.set()

    def _write(self, record: NodeRecord, deadline: Deadline) -> Steps:
        put = self.put(record)
        self.written = None
        while self.create_revision:
            guard = unchanged(self._key, self._mod_revision)
            result = _result((yield self._transaction(deadline, guard, (put,), (Read(self._key),))))
            there = result.reads[0].first if not result.succeeded else None
            if result.succeeded:
                self.wrote(record, result.revision)
                return
            if there is not None and there.create_revision == self.create_revision:
                self._mod_revision = there.mod_revision  # our write, whose answer was lost; or a restored store
            else:
                self.create_revision = 0
        yield from self._create(record, put, deadline)

    def _create(self, record: NodeRecord, put: Put, deadline: Deadline) -> Steps:
        guard, writes = absent(self._key), (put, self._oldest, Delete(self._keys.departure))
        while True:
            result = _result((yield self._transaction(deadline, guard, writes, (Read(self._key),))))
            if result.succeeded:
                self._created(record, result.revision, result.revision, result.reads[0])
                return
            left_behind = result.reads[0].first
            if left_behind is None:
                continue
            if left_behind.lease == self._lease.lease_id:
                yield from self._adopt(left_behind, record, put, deadline)
                return
            owner = _port_of(left_behind)
            if owner is not None and (yield owner):
                deletion = (Delete(self._key),)
                yield self._transaction(deadline, unchanged(self._key, left_behind.mod_revision), deletion)
            else:
                self._note_taken(deadline)
                yield Pause(AGAIN_S)

    def _note_taken(self, deadline: Deadline) -> None:
        """The key is that of another node. Raises at ``deadline``, and once a dead node's lease would have ended."""
        now, ttl_s = self._clock.monotonic(), self._lease.ttl_s
        since, last = self._taken or (now, now)
        if now - last > ttl_s:
            since = now  # leases last longer when the store was away
        self._taken = since, now
        if now - since > 2 * ttl_s + 2.0:
            whose = f"another live node of this run has the id {self.node_id!r}"
            hint = "give each node its own --rdzv-conf node_id, or omit the option"
            if self._was_there:
                raise ReplacedError(f"{whose} since this one lost its lease; the run goes on without it", hint=hint)
            raise ConfigError(whose, hint=hint)
        if deadline.expired:
            raise StoreUnavailableError(f"the key of an earlier node {self.node_id!r} did not disappear in time")

    def _adopt(self, mine: KeyValue, record: NodeRecord, put: Put, deadline: Deadline) -> Steps:
        """Take over the key that an earlier write of ours created; its answer was lost."""
        guard = unchanged(self._key, mine.mod_revision)
        result = _result((yield self._transaction(deadline, guard, (put, self._oldest))))
        if result.succeeded:
            self._created(record, mine.create_revision, result.revision, result.reads[0])

    def _transaction(
        self, deadline: Deadline, guard: Compare, success: tuple[Operation, ...], failure: tuple[Operation, ...] = ()
    ) -> Request:
        return Transaction((guard,), success, failure, min(ATTEMPT_S, deadline.remaining_s()))

    def _created(self, record: NodeRecord, create_revision: int, mod_revision: int, oldest: Snapshot) -> None:
        first = written_by_nodes(oldest.items, self._keys)[:SENIORS]
        self.senior = any(name == self.node_id for name, _ in first)
        self.create_revision = create_revision
        self._was_there, self._taken = True, None
        self.wrote(record, mod_revision)


def _result(answer: TransactionResult | bool | None) -> TransactionResult:
    if not isinstance(answer, TransactionResult):
        raise TypeError(f"a transaction was answered with {answer!r}")
    return answer


def _port_of(item: KeyValue) -> ProbePort | None:
    """The agent port of a key's owner; None if it has none."""
    try:
        record = NodeRecord.decode(item.value, item.key)
    except DocumentError:
        return None
    return ProbePort(record.address, record.probe_port) if record.probe_port > 0 else None
