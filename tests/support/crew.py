"""Members of one run in one process, on one memory store: each with the loop of a node agent, to be killed and frozen.

Leases run on a clock that the test moves; everything else runs on the real one, with limits of milliseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic_trainer.agent.rendezvous.restart import round_is_over
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.documents import (
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
)
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.presence import Presence
from elastic_trainer.model import Incarnation
from elastic_trainer.store.api import (
    Compare,
    Lease,
    Operation,
    Order,
    Put,
    Snapshot,
    TransactionResult,
    Watch,
    WatchEvent,
    WatchListener,
)
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.session import LeaseSession
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore

LIMIT_S = 60.0
"""How long anything may take on a slow machine before a test fails."""
TTL_S = 2.0
KEYS = RunKeys("/elastic_trainer", "crew")
QUICK = Limits(
    min_nodes=2,
    max_nodes=4,
    last_call_s=0.05,
    regroup_grace_s=30.0,
    join_batch_s=0.02,
    join_interval_s=0.05,
    deputy_delay_s=0.03,
)


def soon() -> Deadline:
    """A deadline that no working machine reaches."""
    return Deadline.after(LIMIT_S)


def eventually(condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Wait until ``condition()`` holds; fail with ``what`` otherwise."""
    deadline = soon()
    while not condition():
        assert not deadline.expired, what if isinstance(what, str) else what()
        pause(0.005)


class _Backend(MemoryBackend):
    """Keeps every version of the round document, in order."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.history: list[RoundDocument] = []

    def commit(self, operations: Sequence[Operation]) -> tuple[Snapshot, ...]:
        for operation in operations:
            if isinstance(operation, Put) and operation.key == KEYS.round:
                self.history.append(RoundDocument.decode(operation.value, operation.key))
        return super().commit(operations)


class Gate:
    """Everything that passes it stands still while it is shut, as in a frozen process."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = 0

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @property
    def is_shut(self) -> bool:
        return not self._open.is_set()

    def pass_through(self) -> None:
        if self._open.is_set():
            return
        self.waiting += 1
        self._open.wait()
        self.waiting -= 1


class GatedStore:
    """A client of the memory store whose calls stop at a gate, before they are sent and before they return.

    ``before_round_write``, when set, is called before each transaction that writes the round document.
    """

    def __init__(self, backend: MemoryBackend, gate: Gate) -> None:
        self.inner, self._gate = MemoryStore(backend), gate
        self.before_round_write: Callable[[], None] | None = None
        self.calls: list[str] = []
        self.round_writes: list[set[str]] = []
        """The keys of each transaction that writes the round document."""

    def _through(self, name: str, call: Callable[[], Any]) -> Any:
        self._gate.pass_through()
        self.calls.append(name)
        result = call()
        self._gate.pass_through()
        return result

    def get(self, key: str, deadline: Deadline) -> Snapshot:
        found: Snapshot = self._through("get", lambda: self.inner.get(key, deadline))
        return found

    def range(
        self, prefix: str, deadline: Deadline, *, limit: int = 0, order: Order = Order.KEY, keys_only: bool = False
    ) -> Snapshot:
        found: Snapshot = self._through(
            "range", lambda: self.inner.range(prefix, deadline, limit=limit, order=order, keys_only=keys_only)
        )
        return found

    def transact(
        self,
        guards: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        deadline: Deadline,
    ) -> TransactionResult:
        written = {operation.key for operation in success if isinstance(operation, Put)}
        if writes_round := KEYS.round in written:
            self.round_writes.append(written)
        if writes_round and self.before_round_write is not None:
            self.before_round_write()
        name = "round" if writes_round else "transact"
        result: TransactionResult = self._through(
            name, lambda: self.inner.transact(guards, success, failure, deadline=deadline)
        )
        return result

    def grant(self, ttl_s: float, deadline: Deadline) -> Lease:
        lease: Lease = self._through("grant", lambda: self.inner.grant(ttl_s, deadline))
        return lease

    def keep_alive(self, lease_id: int, deadline: Deadline) -> float:
        left_s: float = self._through("keep_alive", lambda: self.inner.keep_alive(lease_id, deadline))
        return left_s

    def revoke(self, lease_id: int, deadline: Deadline) -> None:
        self._through("revoke", lambda: self.inner.revoke(lease_id, deadline))

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        return self.inner.watch(prefix, _GatedListener(listener, self._gate), exact=exact)

    def version(self, deadline: Deadline) -> str:
        version: str = self._through("version", lambda: self.inner.version(deadline))
        return version

    def close(self) -> None:
        self.inner.close()


