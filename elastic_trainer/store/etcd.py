"""The store port over etcd v3, through the etcd3 package's channel and stubs.

Only this module, ``channel`` and ``connection`` import etcd3 and grpc.

*Runs in* agents, the monitor and commands; safe from several threads.
*Owns* one connection and the watches opened through it.
*Fails by* the errors that :mod:`elastic_trainer.store.api` names.
*Invariant*: a write is sent at most once unless etcd certainly did not accept it.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import LeaseLostError, OutcomeUnknownError, PermanentError, StoreUnavailableError
from elastic_trainer.settings import StoreSettings
from elastic_trainer.store import wire
from elastic_trainer.store.api import (
    Compare,
    Lease,
    Operation,
    Order,
    Read,
    Snapshot,
    TransactionResult,
    Watch,
    WatchListener,
    prefix_end,
)
from elastic_trainer.store.connection import Method, StoreConnection
from elastic_trainer.store.retry import read_attempt, within
from elastic_trainer.store.watch import EventBatch, KeyHistory, WatchLoop, WatchReading

WATCH_CALL_S = 5.0
"""Limit of one call by a watch, in seconds; a watch has no caller with a deadline, and retries for ever."""


class EtcdStore:
    """One connection to the etcd of ``settings``. Sends nothing before the first call."""

    def __init__(self, settings: StoreSettings) -> None:
        self._connection = StoreConnection(settings)
        self._lock = threading.Lock()
        self._watches: set[_EtcdWatch] = set()

    def get(self, key: str, deadline: Deadline) -> Snapshot:
        return self._range(Read(key), deadline)

    def range(
        self, prefix: str, deadline: Deadline, *, limit: int = 0, order: Order = Order.KEY, keys_only: bool = False
    ) -> Snapshot:
        return self._range(Read(prefix, prefix_end(prefix), limit, order, keys_only), deadline)

    def transact(
        self,
        guards: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        deadline: Deadline,
    ) -> TransactionResult:
        request = wire.transaction(self._connection.rpc, guards, success, failure)
        if all(isinstance(operation, Read) for operation in (*success, *failure)):
            response = self._read(lambda stubs: stubs.kv.Txn, request, deadline)
        else:
            response = self._write(lambda stubs: stubs.kv.Txn, request, deadline)
        revision = response.header.revision
        reads = (part.response_range for part in response.responses if part.HasField("response_range"))
        return TransactionResult(
            response.succeeded, tuple(wire.snapshot(read.kvs, revision) for read in reads), revision
        )

    def grant(self, ttl_s: float, deadline: Deadline) -> Lease:
        # The client chooses the id, so that a repeated request cannot leave a second lease behind.
        lease_id = secrets.randbits(62) + 1
        request = self._connection.rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s), ID=lease_id)
        asked_before = False

        def attempt() -> Lease:
            nonlocal asked_before
            try:
                response = self._call(lambda stubs: stubs.lease.LeaseGrant, request, deadline, write=True)
            except OutcomeUnknownError as error:
                asked_before = True
                raise StoreUnavailableError(error.message) from error
            except PermanentError as error:
                if asked_before and "lease already exists" in error.message:
                    return Lease(lease_id, float(request.TTL))
                raise
            return Lease(response.ID, float(response.TTL))

        return within(deadline, attempt, self._connection.closed)

    def keep_alive(self, lease_id: int, deadline: Deadline) -> float:
        request = self._connection.rpc.LeaseKeepAliveRequest(ID=lease_id)
        response = self._read(lambda stubs: stubs.keep_alive, request, deadline)
        if response.TTL <= 0:  # etcd does not know the lease
            raise LeaseLostError("the lease has expired")
        return float(response.TTL)

    def revoke(self, lease_id: int, deadline: Deadline) -> None:
        request = self._connection.rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            self._read(lambda stubs: stubs.lease.LeaseRevoke, request, deadline)  # idempotent, so retried like a read
        except LeaseLostError:
            return

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        fields = wire.prefix_bounds(prefix, exact=exact)
        opened = _EtcdWatch(
            lambda revision: _EtcdStream(self._connection, fields, revision), listener, prefix, self._forget
        )
        with self._lock:
            self._watches.add(opened)
        return opened

    def version(self, deadline: Deadline) -> str:
        request = self._connection.rpc.StatusRequest()
        return str(self._read(lambda stubs: stubs.maintenance.Status, request, deadline).version)

    def close(self) -> None:
        with self._lock:
            watches = tuple(self._watches)
        for watch in watches:
            watch.close()
        self._connection.close()

    def _forget(self, watch: _EtcdWatch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def _range(self, wanted: Read, deadline: Deadline) -> Snapshot:
        request = wire.reading(self._connection.rpc, wanted)
        response = self._read(lambda stubs: stubs.kv.Range, request, deadline)
        return wire.snapshot(response.kvs, response.header.revision)

    def _read(self, method: Method, request: Any, deadline: Deadline) -> Any:
        return within(
            deadline,
            lambda: self._call(method, request, read_attempt(deadline), write=False),
            self._connection.closed,
        )

    def _write(self, method: Method, request: Any, deadline: Deadline) -> Any:
        return within(deadline, lambda: self._call(method, request, deadline, write=True), self._connection.closed)

    def _call(self, method: Method, request: Any, deadline: Deadline, *, write: bool) -> Any:
        return self._connection.call(method, request, deadline, write=write)


class _EtcdWatch(WatchLoop):
    """A watch that its store closes with itself."""

    def __init__(
        self,
        open_stream: Callable[[int], _EtcdStream],
        listener: WatchListener,
        what: str,
        forget: Callable[[_EtcdWatch], None],
    ) -> None:
        self._forget_watch = forget
        super().__init__(open_stream, listener, what)

    def close(self) -> None:
        super().close()
        self._forget_watch(self)


class _EtcdStream:
    """One watch stream. The request side stays open until cancelled: a proxy would end the watch with it."""

    def __init__(self, connection: StoreConnection, fields: dict[str, bytes], revision: int) -> None:
        self._connection = connection
        self._fields = fields
        self._cancelled = threading.Event()
        self._reading: Any = None
        deadline = Deadline.after(WATCH_CALL_S)
        self._call = connection.stream(lambda stubs: stubs.watch.Watch, self._requests(revision), deadline)

    def batches(self) -> Iterator[EventBatch]:
        for response in self._connection.responses(self._call):
            if response.canceled and not response.compact_revision:
                # etcd also answers this for an expired token, as a denied permission.
                self._connection.forget_token()
            yield _batch(response)

    def read(self) -> WatchReading:
        response = self._connection.call(
            lambda stubs: stubs.kv.Range,
            self._connection.rpc.RangeRequest(**self._fields),
            Deadline.after(WATCH_CALL_S),
            write=False,
            started=self._read_started,
        )
        return WatchReading(wire.snapshot(response.kvs, response.header.revision), _history(response.header))

    def cancel(self) -> None:
        self._cancelled.set()
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()

    def _read_started(self, call: Any) -> None:
        self._reading = call
        if self._cancelled.is_set():
            call.cancel()

    def _requests(self, revision: int) -> Iterator[Any]:
        rpc = self._connection.rpc
        create = rpc.WatchCreateRequest(start_revision=revision, progress_notify=True, **self._fields)
        yield rpc.WatchRequest(create_request=create)
        self._cancelled.wait()


def _history(header: Any) -> KeyHistory:
    return KeyHistory(header.cluster_id, header.raft_term, header.revision)


def _batch(response: Any) -> EventBatch:
    compacted = bool(response.compact_revision)
    return EventBatch(
        now=_history(response.header),
        events=tuple(wire.event(event) for event in response.events),
        created=response.created,
        compacted=compacted,
        refused=(response.cancel_reason or "no reason given") if response.canceled and not compacted else None,
    )
