"""Hold a lease: grant it, keep it alive, and report its loss.

*Runs in* any process that is a member; one thread (``lease-keeper``) for each session.
*Owns* the lease and that thread.
*Fails by* setting :attr:`LeaseSession.lost`; an unreachable store is retried for ever.
*Invariant*: ``lost`` is set only when the store itself says that the lease is gone. While the store cannot be reached
the lease is merely suspect: nobody else can act on its end either.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError, LeaseLostError
from elastic_trainer.store.api import Lease, Store
from elastic_trainer.store.retry import RetryBackoff
from elastic_trainer.telemetry.logs import logger

REFRESHES_PER_TTL = 3.0
JOIN_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class SessionListener:
    """What a session reports, from its thread. The callbacks must not block.

    ``on_lost`` once for each lease that is gone; ``on_error`` for each failed refresh; ``on_recovered`` when a
    refresh works again, with the seconds since the last one that did.
    """

    on_lost: Callable[[], None] = lambda: None
    on_error: Callable[[ElasticTrainerError], None] = lambda _: None
    on_recovered: Callable[[float], None] = lambda _: None


@dataclass(slots=True)
class _Held:
    """One granted lease. Each has its own ``lost``, so that a renewal cannot take news back."""

    lease: Lease
    last_refresh: float
    lost: threading.Event = field(default_factory=threading.Event)
    retired: threading.Event = field(default_factory=threading.Event)
    """Set when nobody needs the lease any more; its keeper ends."""


class LeaseSession:
    """A lease of ``ttl_s`` seconds that lives until :meth:`close`.

    The constructor grants it, and raises StoreUnavailableError when that did not work within ``deadline``.
    """

    def __init__(
        self,
        store: Store,
        ttl_s: float,
        deadline: Deadline,
        *,
        listener: SessionListener | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._store = store
        self._asked_ttl_s = ttl_s
        self._listener = listener if listener is not None else SessionListener()
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._held = self._grant(deadline)
        self._keeper = self._start_keeper(self._held)

    @property
    def lease_id(self) -> int:
        """The lease to bind keys to."""
        return self._held.lease.id

    @property
    def ttl_s(self) -> float:
        """How long the lease lasts without a refresh, as granted."""
        return self._held.lease.ttl_s

    @property
    def lost(self) -> threading.Event:
        """Set when the present lease is gone. After :meth:`renew` this is another event."""
        return self._held.lost

    @property
    def last_refresh(self) -> float:
        """When the lease was last known to live: the monotonic time at which that refresh was *sent*."""
        return self._held.last_refresh

    @property
    def suspect(self) -> bool:
        """Whether the lease may have expired unnoticed, since no refresh has worked for its whole time."""
        return self._clock.monotonic() - self._held.last_refresh >= self._held.lease.ttl_s

    def renew(self, deadline: Deadline) -> int:
        """After a loss grant a new lease (a new incarnation); its id. Does nothing while the present one lives."""
        with self._lock:
            if not self._held.lost.is_set() or self._closed.is_set():
                return self._held.lease.id
            self._retire()
            self._held = self._grant(deadline)
            self._keeper = self._start_keeper(self._held)
            return self._held.lease.id

    def close(self, deadline: Deadline | None = None, *, revoke: bool = True) -> None:
        """End the keep-alive; with ``revoke`` end the lease and its keys too, if the store can be reached.

        A lease that could not be revoked ends by itself after :attr:`ttl_s`.
        """
        self._closed.set()
        self._held.retired.set()
        with self._lock:
            self._retire()
            if not revoke or self._held.lost.is_set():
                return
            try:
                self._store.revoke(self._held.lease.id, deadline if deadline is not None else Deadline.after(2.0))
            except ElasticTrainerError as error:
                logger().warning("lease.left_to_expire", lease=self._held.lease.id, ttl_s=self.ttl_s, cause=str(error))

    def _grant(self, deadline: Deadline) -> _Held:
        sent_at = self._clock.monotonic()
        return _Held(self._store.grant(self._asked_ttl_s, deadline), sent_at)

    def _start_keeper(self, held: _Held) -> threading.Thread:
        keeper = threading.Thread(target=self._keep, args=(held,), name="lease-keeper", daemon=True)
        keeper.start()
        return keeper

    def _retire(self) -> None:
        self._held.retired.set()
        if threading.current_thread() is self._keeper:
            return  # renew() or close() called by on_lost: the thread ends when that returns
        self._keeper.join(JOIN_LIMIT_S)

    def _keep(self, held: _Held) -> None:
        """Refresh ``held`` until it is lost or retired."""
        interval_s = held.lease.ttl_s / REFRESHES_PER_TTL
        backoff = RetryBackoff()
        pause_s = interval_s * random.uniform(0.5, 1.0)  # nodes that came together need not refresh together
        while not self._clock.wait(held.retired, pause_s):
            try:
                failed = self._refresh(held, interval_s)
                if held.lost.is_set():
                    self._tell_lost(held)
                    return
            except Exception:  # noqa: BLE001 - thread edge: without its keeper the lease would end unexplained
                logger().exception("lease.keeper_failed", lease=held.lease.id)
                failed = True
            if failed:
                pause_s = min(interval_s, backoff.next_s())
            else:
                backoff.reset()
                pause_s = interval_s

    def _refresh(self, held: _Held, limit_s: float) -> bool:
        """One keep-alive; whether it failed for now."""
        sent_at = self._clock.monotonic()
        try:
            self._store.keep_alive(held.lease.id, Deadline.after(limit_s, self._clock))
        except LeaseLostError:
            held.lost.set()
            return True
        except ElasticTrainerError as error:
            if not held.retired.is_set():
                self._listener.on_error(error)
            return True
        silent_s = sent_at - held.last_refresh
        held.last_refresh = sent_at
        if silent_s >= 2 * limit_s:
            self._listener.on_recovered(silent_s)
        return False

    def _tell_lost(self, held: _Held) -> None:
        logger().warning("lease.lost", lease=held.lease.id, ttl_s=held.lease.ttl_s)
        if not held.retired.is_set():
            self._listener.on_lost()