class _GatedListener:
    def __init__(self, listener: WatchListener, gate: Gate) -> None:
        self._listener, self._gate = listener, gate

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._gate.pass_through()
        self._listener.on_snapshot(snapshot)

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        self._gate.pass_through()
        self._listener.on_events(events)

    def on_connected(self, connected: bool) -> None:
        self._gate.pass_through()
        self._listener.on_connected(connected)


@dataclass(frozen=True, slots=True)
class Trained:
    """A round as one member read it, and the life that it took part with."""

    document: RoundDocument
    incarnation: Incarnation

    def entry(self, name: str) -> RoundMember:
        found = self.document.member(name)
        assert found is not None
        return found


class Agent:
    """One member and the loop of its node: join, work until the round is over, join again.

    It does what the torchrun handler does in restart mode, with flags in the place of worker processes.
    """

    def __init__(self, backend: MemoryBackend, name: str, limits: Limits, size: int = 1) -> None:
        self.name, self.size = name, size
        self.gate = Gate()
        self.store = GatedStore(backend, self.gate)
        self.session = LeaseSession(self.store, TTL_S, soon(), clock=backend.clock)
        self.presence = Presence(self.store, KEYS, name, self.session)
        self.member = Member(self.store, KEYS, self.presence, limits)
        self.trained: list[Trained] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.killed = self.left = False
        self._worker_fails = False
        self._worker_done = False
        self._at_work = False
        self._leaving = False
        self._life = 0
        self._thread = threading.Thread(target=self._run, name=f"agent-{name}", daemon=True)
        self.member.start(soon())
        self._thread.start()

    # ---- what the test does to it

    def fail_worker(self) -> None:
        """Its workers crash."""
        self._worker_fails = True

    def finish(self) -> None:
        """Its workers end with success."""
        self._worker_done = True

    def freeze(self) -> None:
        self.gate.shut()

    def thaw(self) -> None:
        self.gate.open()

    def kill(self) -> None:
        """It never does anything again; its lease runs out."""
        self.killed = True
        self.gate.shut()

    def leave(self) -> None:
        """Its node goes in an orderly way: its last act takes its key away."""
        self.left = True
        self.gate.shut()
        MemoryStore(self.store.inner.backend).revoke(self.session.lease_id, soon())

    @property
    def alive(self) -> bool:
        return not (self.killed or self.left or self.gate.is_shut or self.ended.is_set())

    @property
    def at_work(self) -> bool:
        """Whether its workers run and have no reason to end."""
        return self._at_work and not self._worker_fails

    @property
    def newest(self) -> RoundDocument | None:
        """The round that it took part in last."""
        return self.trained[-1].document if self.trained else None

    def release(self) -> None:
        """Let whatever still runs go to its end."""
        self._leaving = True
        self.store.before_round_write = None
        self.store.inner.cut_off(False)
        self.gate.open()

    def dispose(self) -> None:
        """End all its threads; the run must be closed by now."""
        self._thread.join(LIMIT_S)
        self.member.leave()
        self.store.close()
        assert not self._thread.is_alive()

    # ---- its loop

    def _run(self) -> None:
        try:
            while not self._leaving:
                self._join()
                if not self._work():
                    return
        except ElasticTrainerError as error:
            self.error = error
        finally:
            self.ended.set()

    def _join(self) -> None:
        planned, cause = self._leave_round()
        self._life += 1
        free_for = self.trained[-1].document.number + 1 if self.trained else 0
        record = NodeRecord(
            host=self.name,
            address="127.0.0.1",
            local_world_size=self.size,
            store_port=1,
            probe_port=0,
            state=NodeState.READY,
            life=self._life,
            acknowledged=free_for,
            reported=free_for,
            planned=planned,
            cause=cause,
        )
        self.member.announce(record, soon())
        document = self.member.await_round(LIMIT_S)
        entry = document.member(self.name)
        assert entry is not None
        self._worker_fails = False  # those that were told to crash are gone
        self.trained.append(Trained(document, entry.incarnation))

    def _leave_round(self) -> tuple[bool, str]:
        current = self.newest
        seen = self.member.look().round
        if current is None or seen is None or round_is_over(current, seen):
            return True, ""
        self.member.break_round(current.number, f"workers of {self.name} failed", soon())
        return False, "its workers failed"

    def _work(self) -> bool:
        """Whether the node goes on after this round."""
        current = self.trained[-1].document
        self._at_work = True
        try:
            return self._goes_on(current)
        finally:
            self._at_work = False

    def _goes_on(self, current: RoundDocument) -> bool:
        while not self._leaving:
            seen = self.member.look()
            if round_is_over(current, seen.round):
                return True
            if self._worker_fails:
                return True
            if self._worker_done:
                done = self.member.record().model_copy(update={"state": NodeState.DONE, "planned": True})
                self.member.announce(done, soon())
                self.member.await_end(current.number, LIMIT_S)
                return False
            self.gate.pass_through()
            pause(0.005)
        return False


