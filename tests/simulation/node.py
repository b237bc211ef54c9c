"""One node: the product's member, with its key, view and core, on virtual time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import LeaseLostError, TransientError
from elastic_trainer.membership.cluster_view import Limits, NodeView
from elastic_trainer.membership.core import LEASE_SLACK_S, Answer, Core, Effect, Looked, Probe, Probed, TurnOutcome
from elastic_trainer.membership.documents import RoundDocument
from elastic_trainer.membership.member import Member, OwnKey
from elastic_trainer.membership.view import RunView
from elastic_trainer.store.api import (
    KeyValue,
    Read,
    RunKeys,
    Snapshot,
    Store,
    TransactionResult,
    Watch,
    WatchListener,
    prefix_end,
)
from elastic_trainer.store.session import REFRESHES_PER_TTL, LeaseSession
from tests.simulation.etcd import Etcd, Link, SimWatch
from tests.simulation.loop import Changed, Host, Lock, Signal, sleep

KEYS = RunKeys("/e", "r")
TTL_S = 2.0
TURN_S = 0.002
CONNECT_LIMIT_S = 60.0


@dataclass(slots=True)
class SimLease:
    """The lease of one node."""

    grant: Callable[[float], int]
    lease_id: int = 0
    ttl_s: float = TTL_S
    lost: threading.Event = field(default_factory=threading.Event)

    def renew(self, deadline: Deadline) -> int:
        self.lease_id, self.lost = self.grant(deadline.remaining_s()), threading.Event()
        return self.lease_id


class SimStore:
    """What a node asks of etcd, over its link."""

    def __init__(self, etcd: Etcd, host: Host, link: Link) -> None:
        self._etcd, self._host, self._link = etcd, host, link

    def transact(
        self, guards: Sequence[Any], success: Sequence[Any], failure: Sequence[Any] = (), *, deadline: Deadline
    ) -> TransactionResult:
        write = any(not isinstance(each, Read) for each in (*success, *failure))
        call = lambda: self._etcd.transact(guards, success, failure)  # noqa: E731 - keep-alives are partials
        return self._etcd.request(self._link, call, deadline.remaining_s(), write=write)

    def range(self, prefix: str, deadline: Deadline) -> Snapshot:
        return self.transact([], [Read(prefix, prefix_end(prefix))], deadline=deadline).reads[0]

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        return SimWatch(self._etcd, self._host, self._link, prefix, listener, exact=exact)


class SlowCore(Core):
    """A turn takes time, as a real one does: what happens meanwhile is seen by the next one, all at once."""

    def step(self, answers: Iterable[Answer], look: Looked, now: float) -> TurnOutcome:
        sleep(TURN_S)
        return super().step(answers, look, now)


class SimKey(OwnKey):
    """Its lock is one of greenlets, and it proves no death of the owner of a key."""

    def _is_dead(self, key: KeyValue) -> bool:
        return False


class SimMember(Member):
    """Its chance is that of the schedule, and it probes over the schedule's network."""

    def __init__(self, node: SimNode, probe: Callable[[str, str], bool | None]) -> None:
        lease = cast("LeaseSession", node.lease)
        super().__init__(node.store, KEYS, node.name, lease, node.limits, lambda error: None, node.loop)
        self.key = self._key = SimKey(node.store, KEYS, node.name, lease, node.loop)
        self.key.lock = Lock()  # type: ignore[assignment]
        self.name, self._host, self._chance, self._is_gone = node.name, node.host, node.chance, probe
        self.view = self._view = RunView(KEYS, Changed(node.loop, node.changed))
        self._core = SlowCore(node.name, node.limits, TTL_S + LEASE_SLACK_S, node.chance)

    def _do(self, effect: Effect) -> bool:
        if not isinstance(effect, Probe):
            return super()._do(effect)
        for each in effect.nodes:
            self._host.after(self._chance.uniform(0.001, 0.02), self._ended, each)
        return True

    def _ended(self, other: NodeView) -> None:
        self._probed(Probed(other.id, other.mod_revision, bool(self._is_gone(self.name, other.id))))


class SimNode:
    """See the module. ``see(document)`` is called with each new round document."""

    def __init__(
        self,
        etcd: Etcd,
        name: str,
        limits: Limits,
        chance: random.Random,
        probe: Callable[[str, str], bool | None],
    ) -> None:
        self.etcd, self.loop, self.name, self.limits, self.chance = etcd, etcd.loop, name, limits, chance
        self.host, self.link, self.changed = Host(self.loop), Link(), Signal()
        self.store = cast("Store", SimStore(etcd, self.host, self.link))
        self.lease = SimLease(self._granted)
        self.member = SimMember(self, probe)
        self.key = self.member.key
        self.view = self.member.view
        self.see: Callable[[RoundDocument], None] = lambda document: None
        self.member.on_round(lambda document: self.see(document))

    def start(self, arrived: Callable[[], None]) -> None:
        """Follow the run, hold a lease, decide; ``arrived()`` is called when the agent may show itself."""
        self.view.start(self.store)
        self.host.start(self._begin, arrived)

    def _begin(self, arrived: Callable[[], None]) -> None:
        while not self.lease.lease_id:
            try:
                self.lease.renew(Deadline.after(CONNECT_LIMIT_S, self.loop))
            except TransientError:
                sleep(0.3)
        self.changed.fire()
        self.host.start(self._keep_lease)
        self.view.wait_loaded(float("inf"))
        self.host.start(self.member._run)
        arrived()

    def leave(self) -> None:
        """The node goes, with its key."""
        self.etcd.end_lease(self.lease.lease_id)
        self.die()

    def die(self) -> None:
        """Nothing of it runs any more."""
        self.host.dead = True
        for watch in list(self.link.watches):
            watch.close()

    def _granted(self, limit_s: float) -> int:
        return self.etcd.request(self.link, lambda: self.etcd.grant(TTL_S), limit_s, write=True).id

    def _keep_lease(self) -> None:
        while True:
            sleep(TTL_S / REFRESHES_PER_TTL * self.chance.uniform(0.8, 1.0))
            lease = self.lease.lease_id
            if self.lease.lost.is_set():
                continue
            try:
                self.etcd.request(self.link, partial(self._refresh, lease), 0.66, write=False)
            except LeaseLostError:
                if lease == self.lease.lease_id:
                    self.lease.lost.set()
            except TransientError:
                sleep(0.1)

    def _refresh(self, lease: int) -> None:
        self.etcd.expire()
        record = self.etcd.lease(lease)
        record.expires_at = self.loop.now + record.ttl_s
