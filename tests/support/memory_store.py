"""The store port in memory: etcd's semantics without etcd, for tests and simulations.

Several :class:`MemoryStore` are several clients of one :class:`MemoryBackend`, on which faults are switched: an
outage for all, lost replies, compaction, :meth:`MemoryStore.cut_off` isolates one client. Leases run on the backend's
clock. Like etcd's they get their full time back when an outage ends, since etcd restarts them when it elects a leader.

*Runs in* the callers' threads and one thread for each watch, which also lets leases expire.
*Owns* its watches.
*Fails by* the port's errors; an outage raises at once, without waiting for the deadline.
*Invariant*: one transaction is one revision; all methods that say so are called with ``changed`` held.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import LeaseLostError, OutcomeUnknownError, PermanentError, StoreUnavailableError
from elastic_trainer.store.api import (
    Compare,
    Delete,
    EventKind,
    KeyValue,
    Lease,
    Operation,
    Order,
    Put,
    Read,
    Relation,
    Snapshot,
    TransactionResult,
    Watch,
    WatchEvent,
    WatchListener,
    prefix_end,
)
from elastic_trainer.store.watch import EventBatch, KeyHistory, WatchLoop, WatchReading

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
        record = self._leases.get(lease_id)
        if record is None:
            raise LeaseLostError("the lease has expired")
        return record

    def grant(self, ttl_s: float) -> Lease:
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
        fresh = (event for event in self._history if event.item.mod_revision >= revision)
        return tuple(event for event in fresh if _covers(key, range_end, event.item.key))

    def now(self) -> KeyHistory:
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
    if twice or any(_covers(each.key, each.range_end, key) for each in deleted for key in puts):
        raise PermanentError("the store refuses the request: duplicate key given in txn request")


def _covers(first: str, range_end: str | None, key: str) -> bool:
    return key == first if range_end is None else first <= key < range_end


def holds(guard: Compare, items: Sequence[KeyValue]) -> bool:
    """Whether ``guard`` holds for ``items``; an empty range compares as one missing key does, as in etcd."""
    relation, field = operator.eq if guard.relation is Relation.EQUAL else operator.lt, guard.field.value
    return all(relation(getattr(item, field), guard.operand) for item in items or (_MISSING,))


class MemoryStore:
    """One client of ``backend``."""

    def __init__(self, backend: MemoryBackend | None = None) -> None:
        self.backend = backend if backend is not None else MemoryBackend()
        self._cut = False
        self._closed = False
        self._watches: list[WatchLoop] = []

    def cut_off(self, on: bool) -> None:
        """Begin or end a partition between this client and the backend."""
        with self.backend.changed:
            self._cut = on
            self.backend.changed.notify_all()

    @property
    def reachable(self) -> bool:
        return not (self.backend.down or self._cut or self._closed)

    def get(self, key: str, deadline: Deadline) -> Snapshot:
        return self._read(Read(key), deadline)

    def range(
        self, prefix: str, deadline: Deadline, *, limit: int = 0, order: Order = Order.KEY, keys_only: bool = False
    ) -> Snapshot:
        return self._read(Read(prefix, prefix_end(prefix), limit, order, keys_only), deadline)

    def transact(
        self,
        guards: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        deadline: Deadline,
    ) -> TransactionResult:
        for branch in (success, failure):
            check_operations(branch)
        with self.backend.changed:
            self._enter(deadline)
            succeeded = all(holds(guard, self.backend.read(guard.key, guard.range_end)) for guard in guards)
            chosen = success if succeeded else failure
            for operation in chosen:
                if isinstance(operation, Put) and operation.lease:
                    self.backend.lease(operation.lease)
            reads = self.backend.commit(chosen)
            if any(not isinstance(operation, Read) for operation in chosen) and self.backend.reply_is_lost():
                raise OutcomeUnknownError("the reply to a write was lost")
            return TransactionResult(succeeded, reads, self.backend.revision)

    def grant(self, ttl_s: float, deadline: Deadline) -> Lease:
        with self.backend.changed:
            self._enter(deadline)
            return self.backend.grant(ttl_s)

    def keep_alive(self, lease_id: int, deadline: Deadline) -> float:
        with self.backend.changed:
            self._enter(deadline)
            lease = self.backend.lease(lease_id)
            lease.expires_at = self.backend.clock.monotonic() + lease.ttl_s
            return lease.ttl_s

    def revoke(self, lease_id: int, deadline: Deadline) -> None:
        with self.backend.changed:
            self._enter(deadline)
            self.backend.end_lease(lease_id)

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        range_end = None if exact else prefix_end(prefix)
        watch = WatchLoop(lambda revision: _MemoryStream(self, prefix, range_end, revision), listener, prefix)
        self._watches.append(watch)
        return watch

    def version(self, deadline: Deadline) -> str:
        with self.backend.changed:
            self._enter(deadline)
            return "memory"

    def close(self) -> None:
        with self.backend.changed:
            self._closed = True
        for watch in self._watches:
            watch.close()

    def _read(self, wanted: Read, deadline: Deadline) -> Snapshot:
        with self.backend.changed:
            self._enter(deadline)
            return Snapshot(self.backend.perform(wanted), self.backend.revision)

    def _enter(self, deadline: Deadline) -> None:
        if not self.reachable or deadline.expired:
            raise StoreUnavailableError("the memory store does not answer")
        self.backend.expire()


class _MemoryStream:
    def __init__(self, store: MemoryStore, key: str, range_end: str | None, revision: int) -> None:
        self._store = store
        self._backend = store.backend
        self._key = key
        self._range_end = range_end
        self._cancelled = False
        with self._backend.changed:
            self._require_reachable()
            self._next = revision or self._backend.revision + 1

    def batches(self) -> Iterator[EventBatch]:
        with self._backend.changed:
            first = EventBatch(self._backend.now(), created=True)
        yield first
        while True:
            yield self._await_batch()

    def read(self) -> WatchReading:
        with self._backend.changed:
            self._require_reachable()
            self._backend.expire()
            items = self._backend.read(self._key, self._range_end)
            return WatchReading(Snapshot(items, self._backend.revision), self._backend.now())

    def cancel(self) -> None:
        with self._backend.changed:
            self._cancelled = True
            self._backend.changed.notify_all()

    def _await_batch(self) -> EventBatch:
        backend = self._backend
        with backend.changed:
            while True:
                self._require_reachable()
                next_expiry_s = backend.expire()
                if self._next <= backend.compacted:
                    return EventBatch(backend.now(), compacted=True)
                events = backend.since(self._next, self._key, self._range_end)
                if events:
                    self._next = backend.revision + 1
                    return EventBatch(backend.now(), events)
                self._next = max(self._next, backend.revision + 1)
                backend.changed.wait(next_expiry_s)

    def _require_reachable(self) -> None:
        if self._cancelled or not self._store.reachable:
            raise StoreUnavailableError("the watch was lost")


class LateStore(MemoryStore):
    """What is written while ``holds_back`` stays unknown to its writer, and is done when the test says so."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.holds_back = False
        self._held: list[tuple[Any, ...]] = []

    def transact(self, *branches: Any, deadline: Deadline) -> TransactionResult:
        if self.holds_back:
            self._held.append(branches)
            raise OutcomeUnknownError("the store is frozen")
        return super().transact(*branches, deadline=deadline)

    def thaw(self) -> list[bool]:
        """Do what was held back; whether the guards of each held."""
        self.holds_back, held, self._held = False, self._held, []
        return [super(LateStore, self).transact(*each, deadline=Deadline.after(60.0)).succeeded for each in held]
