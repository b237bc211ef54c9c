"""A node in place: the product's conductor, record writer, watchdog and slots, and toy workers that it leads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from elastic_trainer.agent.rendezvous.in_place import ShardSlots, begin_life
from elastic_trainer.agent.rendezvous.restart import finish
from elastic_trainer.agent.workers.conductor import Conductor, ConductorConfig, Reached, WorkerFacts
from elastic_trainer.agent.workers.conductor_shell import ConductorPorts, ConductorShell, RecordWriter
from elastic_trainer.agent.workers.watchdog import Watchdog
from elastic_trainer.clock import Deadline
from elastic_trainer.ipc.channel import Drain, Formation, Message, Over
from elastic_trainer.membership.cluster_view import NodeView, has_slots
from elastic_trainer.membership.documents import Ghost, NodeRecord
from elastic_trainer.membership.documents import RoundState as State
from elastic_trainer.model import Incarnation
from tests.simulation.agents import Agent
from tests.simulation.invariants import NO_HEALTHY_KILLED, Violation
from tests.simulation.loop import Turns, sleep
from tests.simulation.node import KEYS, SimNode
from tests.simulation.workers import FIRST_PID, SimWorker

if TYPE_CHECKING:
    from elastic_trainer.agent.workers.periodic import PeriodicThread
    from elastic_trainer.ipc.channel import Connection
    from tests.simulation.world import World

SEVER_S, HANG_S, PHASE_LIMIT_S = 2.0, 4.0, 15.0
JOIN_TIMEOUT_S = 1e6
CONTACT_S = 3.0
"""How long a look whom a node reaches may take."""


class InPlace(Agent):
    """Workers stay; rounds come to them."""

    def __init__(self, node: SimNode, world: World, size: int) -> None:
        super().__init__(node, world, size)
        self.team = size
        self.workers: list[SimWorker] = []
        self._done = self._begins = False
        self._pids = itertools.count(FIRST_PID)
        self._hung: dict[int, str] = {}
        periodic = cast("type[PeriodicThread]", lambda name, turn, clock: Turns(self.host, turn))
        self._writer = RecordWriter(node.member, self.loop, periodic)
        facts = WorkerFacts(
            node.member.create_revision,
            lambda pid: self._hung.pop(pid, None),
            self._committed,
            lambda pid: next((each.busy for each in self.workers if each.pid == pid and not each.blocked), ""),
            lambda pid: {},
        )
        ports = ConductorPorts(self._writer, lambda progress: None, self._ask, self._kill)
        core = Conductor(ConductorConfig("run", self.name, self.base, SEVER_S), facts)
        self.conductor = ConductorShell(core, ports, self.loop, periodic)
        self._watchdog = Watchdog(HANG_S, self.conductor.watched, self._kill_hung, self.loop)
        self._slots = ShardSlots(node.member, self.name, self._nodes, self.conductor, self.loop)
        node.see = self.conductor.see
        node.start(self._arrived)

    def _arrived(self) -> None:
        for each in (self.conductor, self._writer):
            each.start()
        if has_slots(self.node.limits):
            self.host.start(self._look_for_slot)
        self._begin()

    # ---- the conductor's ports

    def _ask(self, nodes: tuple[str, ...], answered: Callable[[Reached], None]) -> None:
        def look() -> None:
            records = {name: each.record for name, each in self._nodes().items()}
            missing = tuple(name for name in nodes if name in records and not self.world.reaches(self.name, name))
            answered(Reached(missing if records else None, records))

        self.host.after(self.chance.choice([0.01, 0.5, CONTACT_S]), look)

    def _committed(self, pid: int) -> tuple[int, int] | None:
        step = next((each.step for each in self.workers if each.pid == pid), None)
        return (step.round, step.step) if step is not None else None

    def _kill(self, pid: int, reason: str) -> None:
        for worker in self.workers:
            if worker.pid == pid:
                if not (worker.hung or worker.blocked):
                    raise Violation(NO_HEALTHY_KILLED, f"{worker.who} is killed: {reason}")
                worker.end(-9)

    def _kill_hung(self, pid: int, reason: str, *, local_rank: int) -> None:
        self._hung[pid] = reason
        self._kill(pid, reason)

    def sends(self, worker: SimWorker, message: Message) -> None:
        """The conductor sends ``message``."""
        formation = message.next if isinstance(message, Drain) else message
        if isinstance(formation, Formation):
            own = Incarnation(self.node.key.create_revision, self.conductor.life)
            self.world.invariants.assigned(self.name, own, worker.local_rank, formation)
        elif isinstance(message, Over):
            self.world.invariants.told_over(self.name, message.number)

    # ---- what torchrun does

    def _begin(self) -> None:
        """Start workers, again."""
        if not self._begins and self.alive:
            self._begins = True
            self.host.start(self._start)

    def _start(self) -> None:
        sleep(self.chance.uniform(0.1, 0.5))
        for worker in self.workers:
            worker.end(-15)
        if self.evicted or self._done or self._is_closed():
            self._leave_soon()
            return
        limit = Deadline.after(JOIN_TIMEOUT_S, self.loop)
        slot = begin_life(self.conductor, self.node.member, self._slots, self.team, limit)
        self._begins = False
        first, size = (slot or 0) * self.team, self.node.limits.shard_nodes * self.team if slot is not None else 1
        self.workers = [
            SimWorker(self, self.world, next(self._pids), rank, first + rank if size > 1 else 0, size)
            for rank in range(self.team)
        ]
        for worker in self.workers:
            self.host.after(self.chance.uniform(0.1, 0.6), self._connect, worker)

    def _connect(self, worker: SimWorker) -> None:
        if worker.alive:
            worker.seat = self.conductor.admit(cast("Connection", worker), worker.pid, worker.local_rank)

    def heard(self, worker: SimWorker, message: Message) -> None:
        self.conductor.receive(worker.seat, message)

    def ended(self, worker: SimWorker) -> None:
        """Its connection closes, and torchrun reaps it."""
        if worker.seat is not None:
            self.conductor.gone(worker.seat)
        if worker not in self.workers:
            return
        if worker.code:
            self._begin()
        elif all(each.code == 0 for each in self.workers):
            self._done = True
            self.host.start(self._end)

    def _end(self) -> None:
        """All have ended well: at torchrun's exit barrier, if they have passed the end of the training."""
        member, seen = self.node.member, self.node.view.observation().round
        if self.conductor.passed and seen is not None and seen.member(self.name) is not None:
            self._writer.close()
            limit = Deadline.after(JOIN_TIMEOUT_S, self.loop)
            finish(member, seen.number, limit, JOIN_TIMEOUT_S, passed=True)
        self._leave_soon()

    def _is_closed(self) -> bool:
        seen = self.node.view.observation().round
        return seen is not None and seen.state is State.CLOSED

    def _leave_soon(self) -> None:
        self.left = True
        self.loop.after(0.1, self.leave)

    def _nodes(self) -> dict[str, NodeView]:
        """All nodes, read from the store."""
        nodes: dict[str, NodeView] = {}
        if self.node.link.whole and not self.node.etcd.down:
            for item in self.node.etcd.read(KEYS.nodes, KEYS.nodes + "\x7f"):
                if (name := KEYS.node_id(item.key)) is not None:
                    record = NodeRecord.decode(item.value, item.key)
                    nodes[name] = NodeView(name, item.create_revision, item.mod_revision, record)
        return nodes

    def _look_for_slot(self) -> None:
        while True:
            sleep(self._slots.turn())

    # ---- what happens to it

    def crash_worker(self) -> None:
        """At once, or at one of its next waits; or its script fails."""
        living = [each for each in self.workers if each.alive]
        if not living:
            return
        worker, how = self.chance.choice(living), self.chance.random()
        if how < 0.1:
            worker.script_fails = True
        elif how < 0.3:
            worker.end(1)
        else:
            worker.thread.strikes_in, worker.thread.strike = self.chance.randint(1, 12), lambda: worker.end(1)

    def hang_worker(self) -> None:
        living = [each for each in self.workers if each.alive and each.seat is not None]
        if not living:
            return
        worker = self.chance.choice(living)
        if worker.groups.in_round and self.chance.random() < 0.5:
            worker.blocked = True
            self.host.after(PHASE_LIMIT_S, self._end_phase, worker)
        else:
            worker.hung = True
            self.host.start(self._watch)

    def _end_phase(self, worker: SimWorker) -> None:
        """A supervisor bounds each phase; that of a round that is over, the conductor does."""
        if worker.alive and worker.link.over < worker.groups.number:
            self._hung[worker.pid] = "its phase takes too long"
            worker.end(-9)

    def _watch(self) -> None:
        while any(each.hung and each.alive for each in self.workers):
            sleep(self._watchdog.turn())

    def accuse(self, suspects: tuple[Ghost, ...]) -> None:
        document, _ = self.conductor.at_work()
        if document is not None:
            self.conductor.suspect(document, suspects, "no answer from " + ", ".join(each.node for each in suspects))

    def exclude(self) -> None:
        """Others ask this agent what its workers do."""
        _, workers = self.conductor.at_work()
        hung = {each.pid for each in self.workers if each.hung or each.blocked}
        for each in workers:
            if each.pid in hung:
                self.conductor.exclude(each, "its process is stopped")

    def evict(self) -> None:
        self.evicted = True
        for worker in self.workers:
            if worker.seat is not None:
                worker.evict()
