"""The server half of the memory store: keys, revisions, leases, history, and faults on request.

Leases run on the backend's clock. Like etcd's they get their full time back when an outage ends, since etcd restarts
them when it elects a leader.

*Runs in* the threads of its clients. *Owns* nothing outside itself.
*Fails by* LeaseLostError for a lease that is not there, PermanentError for what etcd refuses.
*Invariant*: one transaction is one revision; all methods that say so are called with ``changed`` held.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import LeaseLostError, PermanentError
from elastic_trainer.store.api import (
    Compare,
    Delete,
    EventKind,
    Field,
    KeyValue,
    Lease,
    Operation,
    Order,
    Put,
    Read,
    Relation,
    Snapshot,
    WatchEvent,
)
from elastic_trainer.store.watch import KeyHistory

MAX_OPERATIONS = 128
"""etcd's default limit for one transaction."""
LEAST_TTL_S = 2.0
"""What etcd grants at least, with its default election timeout."""
_MISSING = KeyValue("", b"", 0, 0)


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        end = self._now + max(0.0, timeout_s)
        while self._now < end and not event.wait(0.002):
            pass
        return event.is_set()

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._now += seconds


@dataclass(slots=True)
class _LeaseRecord:
    ttl_s: float
    expires_at: float
    keys: set[str] = field(default_factory=set)


class MemoryBackend:
    """The server: keys, history, leases, and the faults that are on at present."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self.changed = threading.Condition(threading.RLock())
        self.down = False
        self.cluster = 1
        self.revision = 1
        self.compacted = 0
        self._lost_replies = 0
        self._keys: dict[str, KeyValue] = {}
        self._leases: dict[int, _LeaseRecord] = {}
        self._history: list[WatchEvent] = []
        self._lease_ids = itertools.count(7001)

    # ---- faults and time, for tests

    def outage(self, on: bool) -> None:
        """Begin or end an outage for all clients."""
        with self.changed:
            self._expire()
            if self.down and not on:
                for lease in self._leases.values():
                    lease.expires_at = self.clock.monotonic() + lease.ttl_s
            self.down = on
            self.changed.notify_all()

    def lose_replies(self, count: int) -> None:
        """The next ``count`` transactions that write happen, but their callers hear OutcomeUnknownError."""
        with self.changed:
            self._lost_replies = count

    def compact(self) -> None:
        """Forget the history up to now: a watch that is behind must read again."""
        with self.changed:
            self._expire()
            self.compacted = self.revision
            self._history.clear()

    def advance(self, seconds: float) -> None:
        """Move the backend's ManualClock and let leases expire that are due."""
        if not isinstance(self.clock, ManualClock):
            raise TypeError("advance() needs a backend on a ManualClock")
        with self.changed:
            self.clock.advance(seconds)
            self._expire()
            self.changed.notify_all()

    # ---- what clients call, with ``changed`` held

    def read(self, key: str, range_end: str | None) -> tuple[KeyValue, ...]:
        """The present items of a key or range, in key order."""
        if range_end is None:
            item = self._keys.get(key)
            return (item,) if item is not None else ()
        return tuple(self._keys[name] for name in sorted(self._keys) if key <= name < range_end)

    def perform(self, wanted: Read) -> tuple[KeyValue, ...]:
        """What a read asks for, in its order."""
        found = self.read(wanted.key, wanted.range_end)
        if wanted.order is Order.CREATE_REVISION:  # a stable sort: keys of one transaction stay in key order
            found = tuple(sorted(found, key=lambda item: item.create_revision))
        if wanted.limit:
            found = found[: wanted.limit]
        return tuple(replace(item, value=b"") for item in found) if wanted.keys_only else found

    def expire(self) -> float | None:
        """Let leases expire that are due; seconds until the next one is, None if there is none."""
        self._expire()
        ends = [lease.expires_at for lease in self._leases.values()]
        return max(0.0, min(ends) - self.clock.monotonic()) if ends and not self.down else None

    def commit(self, operations: Sequence[Operation]) -> tuple[Snapshot, ...]:
        """Run ``operations`` as one revision; the snapshots of the reads among them."""
        revision, events = self.revision + 1, list[WatchEvent]()
        reads = []
        for operation in operations:
            if isinstance(operation, Read):
                reads.append(self.perform(operation))
            elif isinstance(operation, Put):
                events.append(self._put(operation, revision))
            else:
                gone = self.read(operation.key, operation.range_end)
                events.extend(self._delete(item.key, revision) for item in gone)
        self._publish(revision, events)
        return tuple(Snapshot(items, self.revision) for items in reads)

    def reply_is_lost(self) -> bool:
        """Whether the reply to the write just done gets lost; counts down."""
        if self._lost_replies == 0:
            return False
        self._lost_replies -= 1
        return True

    def lease(self, lease_id: int) -> _LeaseRecord:
        """A live lease. Raises LeaseLostError."""
        record = self._leases.get(lease_id)
        if record is None:
            raise LeaseLostError("the lease has expired")
        return record

    def grant(self, ttl_s: float) -> Lease:
        """A new lease."""
        granted = max(LEAST_TTL_S, float(math.ceil(ttl_s)))
        lease_id = next(self._lease_ids)
        self._leases[lease_id] = _LeaseRecord(granted, self.clock.monotonic() + granted)
        self.changed.notify_all()  # watch threads wait for the next expiry
        return Lease(lease_id, granted)

    def end_lease(self, lease_id: int) -> None:
        """End a lease; its keys go in one revision."""
        record = self._leases.pop(lease_id, None)
        if record is not None:
            self.commit([Delete(key) for key in sorted(record.keys)])

    def since(self, revision: int, key: str, range_end: str | None) -> tuple[WatchEvent, ...]:
        """Changes of a key or range from ``revision`` on."""
        return tuple(
            event
            for event in self._history
            if event.item.mod_revision >= revision
            and (event.item.key == key if range_end is None else key <= event.item.key < range_end)
        )

    def now(self) -> KeyHistory:
        """Where the history is."""
        return KeyHistory(self.cluster, 1, self.revision)

    def _expire(self) -> None:
        if self.down:
            return  # nobody is there to end them
        now = self.clock.monotonic()
        for lease_id in [number for number, lease in self._leases.items() if lease.expires_at <= now]:
            self.end_lease(lease_id)

    def _put(self, put: Put, revision: int) -> WatchEvent:
        old = self._keys.get(put.key)
        if old is not None:
            self._unbind(old)
        created = old.create_revision if old is not None else revision
        item = KeyValue(put.key, put.value, created, revision, put.lease)
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        self._keys[put.key] = item
        return WatchEvent(EventKind.PUT, item)

    def _delete(self, key: str, revision: int) -> WatchEvent:
        self._unbind(self._keys.pop(key))
        return WatchEvent(EventKind.DELETE, KeyValue(key, b"", 0, revision))

    def _unbind(self, item: KeyValue) -> None:
        if item.lease in self._leases:
            self._leases[item.lease].keys.discard(item.key)

    def _publish(self, revision: int, events: Sequence[WatchEvent]) -> None:
        if events:
            self.revision = revision
            self._history.extend(events)
            self.changed.notify_all()