@dataclass
class Crew:
    """All agents of one run, the store between them, and the history of its round document."""

    limits: Limits = QUICK
    clock: ManualClock = field(default_factory=ManualClock)
    agents: dict[str, Agent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend = _Backend(self.clock)
        self.observer = MemoryStore(self.backend)
        self.history = self.backend.history

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.outage(False)
        self.backend.lose_replies(0)
        self._close_run()
        for agent in self.agents.values():
            agent.release()
        for agent in self.agents.values():
            agent.dispose()
        self.observer.close()

    def _close_run(self) -> None:
        """Whoever waits for a round hears that there will be none."""
        found = self.document or RoundDocument(number=0, nonce="none", state=RoundState.ACTIVE, members=())
        closed = found.model_copy(
            update={"state": RoundState.CLOSED, "result": RunResult.FAILED, "reason": "test ended"}
        )
        self.observer.transact([], [Put(KEYS.round, closed.encode())], deadline=soon())

    def join(self, *names: str, size: int = 1, limits: Limits | None = None) -> list[Agent]:
        """New nodes, one after the other: the seniority is in this order."""
        joined = []
        for name in names:
            joined.append(Agent(self.backend, name, limits or self.limits, size))
            self.agents[name] = joined[-1]
            eventually(partial(self._shown, name), f"{name} does not show itself")
        return joined

    def _shown(self, name: str) -> bool:
        return self.observer.get(KEYS.node(name), soon()).first is not None

    @property
    def alive(self) -> list[Agent]:
        """Those that neither ended nor stand still."""
        return [agent for agent in self.agents.values() if agent.alive]

    @property
    def document(self) -> RoundDocument | None:
        """The round document as stored."""
        found = self.observer.get(KEYS.round, soon()).first
        return RoundDocument.decode(found.value, found.key) if found else None

    def expire(self, seconds: float = TTL_S + 0.5) -> None:
        """Let lease time pass; the leases of all that are alive are refreshed meanwhile."""
        passed = 0.0
        while passed < seconds:
            self.backend.advance(0.5)
            passed += 0.5
            for agent in self.alive:
                eventually(partial(self._refreshed, agent), f"{agent.name} does not refresh its lease")

    def _refreshed(self, agent: Agent) -> bool:
        if self._fresh(agent):
            return True
        # A keeper that had just begun a pause when time passed waits for more time.
        pause(0.02)
        self.backend.advance(0.05)
        return False

    def _fresh(self, agent: Agent) -> bool:
        return (
            self.clock.monotonic() - agent.session.last_refresh < TTL_S - 0.7
            or agent.session.lost.is_set()
            or not agent.alive
            or not agent.store.inner.reachable
        )

    def await_round(self, names: Sequence[str], after: int = 0) -> RoundDocument:
        """Wait until exactly ``names``, in this rank order, all work in one active round later than ``after``."""
        eventually(lambda: self._together(list(names), after), lambda: f"no round of {names} came: {self.describe()}")
        document = self.agents[names[0]].newest
        assert document is not None
        return document

    def _together(self, names: list[str], after: int) -> bool:
        current = self.document
        if current is None or current.state is not RoundState.ACTIVE or current.number <= after:
            return False
        return [m.node for m in current.members] == names and all(self.agents[n].newest == current for n in names)

    def await_document(self, condition: Callable[[RoundDocument], bool], what: str) -> RoundDocument:
        """Wait until the stored round document satisfies ``condition``."""
        eventually(
            lambda: (current := self.document) is not None and condition(current),
            lambda: f"{what}: {self.describe()}",
        )
        document = self.document
        assert document is not None
        return document

    def settled(self) -> bool:
        """Whether all that are alive work together as far as max allows, and no key of others is left."""
        current = self.document
        alive = {agent.name for agent in self.alive}
        if current is None or current.state is not RoundState.ACTIVE:
            return False
        members = [member.node for member in current.members]
        return (
            set(members) <= alive
            and len(members) == min(len(alive), self.limits.max_nodes)
            and all(self.agents[name].newest == current and self.agents[name].at_work for name in members)
        )

    def describe(self) -> str:
        """What is known, for a failure's message."""
        lines = [
            f"{agent.name}: alive={agent.alive} error={agent.error!r} "
            f"rounds={[t.document.number for t in agent.trained]}"
            for agent in self.agents.values()
        ]
        told = [f"{d.number} {d.state} {[m.node for m in d.members]} {d.reason}" for d in self.history[-8:]]
        return "\n".join([*lines, *told])
