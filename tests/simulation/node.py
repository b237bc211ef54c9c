"""One node: the product's core, key and view, driven as the product's thread drives them, but on virtual time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, LeaseLostError, OutcomeUnknownError, ReplacedError, TransientError
from elastic_trainer.membership import member, writes
from elastic_trainer.membership.cluster_view import Limits, NodeView, Observation
from elastic_trainer.membership.core import (
    LEASE_SLACK_S,
    LOOK_AGAIN_S,
    AskOldest,
    ChangeWatch,
    CommitRound,
    Core,
    Effect,
    Ended,
    Event,
    Looked,
    Notify,
    Oldest,
    Probe,
    Probed,
    PublishAgain,
    Return,
)
from elastic_trainer.membership.documents import NodeRecord, RoundDocument
from elastic_trainer.membership.view import RunView
from elastic_trainer.membership.writes import (
    ATTEMPT_S,
    Author,
    OwnKey,
    ProbePort,
    Renew,
    RoundFailure,
    Steps,
    Transaction,
    first_names,
    oldest_keys,
    written_by_nodes,
)
from elastic_trainer.store.api import RunKeys, Store, TransactionResult
from elastic_trainer.store.session import REFRESHES_PER_TTL
from tests.simulation.etcd import Etcd, Link, WatchStore
from tests.simulation.loop import Host, Process, Signal

KEYS = RunKeys("/e", "r")
TTL_S = 2.0
CONNECT_LIMIT_S = 60.0
LEAST_TURN_S = 0.001
"""A real turn takes some time too: what is left of a wait may be too little to move the clock."""


class Flag:
    """Whether a lease is gone."""

    def __init__(self) -> None:
        self._on = False

    def is_set(self) -> bool:
        return self._on

    def set(self) -> None:
        self._on = True


@dataclass(slots=True)
class SimLease:
    """The lease of one node."""

    lease_id: int = 0
    ttl_s: float = TTL_S
    lost: Flag = field(default_factory=Flag)


class _Changed(threading.Condition):
    """The view's condition; its waiter is a process."""

    def __init__(self, signal: Signal) -> None:
        super().__init__()
        self._signal = signal

    def notify_all(self) -> None:
        self._signal.fire()


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
        self.host, self.link = Host(self.loop), Link()
        self.lease = SimLease()
        self.key = OwnKey(KEYS, name, self.lease, self.loop)
        self.changed = Signal()
        self.view = RunView(KEYS, _Changed(self.changed))
        self.core = Core(name, limits, TTL_S + LEASE_SLACK_S, chance)
        self.see: Callable[[RoundDocument], None] = lambda document: None
        self._store = cast("Store", WatchStore(etcd, self.host, self.link))
        self._probe = probe
        self._answers: list[Event] = []
        self.per_node_s = 0.0
        """How long a turn takes for each node that this one follows; what comes meanwhile waits for the next turn."""
        self.started = False
        """Whether the agent may show itself."""
        self._writing = False
        self._free = Signal()

    # ---- life

    def start(self) -> None:
        """Follow the run, hold a lease, decide."""
        self.view.start(self._store)
        self.host.start(self._begin())

    def _begin(self) -> Process:
        while not self.lease.lease_id:
            try:
                yield from self._grant(CONNECT_LIMIT_S)
            except TransientError:
                yield 0.3
        self.changed.fire()
        self.host.start(self._keep_lease())
        while not self.view.wait_loaded(0.0):
            yield self.changed, LOOK_AGAIN_S
        self.started = True
        self.host.start(self._decide())

    def leave(self) -> None:
        """The node goes, with its key."""
        self.etcd.end_lease(self.lease.lease_id)
        self.die()

    def die(self) -> None:
        """Nothing of it runs any more."""
        self.host.dead = True
        for watch in list(self.link.watches):
            watch.close()

    def _grant(self, limit_s: float) -> Process:
        granted = yield from self.etcd.request(self.link, lambda: self.etcd.grant(TTL_S), limit_s, write=True)
        self.lease.lease_id, self.lease.lost = granted.id, Flag()

    def _keep_lease(self) -> Process:
        while True:
            yield TTL_S / REFRESHES_PER_TTL * self.chance.uniform(0.8, 1.0)
            lease = self.lease.lease_id
            if self.lease.lost.is_set():
                continue
            try:
                yield from self.etcd.request(self.link, partial(self._refresh, lease), 0.66, write=False)
            except LeaseLostError:
                if lease == self.lease.lease_id:
                    self.lease.lost.set()
            except TransientError:
                yield 0.1

    def _refresh(self, lease: int) -> None:
        self.etcd.expire()
        record = self.etcd.lease(lease)
        record.expires_at = self.loop.now + record.ttl_s

    # ---- the core's driver

    def _decide(self) -> Process:
        while True:
            self.view.tidy()
            seen = self.view.look()
            answers, self._answers = self._answers, []
            looked = Looked(seen, self.key.create_revision, self.key.senior, self.key.away)
            step = self.core.step([*answers, looked], self.loop.now)
            if self.per_node_s and seen.follows_nodes:
                yield self.per_node_s * len(seen.nodes)
            for effect in step.effects:
                yield from self._perform(effect)
            if self.view.look().serial == seen.serial:
                yield self.changed, max(LEAST_TURN_S, step.next_at - self.loop.now)

    def _perform(self, effect: Effect) -> Process:
        again_in_s = None
        try:
            done = yield from self._do(effect)
            if not done:
                again_in_s = member.LOST_RACE_S
        except TransientError:
            again_in_s = member.OUTAGE_S
        except (ConfigError, ReplacedError):
            again_in_s = LOOK_AGAIN_S
        self._answers.append(Ended(effect, again_in_s))

    def _do(self, effect: Effect) -> Generator[Any, Any, bool]:
        deadline = Deadline.after(member.WRITE_TIMEOUT_S, self.loop)
        if isinstance(effect, Notify):
            self.see(effect.document)
        elif isinstance(effect, Return):
            yield from self._steps(self.key.returning(deadline))
            self.view.wake()
        elif isinstance(effect, PublishAgain):
            yield from self._steps(self.key.publishing_again(deadline))
        elif isinstance(effect, CommitRound) and effect.decision.round is not None:
            return (yield from self._commit(effect.decision.round, effect.seen))
        elif isinstance(effect, ChangeWatch):
            self.view.change(self._store, nodes=effect.nodes)
        elif isinstance(effect, AskOldest):
            yield from self._ask_oldest(effect)
        elif isinstance(effect, Probe):
            for node in effect.nodes:
                self._start_probe(node.id, node.mod_revision)
        return True

    def _ask_oldest(self, effect: AskOldest) -> Process:
        wanted = oldest_keys(KEYS, effect.places + len(effect.ghosts))
        found = yield from self.etcd.request(self.link, lambda: self.etcd.perform(wanted), 2.0, write=False)
        names = first_names(written_by_nodes(found, KEYS), effect.ghosts, effect.places)
        self._answers.append(Oldest(tuple(names)))

    def _start_probe(self, other: str, revision: int) -> None:
        def ended() -> None:
            dead = self._probe(self.name, other)
            self._answers.append(Probed(other, revision, bool(dead)))
            if dead:
                self.view.wake()

        self.loop.after(self.chance.uniform(0.001, 0.02), lambda: self.host.deliver(ended))

    def _commit(
        self,
        document: RoundDocument,
        seen: Observation,
        record: NodeRecord | None = None,
        limit_s: float = writes.ATTEMPT_S,
    ) -> Generator[Any, Any, bool]:
        author = Author(KEYS, self.name, self.key.create_revision)
        more = [self.key.put(record)] if record is not None else []
        write = writes.round_write(author, document, seen.round_revision, self.loop.wall(), *more, limit_s=limit_s)
        if write is None:
            return False
        if record is not None:
            self.key.written = None
        try:
            result = yield from self._send(write)
        except OutcomeUnknownError:
            return False
        if result.succeeded:
            if record is not None:
                self.key.wrote(record, result.revision)
            self.view.note_round(document, result.revision, seen)
        return bool(result.succeeded)

    # ---- writes of the node's key, one at a time

    def _send(self, write: Transaction) -> Generator[Any, Any, TransactionResult]:
        return (
            yield from self.etcd.request(
                self.link,
                lambda: self.etcd.transact(write.guards, write.success, write.failure),
                write.limit_s,
                write=True,
            )
        )

    def _lock(self) -> Process:
        while self._writing:
            yield self._free, float("inf")
        self._writing = True

    def _unlock(self) -> None:
        self._writing = False
        self._free.fire()

    def _steps(self, steps: Steps) -> Process:
        """Answer the requests of ``steps``, as Member does."""
        answer: Any = None
        error: Exception | None = None
        yield from self._lock()
        try:
            while True:
                try:
                    request = steps.throw(error) if error is not None else steps.send(answer)
                except StopIteration:
                    return
                answer = error = None
                try:
                    if isinstance(request, Transaction):
                        answer = yield from self._send(request)
                    elif isinstance(request, Renew):
                        yield from self._grant(request.limit_s)
                    elif isinstance(request, ProbePort):
                        answer = False
                    elif request.shared:
                        self._unlock()
                        yield request.seconds
                        yield from self._lock()
                    else:
                        yield request.seconds
                except (TransientError, LeaseLostError) as raised:
                    error = raised
        finally:
            self._unlock()

    # ---- what the agent does, as Member

    def look(self) -> Observation:
        return self.view.look()

    def published(self) -> NodeRecord | None:
        return self.key.published

    def found_dead(self, nodes: Mapping[str, NodeView]) -> frozenset[str]:
        return self.core.found_dead(nodes)

    def show(self, record: NodeRecord, limit_s: float = ATTEMPT_S) -> Process:
        """As Member.announce."""
        yield from self._steps(self.key.publishing(record, Deadline.after(limit_s, self.loop)))
        self.view.wake()

    def break_round(self, failure: RoundFailure, record: NodeRecord | None, limit_s: float = 5.0) -> Process:
        """As Member.break_round."""
        deadline = Deadline.after(limit_s, self.loop)
        while not deadline.expired:
            seen = self.view.look()
            document = writes.breaking(seen.round, failure, self.limits)
            if document is None:
                return
            if record is not None:
                yield from self._lock()
            try:
                limit_left_s = min(writes.ATTEMPT_S, deadline.remaining_s())
                if (yield from self._commit(document, seen, record, limit_left_s)):
                    return
            except TransientError:
                pass
            finally:
                if record is not None:
                    self._unlock()
            if self.view.look().serial == seen.serial:
                yield self.changed, min(0.2, deadline.remaining_s())
