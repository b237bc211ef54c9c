"""The store port in memory: etcd's semantics without etcd, for tests and simulations.

Several :class:`MemoryStore` are several clients of one :class:`MemoryBackend`, on which faults are switched: an
outage for all, lost replies, compaction, :meth:`MemoryStore.cut_off` isolates one client.

*Runs in* the callers' threads and one thread for each watch, which also lets leases expire.
*Owns* its watches.
*Fails by* the port's errors; an outage raises at once, without waiting for the deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import OutcomeUnknownError, StoreUnavailableError
from elastic_trainer.store.api import (
    Compare,
    Lease,
    Operation,
    Order,
    Put,
    Read,
    Snapshot,
    TransactionResult,
    Watch,
    WatchListener,
    prefix_end,
)
from elastic_trainer.store.watch import EventBatch, WatchLoop, WatchReading
from tests.support.memory_backend import ManualClock as ManualClock
from tests.support.memory_backend import MemoryBackend as MemoryBackend
from tests.support.memory_backend import check_operations, holds


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
        """Whether calls get through at present."""
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
    """A watch stream of one client."""

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
