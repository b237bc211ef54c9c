"""What one process keeps in the store: a lease, and keys that it overwrites.

*Runs in* any member process; one thread (``lease-keeper``) for each lease.
*Owns* the lease and that thread.
*Fails by* setting :attr:`LeaseSession.lost`; it retries for ever while the store is unreachable.
*Invariant*: ``lost`` is set only when the store itself reports that the lease has ended. While the store is unreachable
the lease is only suspect: no other node can act on its end either. A key is never overwritten with an older value: a
write of unknown outcome may still happen later, over an old connection or by an etcd member that was frozen, so each
write is guarded by the revision that the writer knows, and a late one changes nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError, LeaseLostError
from elastic_trainer.store.api import Compare, Lease, Put, Read, Store, unchanged
from elastic_trainer.store.retry import RetryBackoff
from elastic_trainer.telemetry.logs import logger

REFRESHES_PER_TTL = 3.0
JOIN_LIMIT_S = 10.0


@dataclass(slots=True)
class _Held:
    """One granted lease. Each has its own ``lost`` event, so that a renewal cannot undo the report of a loss."""

    lease: Lease
    lost: threading.Event = field(default_factory=threading.Event)
    retired: threading.Event = field(default_factory=threading.Event)
    """Set when the lease is no longer needed; ends its keeper."""


class LeaseSession:
    """A lease of ``ttl_s`` seconds that lives until :meth:`close`.

    The constructor grants it, and raises StoreUnavailableError if that fails until ``deadline``.
    """

    def __init__(self, store: Store, ttl_s: float, deadline: Deadline, clock: Clock = SYSTEM) -> None:
        self._store = store
        self._asked_ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._hold(deadline)

    @property
    def lease_id(self) -> int:
        """The id of the lease, to which keys are bound."""
        return self._held.lease.id

    @property
    def ttl_s(self) -> float:
        """The granted seconds that the lease lasts without a refresh."""
        return self._held.lease.ttl_s

    @property
    def lost(self) -> threading.Event:
        """Set when the present lease has ended. After :meth:`renew` this is another event."""
        return self._held.lost

    def renew(self, deadline: Deadline) -> int:
        """After a loss grant a new lease (a new incarnation); its id. Does nothing while the present one lives."""
        with self._lock:
            if not self._held.lost.is_set() or self._closed.is_set():
                return self._held.lease.id
            self._retire()
            self._hold(deadline)
            return self._held.lease.id

    def close(self) -> None:
        """Stop the keep-alive and revoke the lease with its keys; if the store is unreachable the lease expires."""
        self._closed.set()
        self._held.retired.set()
        with self._lock:
            self._retire()
            if self._held.lost.is_set():
                return
            try:
                self._store.revoke(self._held.lease.id, Deadline.after(2.0))
            except ElasticTrainerError as error:
                logger().warning("lease.left_to_expire", lease=self._held.lease.id, ttl_s=self.ttl_s, cause=str(error))

    def _hold(self, deadline: Deadline) -> None:
        """Grant a lease, and start its keeper."""
        self._held = _Held(self._store.grant(self._asked_ttl_s, deadline))
        keeper = threading.Thread(target=self._keep, args=(self._held,), name="lease-keeper", daemon=True)
        try:
            keeper.start()
        except RuntimeError:  # the limit of processes is reached
            self._held.lost.set()  # nothing would keep it alive, or report its end
            raise
        self._keeper = keeper

    def _retire(self) -> None:
        self._held.retired.set()
        self._keeper.join(JOIN_LIMIT_S)

    def _keep(self, held: _Held) -> None:
        """Refresh ``held`` until it is lost or retired."""
        interval_s = held.lease.ttl_s / REFRESHES_PER_TTL
        backoff = RetryBackoff()
        pause_s = interval_s * random.uniform(0.5, 1.0)  # spreads the refreshes of nodes that joined together
        while not self._clock.wait(held.retired, pause_s):
            try:
                failed = self._refresh(held, interval_s)
                if held.lost.is_set():
                    logger().warning("lease.lost", lease=held.lease.id, ttl_s=held.lease.ttl_s)
                    return
            except Exception:  # noqa: BLE001 - thread edge: a dead keeper would end the lease without a reason
                logger().exception("lease.keeper_failed", lease=held.lease.id)
                failed = True
            if failed:
                pause_s = min(interval_s, backoff.next_s())
            else:
                backoff.reset()
                pause_s = interval_s

    def _refresh(self, held: _Held, limit_s: float) -> bool:
        """Send one keep-alive; returns whether it failed transiently."""
        try:
            self._store.keep_alive(held.lease.id, Deadline.after(limit_s, self._clock))
        except LeaseLostError:
            held.lost.set()
            return True
        except ElasticTrainerError:
            return True
        return False


class Slot:
    """A key that one process overwrites repeatedly, one thread at a time; see the module.

    A value by another writer of ``key`` is overwritten once its revision is known.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._revision = 0

    def replace(self, value: bytes, deadline: Deadline, guards: Sequence[Compare] = ()) -> bool:
        """Write ``value``; False if ``guards`` do not hold, or another process writes at the same time."""
        for _ in range(2):
            guard = unchanged(self._key, self._revision)
            done = self._store.transact([*guards, guard], [Put(self._key, value)], [Read(self._key)], deadline=deadline)
            if done.succeeded:
                self._revision = done.revision
                return True
            there = done.reads[0].first
            found = there.mod_revision if there is not None else 0
            if found == self._revision:
                return False
            self._revision = found  # of an earlier writer, or of our own write whose answer was lost
        return False