def check_operations(operations: Sequence[Operation]) -> None:
    """Refuse what etcd refuses: too many operations, or a key written twice in one branch."""
    if len(operations) > MAX_OPERATIONS:
        raise PermanentError("the store refuses the request: too many operations in txn request")
    puts = [operation.key for operation in operations if isinstance(operation, Put)]
    deleted = [operation for operation in operations if isinstance(operation, Delete)]
    twice = len(set(puts)) < len(puts)
    if twice or any(_covers(deletion, key) for deletion in deleted for key in puts):
        raise PermanentError("the store refuses the request: duplicate key given in txn request")


def _covers(deletion: Delete, key: str) -> bool:
    if deletion.range_end is None:
        return key == deletion.key
    return deletion.key <= key < deletion.range_end


def holds(guard: Compare, items: Sequence[KeyValue]) -> bool:
    """Whether ``guard`` holds for ``items``; an empty range compares as one missing key does, as in etcd."""
    if not items and guard.field is Field.VALUE:
        return False
    return all(_compares(guard, item) for item in items or (_MISSING,))


def _compares(guard: Compare, item: KeyValue) -> bool:
    if guard.field is Field.VALUE:
        return _related(guard.relation, (item.value > _bytes(guard)) - (item.value < _bytes(guard)))
    actual = {
        Field.CREATE_REVISION: item.create_revision,
        Field.MOD_REVISION: item.mod_revision,
        Field.LEASE: item.lease,
    }[guard.field]
    if not isinstance(guard.operand, int):
        raise TypeError(f"{guard.field} compares with a number")
    return _related(guard.relation, actual - guard.operand)


def _bytes(guard: Compare) -> bytes:
    if not isinstance(guard.operand, bytes):
        raise TypeError("a value compares with bytes")
    return guard.operand


def _related(relation: Relation, order: int) -> bool:
    """Whether an order (negative, zero, positive) satisfies ``relation``."""
    if relation is Relation.EQUAL:
        return order == 0
    if relation is Relation.NOT_EQUAL:
        return order != 0
    return order > 0 if relation is Relation.GREATER else order < 0
