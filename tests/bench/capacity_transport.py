"""The store port over grpc.aio: what lets one machine hold a thousand members, for the capacity benchmark alone.

The synchronous gRPC of the product wakes each thread that waits for it ten times a second, which is nothing for one
node and a core for a thousand. Here one event loop serves all connections of a process. Requests, messages, watches and
errors are those of :class:`~elastic_trainer.store.etcd.EtcdStore`; so is one connection for each node.
"""

from __future__ import annotations

import asyncio
import math
import queue
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import grpc

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import LeaseLostError, StoreUnavailableError
from elastic_trainer.store import etcd
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
from elastic_trainer.store.descriptors import load_etcd3
from elastic_trainer.store.etcd import KEEPALIVE_PATH, WATCH_CALL_S, _batch, _history
from elastic_trainer.store.retry import within
from elastic_trainer.store.watch import EventBatch, WatchLoop, WatchReading

OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))


class EventLoop:
    """The one loop that gRPC has in a process, in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="grpc", daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class AioStore:
    """One connection to the etcd at ``endpoint``, without TLS and users."""

    def __init__(self, endpoint: str, loop: EventLoop) -> None:
        self.rpc: Any = load_etcd3().etcdrpc
        self.loop = loop
        self._endpoint = endpoint
        self._closed = threading.Event()
        self._watches: list[WatchLoop] = []
        loop.submit(self._open()).result()

    async def _open(self) -> None:
        self.channel = grpc.aio.insecure_channel(self._endpoint, options=OPTIONS)
        self.kv, self.lease = self.rpc.KVStub(self.channel), self.rpc.LeaseStub(self.channel)
        self.watcher, self.maintenance = self.rpc.WatchStub(self.channel), self.rpc.MaintenanceStub(self.channel)
        self.refresh = self.channel.unary_unary(
            KEEPALIVE_PATH,
            request_serializer=self.rpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=self.rpc.LeaseKeepAliveResponse.FromString,
        )

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
        request = etcd.transaction(self.rpc, guards, success, failure)
        response = self.call(self.kv.Txn, request, deadline, write=True)
        revision = response.header.revision
        reads = (part.response_range for part in response.responses if part.HasField("response_range"))
        return TransactionResult(response.succeeded, tuple(etcd.snapshot(r.kvs, revision) for r in reads), revision)

    def grant(self, ttl_s: float, deadline: Deadline) -> Lease:
        request = self.rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s), ID=secrets.randbits(62) + 1)
        response = self.call(self.lease.LeaseGrant, request, deadline, write=True)
        return Lease(response.ID, float(response.TTL))

    def keep_alive(self, lease_id: int, deadline: Deadline) -> float:
        response = self.call(self.refresh, self.rpc.LeaseKeepAliveRequest(ID=lease_id), deadline)
        if response.TTL <= 0:
            raise LeaseLostError("the lease has expired")
        return float(response.TTL)

    def revoke(self, lease_id: int, deadline: Deadline) -> None:
        self.call(self.lease.LeaseRevoke, self.rpc.LeaseRevokeRequest(ID=lease_id), deadline)

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        fields = etcd.bounds(prefix, None if exact else prefix_end(prefix))
        watch = WatchLoop(lambda revision: _AioStream(self, fields, revision), listener, prefix)
        self._watches.append(watch)
        return watch

    def version(self, deadline: Deadline) -> str:
        return str(self.call(self.maintenance.Status, self.rpc.StatusRequest(), deadline).version)

    def close(self) -> None:
        self._closed.set()
        for watch in self._watches:
            watch.close()
        self.loop.submit(self.channel.close(None)).result()

    def _range(self, wanted: Read, deadline: Deadline) -> Snapshot:
        response = self.call(self.kv.Range, etcd.reading(self.rpc, wanted), deadline)
        return etcd.snapshot(response.kvs, response.header.revision)

    def call(self, method: Callable[..., Any], request: Any, deadline: Deadline, *, write: bool = False) -> Any:
        """The response to ``request``, asked again within the deadline where the product does."""

        async def send() -> Any:
            return await method(request, timeout=deadline.remaining_s())

        def attempt() -> Any:
            if self._closed.is_set() or deadline.expired:
                raise StoreUnavailableError("the connection to etcd is closed, or no time was left")
            try:
                return self.loop.submit(send()).result()
            except grpc.aio.AioRpcError as error:
                where = self._endpoint
                raise etcd.translate(error.code().name, error.details() or "", where=where, write=write) from error
            except (asyncio.CancelledError, grpc.aio.UsageError) as error:
                raise StoreUnavailableError("the connection to etcd is closed") from error

        return within(deadline, attempt, self._closed)


class _AioStream:
    """One watch stream: what arrives waits in a queue for the watch's thread."""

    def __init__(self, store: AioStore, fields: dict[str, bytes], revision: int) -> None:
        self._store, self._fields = store, fields
        self._arrived: queue.SimpleQueue[EventBatch | None] = queue.SimpleQueue()
        create = store.rpc.WatchCreateRequest(start_revision=revision, progress_notify=True, **fields)
        self._task = store.loop.submit(self._receive(store.rpc.WatchRequest(create_request=create)))

    async def _receive(self, request: Any) -> None:
        try:
            call = self._store.watcher.Watch(metadata=(("hasleader", "true"),))
            await call.write(request)
            async for response in call:
                self._arrived.put(_batch(response))
        except grpc.aio.AioRpcError:
            pass  # the watch begins anew
        finally:
            self._arrived.put(None)

    def batches(self) -> Iterator[EventBatch]:
        while (batch := self._arrived.get()) is not None:
            yield batch
        raise StoreUnavailableError("the watch was lost")

    def read(self) -> WatchReading:
        request = self._store.rpc.RangeRequest(**self._fields)
        response = self._store.call(self._store.kv.Range, request, Deadline.after(WATCH_CALL_S))
        return WatchReading(etcd.snapshot(response.kvs, response.header.revision), _history(response.header))

    def cancel(self) -> None:
        self._task.cancel()
        self._arrived.put(None)
