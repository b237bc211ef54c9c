"""A store with metrics: counts failed requests, and notes when it was last known to be usable.

A store that answers but accepts no writes is unusable: an etcd at its quota keeps leases alive and serves reads, while
no node can join, leave or recover. So an answer counts only while the last write was accepted.

*Fails by* the errors of the underlying store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError, TransientError
from elastic_trainer.store.api import (
    Compare,
    Lease,
    Operation,
    Order,
    Read,
    Snapshot,
    Store,
    TransactionResult,
    Watch,
    WatchListener,
)
from elastic_trainer.telemetry.logs import logger

Result = TypeVar("Result")


class MeteredStore:
    """Wraps another store. ``errors``: requests without an answer; a refusal is an answer."""

    def __init__(self, store: Store, clock: Clock = SYSTEM) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self.errors = 0
        self.last_success_wall = clock.wall()
        """Unix time of the last answer (initially of construction, right after an answer)."""
        self._refusals: set[str] = set()
        """Why writes have failed since one was last accepted. The first refusal of a full etcd may be a timeout."""

    def _counted(self, ask: Callable[[], Result], *, write: bool = False) -> Result:
        try:
            result = ask()
        except TransientError as error:
            with self._lock:
                self.errors += 1
                new = write and str(error) not in self._refusals
                self._refusals |= {str(error)} if new else set()
            if new:
                logger().warning("store.write_failed", error=str(error))
            raise
        except ElasticTrainerError:
            self._answered()
            raise
        if write:
            with self._lock:
                refused, self._refusals = self._refusals, set()
            if refused:
                logger().info("store.write_taken")
        self._answered()
        return result

    def _answered(self) -> None:
        if not self._refusals:
            self.last_success_wall = self._clock.wall()

    def get(self, key: str, deadline: Deadline) -> Snapshot:
        return self._counted(lambda: self._store.get(key, deadline))

    def range(
        self, prefix: str, deadline: Deadline, *, limit: int = 0, order: Order = Order.KEY, keys_only: bool = False
    ) -> Snapshot:
        return self._counted(lambda: self._store.range(prefix, deadline, limit=limit, order=order, keys_only=keys_only))

    def transact(
        self,
        guards: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        deadline: Deadline,
    ) -> TransactionResult:
        write = any(not isinstance(operation, Read) for operation in (*success, *failure))
        return self._counted(lambda: self._store.transact(guards, success, failure, deadline=deadline), write=write)

    def grant(self, ttl_s: float, deadline: Deadline) -> Lease:
        return self._counted(lambda: self._store.grant(ttl_s, deadline), write=True)

    def keep_alive(self, lease_id: int, deadline: Deadline) -> float:
        return self._counted(lambda: self._store.keep_alive(lease_id, deadline))

    def revoke(self, lease_id: int, deadline: Deadline) -> None:
        self._counted(lambda: self._store.revoke(lease_id, deadline))

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        return self._store.watch(prefix, listener, exact=exact)

    def version(self, deadline: Deadline) -> str:
        return self._counted(lambda: self._store.version(deadline))

    def close(self) -> None:
        self._store.close()
