"""Nodes for the rendezvous benchmark: many real members in one process, each with a connection of its own to etcd.

A node is what an agent has in restart mode (admission, lease, key, Member); its workers alone are missing: they are
free the moment that their round is over. ``python -m tests.bench.rendezvous_nodes`` reads one command a line from its
input, JSON, and answers each with a line. Times are monotonic seconds, which the processes of one host share.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TextIO

import structlog

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.membership.admission import admit
from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundState, Spec
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.presence import Presence
from elastic_trainer.membership.round_write import RoundFailure
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect_checked
from elastic_trainer.store.api import (
    Compare,
    Lease,
    Operation,
    Order,
    Snapshot,
    Store,
    TransactionResult,
    Watch,
    WatchEvent,
    WatchListener,
)
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.session import LeaseSession

LIMIT_S = 300.0
"""Nothing takes so long on a working machine."""
STACK_BYTES = 512 << 10
LOCAL_WORLD_SIZE = 8
HANDS = 64
"""So many nodes of a process connect, or go, at the same time."""


def soon() -> Deadline:
    """A deadline that no working machine reaches."""
    return Deadline.after(LIMIT_S)


class CountingStore:
    """A store that counts what it sends, by kind; a watch is two requests: the stream and the read of what is there.

    ``keep_alive`` and ``connect`` (the one read that tests a new connection) have kinds of their own.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._closed = False
        self.sent: Counter[str] = Counter(connect=1)
        self.events = 0

    def _count(self, *kinds: str) -> None:
        with self._lock:
            if not self._closed:
                self.sent.update(kinds)

    def saw(self, events: int) -> None:
        """A watch delivered so many."""
        with self._lock:
            self.events += events

    def get(self, key: str, deadline: Deadline) -> Snapshot:
        self._count("range")
        return self._inner.get(key, deadline)

    def range(
        self, prefix: str, deadline: Deadline, *, limit: int = 0, order: Order = Order.KEY, keys_only: bool = False
    ) -> Snapshot:
        self._count("range")
        return self._inner.range(prefix, deadline, limit=limit, order=order, keys_only=keys_only)

    def transact(
        self,
        guards: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        deadline: Deadline,
    ) -> TransactionResult:
        self._count("transaction")
        return self._inner.transact(guards, success, failure, deadline=deadline)

    def grant(self, ttl_s: float, deadline: Deadline) -> Lease:
        self._count("lease_grant")
        return self._inner.grant(ttl_s, deadline)

    def keep_alive(self, lease_id: int, deadline: Deadline) -> float:
        self._count("keep_alive")
        return self._inner.keep_alive(lease_id, deadline)

    def revoke(self, lease_id: int, deadline: Deadline) -> None:
        self._count("lease_revoke")
        self._inner.revoke(lease_id, deadline)

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        self._count("watch", "range")
        return self._inner.watch(prefix, _CountingListener(listener, self), exact=exact)

    def version(self, deadline: Deadline) -> str:
        self._count("status")
        return self._inner.version(deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._inner.close()


class _CountingListener:
    def __init__(self, inner: WatchListener, store: CountingStore) -> None:
        self._inner, self._store = inner, store
        self.on_snapshot, self.on_connected = inner.on_snapshot, inner.on_connected

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        self._store.saw(len(events))
        self._inner.on_events(events)


@dataclass(frozen=True, slots=True)
class Job:
    """What all nodes of the run share."""

    endpoint: str
    run: str
    min_nodes: int
    max_nodes: int
    ttl_s: float
    last_call_s: float
    transport: str
    """``product``: the store as it is. ``aio``: the benchmark's own, see ``rendezvous_transport``."""

    @property
    def keys(self) -> RunKeys:
        """The run's keys."""
        return RunKeys("/bench", self.run)

    def connector(self) -> Callable[[], Store]:
        """What makes one node's connection, tested as a node's is."""
        if self.transport == "product":
            settings = StoreSettings(endpoints=parse_endpoints(self.endpoint), prefix="/bench")
            return lambda: connect_checked(settings, soon())
        from tests.bench.rendezvous_transport import AioStore, EventLoop

        loop = EventLoop()

        def connect() -> Store:
            store = AioStore(self.endpoint, loop)
            store.range("/bench/", soon(), limit=1)
            return store

        return connect


@dataclass
class Notes:
    """What the nodes of this process tell: when a round document was first seen by any, and that something changed."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    first_seen: dict[str, float] = field(default_factory=dict)

    def see(self, document: RoundDocument) -> None:
        """Some node has seen this version."""
        now = SYSTEM.monotonic()
        with self.changed:
            self.first_seen.setdefault(f"{document.number} {document.state}", now)


class SimulatedNode:
    """One node: connected at once, part of the run after :meth:`begin`."""

    def __init__(self, name: str, job: Job, notes: Notes, store: Store) -> None:
        self.name, self._job, self._notes = name, job, notes
        self.store = CountingStore(store)
        self.joined_at = 0.0
        self.agreed: RoundDocument | None = None
        self.agreed_at = 0.0
        self.error: str | None = None
        self.gone = False
        self._member: Member | None = None
        self._moved = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"node-{name}", daemon=True)

    def begin(self) -> None:
        """Join, and take part in every round from now on."""
        self._thread.start()

    def leave(self) -> None:
        """Go in an orderly way: the lease is revoked."""
        self._end()
        self.store.close()

    def kill(self) -> None:
        """Fall silent: the connection is cut, and the lease runs out."""
        self.store.close()
        self._end()

    def fail_workers(self) -> None:
        """What an agent does when its workers' collective fails."""
        if self._member is not None and self.agreed is not None:
            self._member.break_round(RoundFailure(self.agreed.number, f"workers of {self.name} lost a peer"), soon())

    @property
    def follows_nodes(self) -> bool:
        """Whether it is one of those that watch the nodes."""
        return self._member is not None and self._member.look().follows_nodes

    def _end(self) -> None:
        self.gone = True
        if self._member is not None:
            self._member.leave()
        self._moved.set()

    def _run(self) -> None:
        try:
            member = self._member = self._arrive()
            while not self.gone:
                self._show(member)
                self._take_part(member, member.await_round(LIMIT_S))
        except ElasticTrainerError as error:
            if not self.gone:
                self.error = str(error)
                self._notify()

    def _arrive(self) -> Member:
        """As the handler does."""
        job = self._job
        spec = Spec(min_nodes=job.min_nodes, max_nodes=job.max_nodes)
        admit(self.store, job.keys, spec, reopen=False, deadline=soon())
        session = LeaseSession(self.store, job.ttl_s, soon())
        limits = Limits(job.min_nodes, job.max_nodes, last_call_s=job.last_call_s, last_call_limit_s=LIMIT_S)
        presence = Presence(self.store, job.keys, self.name, session)
        member = Member(self.store, job.keys, presence, limits, lambda error: None)
        member.on_round(self._hear)
        member.start(soon())
        return member

    def _hear(self, document: RoundDocument) -> None:
        self._notes.see(document)
        if self.agreed is not None and is_over(self.agreed, document):
            self._moved.set()

    def _show(self, member: Member) -> None:
        free_for = self.agreed.number + 1 if self.agreed is not None else 0
        record = NodeRecord(
            host=f"host-{self.name}.example.com",
            address="127.0.0.1",
            local_world_size=LOCAL_WORLD_SIZE,
            store_port=29500,
            probe_port=0,
            state=NodeState.READY,
            life=1 if self.agreed is None else member.record().life + 1,
            acknowledged=free_for,
            reported=free_for,
            planned=True,
        )
        member.announce(record, soon())
        self.joined_at = self.joined_at or SYSTEM.monotonic()

    def _take_part(self, member: Member, document: RoundDocument) -> None:
        """Work until the round is over."""
        self.agreed, self.agreed_at = document, SYSTEM.monotonic()
        self._notify()
        while not self.gone:
            self._moved.clear()
            newest = member.look().round
            if newest is not None and is_over(document, newest):
                return
            self._moved.wait()

    def _notify(self) -> None:
        with self._notes.changed:
            self._notes.changed.notify_all()

    def as_json(self) -> dict[str, Any]:
        """For the benchmark."""
        agreed = self.agreed
        entry = agreed.member(self.name) if agreed is not None else None
        return {
            "name": self.name,
            "error": self.error,
            "joined_at": self.joined_at,
            "agreed_at": self.agreed_at,
            "round": agreed.number if agreed is not None else 0,
            "nonce": agreed.nonce if agreed is not None else "",
            "store": agreed.store if agreed is not None else "",
            "nodes": len(agreed.members) if agreed is not None else 0,
            "first_rank": entry.first_rank if entry is not None else None,
            "follows_nodes": self.follows_nodes,
            "sent": dict(self.store.sent),
            "events": self.store.events,
        }


def is_over(mine: RoundDocument, seen: RoundDocument) -> bool:
    """The handler's ``round_is_over``; importing that would import torch."""
    over = seen.state in (RoundState.BROKEN, RoundState.DRAINING)
    return seen.number > mine.number or (seen.number == mine.number and over)


class NodeServer:
    """The nodes of this process, led by commands."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._notes = Notes()
        self._nodes: dict[str, SimulatedNode] = {}
        self._hands = ThreadPoolExecutor(HANDS)
        self._connect = job.connector()

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        name = command["do"]
        mine = [self._nodes[each] for each in command.get("nodes", ()) if each in self._nodes]
        if name == "connect":
            made = self._all(self._made, command["nodes"])
            self._nodes |= {node.name: node for node in made}
            return {}
        if name == "await":
            return self._await(command["size"], command["after"])
        act = {
            "begin": SimulatedNode.begin,
            "leave": SimulatedNode.leave,
            "kill": SimulatedNode.kill,
            "fail": SimulatedNode.fail_workers,
        }[name]
        began = SYSTEM.monotonic()
        self._all(act, mine)
        return {"began": began, "ended": SYSTEM.monotonic()}

    def _made(self, name: str) -> SimulatedNode:
        return SimulatedNode(name, self._job, self._notes, self._connect())

    def _all(self, act: Callable[[Any], Any], subjects: Sequence[Any]) -> list[Any]:
        return list(self._hands.map(act, subjects))

    def _await(self, size: int, after: int) -> dict[str, Any]:
        """Wait until all nodes here take part in a round of ``size`` nodes later than ``after``."""

        def together() -> bool:
            alive = [node for node in self._nodes.values() if not node.gone]
            return any(node.error for node in alive) or all(
                node.agreed is not None and node.agreed.number > after and len(node.agreed.members) == size
                for node in alive
            )

        with self._notes.changed:
            self._notes.changed.wait_for(together, LIMIT_S)
            first_seen = dict(self._notes.first_seen)
        return {
            "nodes": [node.as_json() for node in self._nodes.values() if not node.gone],
            "gone": [node.as_json() for node in self._nodes.values() if node.gone],
            "first_seen": first_seen,
        }


def serve(commands: TextIO, answers: TextIO) -> None:
    """The process: its first line describes the job, each later one is a command; it ends with its input."""
    threading.stack_size(STACK_BYTES)  # some six threads a node
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    decode = RoundDocument.decode
    RoundDocument.decode = lru_cache(4)(decode)  # type: ignore[method-assign]  # each real node has a core for it
    server = NodeServer(Job(**json.loads(commands.readline())))
    for line in commands:
        print(json.dumps(server.obey(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
    os._exit(0)  # thousands of threads need not be ended one by one
