"""The simulated etcd: the memory store's backend, reached over a network with delays, losses and partitions."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic_trainer.errors import OutcomeUnknownError, StoreUnavailableError
from elastic_trainer.store.api import Lease, Operation, Snapshot, TransactionResult, WatchEvent, WatchListener
from tests.simulation.loop import Host, Loop, Signal, sleep
from tests.support.memory_store import MemoryBackend, holds

Answer = TypeVar("Answer")
LEASE_TURN_S = 0.5
"""How often etcd looks for leases that have ended."""


@dataclass(slots=True)
class Link:
    """One node's way to etcd: what gets there, what comes back, and how long it takes."""

    out: bool = True
    back: bool = True
    lag_s: float = 0.0
    lose_reply: float = 0.0
    """How likely the answer to a write is lost."""
    watches: list[SimWatch] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether both directions work."""
        return self.out and self.back


class Etcd(MemoryBackend):
    """One linearizable store. ``leaderless``: requests hang; they may take effect when there is a leader again."""

    def __init__(self, loop: Loop, chance: random.Random) -> None:
        super().__init__(loop)
        self.changed.acquire()  # by the one thread there is, for good: the backend's methods want it held
        self.loop, self.chance = loop, chance
        self.watches: list[SimWatch] = []
        self._by_key: dict[str, list[SimWatch]] = {}
        """Watches of one key; the others look at each write themselves."""
        self._of_prefixes: list[SimWatch] = []
        self.on_write: Callable[[Sequence[WatchEvent]], None] = lambda events: None
        self._watched = 0
        self._first_end = -math.inf
        """No lease ends before."""
        self._queued: list[Callable[[], None]] = []
        self._backup: tuple[Any, ...] | None = None
        self.loop.after(LEASE_TURN_S, self._turn)

    def _turn(self) -> None:
        self.expire()
        self.loop.after(LEASE_TURN_S, self._turn)

    def expire(self) -> float | None:
        if self.loop.now < self._first_end:
            return None
        left_s = super().expire()
        self._first_end = min((lease.expires_at for lease in self._leases.values()), default=math.inf)
        return left_s

    def grant(self, ttl_s: float) -> Lease:
        granted = super().grant(ttl_s)
        self._first_end = min(self._first_end, self.loop.now + granted.ttl_s)
        return granted

    # ---- faults

    def lose_leader(self) -> None:
        """No request is answered from now on."""
        self.outage(True)
        for watch in self.watches:
            watch.noticed_loss()

    def elect(self) -> None:
        """There is a leader again: some of the requests that came meanwhile take effect now, late."""
        if self.down:
            self.outage(False)
            queued, self._queued = self._queued, []
            for call in queued:
                if self.chance.random() < 0.5:
                    call()
            for watch in self.watches:
                watch.reconnect()

    def back_up(self) -> None:
        """Keep a copy of all there is."""
        self._backup = (self.revision, dict(self._keys), copy.deepcopy(self._leases))

    def restore(self) -> bool:
        """Go back to the copy, as another cluster; leases of the copy get their full time."""
        if self._backup is None:
            return False
        self.revision, keys, leases = self._backup
        self._keys, self._leases = dict(keys), copy.deepcopy(leases)
        self.compacted = self.revision
        self._history.clear()
        self.cluster += 1
        self._first_end = -math.inf
        for lease in self._leases.values():
            lease.expires_at = self.loop.now + lease.ttl_s
        for watch in self.watches:
            watch.noticed_loss()
            watch.reconnect()
        return True

    # ---- requests

    def request(self, link: Link, call: Callable[[], Answer], limit_s: float, *, write: bool) -> Answer:
        """In a thread of a host: ``call()`` on the server, within ``limit_s``."""
        answered: list[Answer | Exception] = []
        signal = Signal()

        def reply() -> None:
            if link.back:
                signal.fire()
            else:
                answered.clear()

        def arrive() -> None:
            if not link.out:
                return
            if self.down:
                self._queued.append(arrive)
                return
            try:
                answered.append(call())
            except Exception as error:  # noqa: BLE001 - goes to the client
                answered.append(error)
            if write and self.chance.random() < link.lose_reply:
                answered.clear()
            else:
                self.loop.after(self.delay_s(link), reply)

        self.loop.after(self.delay_s(link), arrive)
        sleep(max(limit_s, 0.001), signal)
        if not answered:
            raise OutcomeUnknownError("no answer") if write else StoreUnavailableError("no answer")
        if isinstance(answered[0], Exception):
            raise answered[0]
        return answered[0]

    def delay_s(self, link: Link) -> float:
        """How long a message takes now."""
        spread = self.chance.random()
        return link.lag_s * spread + (0.0005 + 0.005 * spread if spread < 0.95 else spread * 0.15)

    def transact(
        self, guards: Sequence[Any], success: Sequence[Operation], failure: Sequence[Operation]
    ) -> TransactionResult:
        """One transaction, now."""
        self.expire()
        succeeded = all(holds(guard, self.read(guard.key, guard.range_end)) for guard in guards)
        for operation in success if succeeded else failure:
            if getattr(operation, "lease", 0):
                self.lease(operation.lease)  # type: ignore[union-attr]
        reads = self.commit(success if succeeded else failure)
        return TransactionResult(succeeded, reads, self.revision)

    def _publish(self, revision: int, events: Sequence[WatchEvent]) -> None:
        if not events:
            return
        self.revision = revision
        self._history.extend(events)
        self.on_write(events)
        found = [watch for key in {each.item.key for each in events} for watch in self._by_key.get(key, ())]
        for watch in sorted([*found, *self._of_prefixes], key=lambda each: each.number):
            watch.push(events)

    def watch(self, watch: SimWatch, key: str, *, exact: bool) -> int:
        """Add a watch; its number among all there were."""
        self.watches.append(watch)
        (self._by_key.setdefault(key, []) if exact else self._of_prefixes).append(watch)
        self._watched += 1
        return self._watched

    def unwatch(self, watch: SimWatch, key: str, *, exact: bool) -> None:
        self.watches.remove(watch)
        (self._by_key[key] if exact else self._of_prefixes).remove(watch)


class SimWatch:
    """A watch of one client: in order, exactly once, late; anew after a gap or in another cluster."""

    def __init__(self, etcd: Etcd, host: Host, link: Link, key: str, listener: WatchListener, *, exact: bool) -> None:
        self._etcd, self._host, self._link, self._listener = etcd, host, link, listener
        self._key, self._exact = key, exact
        self._end = None if exact else key + "\x7f"
        self._position = self._cluster = 0
        self._queue: list[WatchEvent] = []
        self._stream = 0
        """Which of its streams is open; deliveries of earlier ones do not count."""
        self._connected = self._open = self._closed = False
        self._arrival = 0.0
        self.number = etcd.watch(self, key, exact=exact)
        link.watches.append(self)
        self.reconnect()

    def close(self) -> None:
        """No call reaches the listener any more."""
        self._closed = True
        self._etcd.unwatch(self, self._key, exact=self._exact)
        self._link.watches.remove(self)

    def push(self, events: Sequence[WatchEvent]) -> None:
        """The server has changes."""
        if self._open and self._link.back:
            mine = [each for each in events if self._meant(each.item.key)]
            if mine:
                self._queue.extend(mine)
                self._send(self._flush)

    def noticed_loss(self) -> None:
        """The stream is down; the client notices after a while."""
        if self._open:
            self._open = False
            self._queue.clear()
            self._stream += 1
            self._host.after(self._etcd.chance.uniform(0.05, 2.0), self._lost)

    def reconnect(self) -> None:
        """Try to open a stream, now and until it works."""
        if not self._open and not self._closed:
            self._etcd.loop.after(self._etcd.chance.uniform(0.001, 0.3), self._attach)

    def _meant(self, key: str) -> bool:
        return key == self._key if self._exact else key.startswith(self._key)

    def _send(self, call: Callable[[], None]) -> None:
        """In order: nothing overtakes what was sent before."""
        loop, stream = self._etcd.loop, self._stream
        self._arrival = max(self._arrival, loop.now + self._etcd.delay_s(self._link))

        def arrive() -> None:
            if stream == self._stream and not self._closed:
                call()

        self._host.after(self._arrival - loop.now, arrive)

    def _flush(self) -> None:
        events, self._queue = self._queue, []
        if events:
            self._position = events[-1].item.mod_revision
            self._listener.on_events(events)

    def _lost(self) -> None:
        if not self._open and self._connected and not self._closed:
            self._connected = False
            self._listener.on_connected(False)

    def _attach(self) -> None:
        etcd = self._etcd
        if self._open or self._closed or etcd.down or not self._link.whole:
            return
        self._open, self._stream = True, self._stream + 1
        if self._cluster == etcd.cluster and self._position >= etcd.compacted:
            missed = etcd.since(self._position + 1, self._key, self._end)
            self._queue = list(missed)
            self._send(self._resumed)
        else:
            self._queue = []
            snapshot = Snapshot(etcd.read(self._key, self._end), etcd.revision)
            cluster = etcd.cluster
            self._send(lambda: self._begin(snapshot, cluster))

    def _resumed(self) -> None:
        self._tell_connected()
        self._flush()

    def _begin(self, snapshot: Snapshot, cluster: int) -> None:
        self._position, self._cluster = snapshot.revision, cluster
        self._tell_connected()
        self._listener.on_snapshot(snapshot)

    def _tell_connected(self) -> None:
        if not self._connected:
            self._connected = True
            self._listener.on_connected(True)
