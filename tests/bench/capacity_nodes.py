"""Nodes for the capacity benchmark: many real members in one process, each with a connection of its own to etcd.

A node is what an agent has in restart mode (admission, lease, key, Member); its workers alone are missing: they are
free the moment that their round is over. ``python -m tests.bench.capacity_nodes`` reads one command a line from its
input, JSON, and answers each with a line. Times are monotonic seconds, which the processes of one host share.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TextIO

import structlog

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.membership.admission import admit
from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundState, Spec
from elastic_trainer.membership.member import Member
from elastic_trainer.store.api import RunKeys, Store
from elastic_trainer.store.session import LeaseSession
from tests.bench.capacity_transport import AioStore, EventLoop

LIMIT_S = 300.0
"""Nothing takes so long on a working machine."""
STACK_BYTES = 512 << 10
LOCAL_WORLD_SIZE = 8
HANDS = 64
"""So many nodes of a process connect, or go, at the same time."""


def soon() -> Deadline:
    return Deadline.after(LIMIT_S)


@dataclass(frozen=True, slots=True)
class Job:
    endpoint: str
    run: str
    min_nodes: int
    max_nodes: int
    ttl_s: float
    last_call_s: float

    @property
    def keys(self) -> RunKeys:
        return RunKeys("/bench", self.run)

    def connector(self) -> Callable[[], Store]:
        """What makes one node's connection, tested as a node's is."""
        loop = EventLoop()

        def connect() -> Store:
            store = AioStore(self.endpoint, loop)
            store.range("/bench/", soon(), limit=1)
            return store

        return connect


class SimulatedNode:
    """One node: connected at once, part of the run after :meth:`begin`."""

    def __init__(self, name: str, job: Job, changed: threading.Condition, store: Store) -> None:
        self.name, self._job, self._changed = name, job, changed
        self.store = store
        self.joined_at = 0.0
        self.agreed: RoundDocument | None = None
        self.agreed_at = 0.0
        self.error: str | None = None
        self.gone = False
        self._member: Member | None = None
        self._moved = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"node-{name}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        self.gone = True
        if self._member is not None:
            self._member.leave()
        self._moved.set()
        self.store.close()

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
        job = self._job
        spec = Spec(min_nodes=job.min_nodes, max_nodes=job.max_nodes)
        admit(self.store, job.keys, spec, reopen=False, deadline=soon())
        session = LeaseSession(self.store, job.ttl_s, soon())
        limits = Limits(job.min_nodes, job.max_nodes, last_call_s=job.last_call_s, last_call_limit_s=LIMIT_S)
        member = Member(self.store, job.keys, self.name, session, limits, lambda error: None)
        member.on_round(self._hear)
        member.start(soon())
        return member

    def _hear(self, document: RoundDocument) -> None:
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
        self.agreed, self.agreed_at = document, SYSTEM.monotonic()
        self._notify()
        while not self.gone:
            self._moved.clear()
            newest = member.look().round
            if newest is not None and is_over(document, newest):
                return
            self._moved.wait()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def as_json(self) -> dict[str, Any]:
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
        }


def is_over(mine: RoundDocument, seen: RoundDocument) -> bool:
    """The handler's ``round_is_over``; importing that would import torch."""
    over = seen.state in (RoundState.BROKEN, RoundState.DRAINING)
    return seen.number > mine.number or (seen.number == mine.number and over)


class NodeServer:
    """The nodes of this process, led by commands."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._nodes: dict[str, SimulatedNode] = {}
        self._hands = ThreadPoolExecutor(HANDS)
        self._connect = job.connector()

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        name = command["do"]
        mine = [self._nodes[each] for each in command.get("nodes", ()) if each in self._nodes]
        if name == "connect":
            made = self._all(self._made, command["nodes"])
            self._nodes |= {node.name: node for node in made}
            return {}
        if name == "await":
            return self._await(command["size"], command["after"])
        self._all(SimulatedNode.begin if name == "begin" else SimulatedNode.leave, mine)
        return {}

    def _made(self, name: str) -> SimulatedNode:
        return SimulatedNode(name, self._job, self._changed, self._connect())

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

        with self._changed:
            self._changed.wait_for(together, LIMIT_S)
        return {"nodes": [node.as_json() for node in self._nodes.values() if not node.gone]}


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
