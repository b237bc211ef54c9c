"""A node in place: the product's conductor, record writer, watchdog and places, and toy workers that it leads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from elastic_trainer.agent.rendezvous.in_place import ShardSlots, begin_life
from elastic_trainer.agent.rendezvous.restart import finish
from elastic_trainer.agent.workers.conductor import Conductor, ConductorConfig, Reached, Worker, WorkerFacts
from elastic_trainer.agent.workers.conductor_shell import ConductorPorts, ConductorShell, RecordWriter
from elastic_trainer.agent.workers.watchdog import Watchdog
from elastic_trainer.clock import Deadline
from elastic_trainer.ipc.channel import (
    Drain,
    Evicted,
    Exit,
    Failed,
    Formation,
    Leaving,
    Message,
    Over,
    Ping,
    Pong,
    Progress,
    Ready,
    StateReport,
    Welcome,
)
from elastic_trainer.membership.cluster_view import NodeView, has_places
from elastic_trainer.membership.documents import Ghost, NodeRecord
from elastic_trainer.membership.documents import RoundState as State
from elastic_trainer.model import Incarnation
from tests.simulation.agents import Agent, Place, Trainer, Watcher
from tests.simulation.invariants import NO_HEALTHY_KILLED, Violation
from tests.simulation.loop import Process, Turns, sleep, straight
from tests.simulation.node import KEYS, SimNode

if TYPE_CHECKING:
    from elastic_trainer.agent.workers.periodic import PeriodicThread
    from elastic_trainer.ipc.channel import Connection

FIRST_PID = 2**30
"""No process has this id."""
SEVER_S, HANG_S = 2.0, 4.0
PROGRESS_STEPS = 3
JOIN_TIMEOUT_S = 1e6
CONTACT_S = 3.0
"""How long a look whom a node reaches may take."""


class SimWorker(Trainer):
    """A worker as its agent sees it: it says what a real one says, over a channel that takes its time."""

    def __init__(self, agent: InPlace, pid: int, local_rank: int) -> None:
        super().__init__(agent, f"{agent.name}.{local_rank}" if local_rank else agent.name)
        self.node, self.pid, self.local_rank = agent, pid, local_rank
        self.seat: Worker | None = None
        self.code: int | None = None
        """Its exit code."""
        self.hung = self.blocked = self.evicted = False
        """Whether it answers nothing; whether it cannot leave a round, in a call that nothing interrupts."""
        self.busy = ""
        self._arrivals = [0.0, 0.0]
        """When the last message arrives at the agent, and at the worker."""
        self._over = self._number = self._offered = 0
        """The newest round that is over, the last one entered, and the one it is free for while it waits."""
        self._frees = False
        self._formation: Formation | None = None
        self._drain: Drain | None = None

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def still(self) -> bool:
        return self.hung or self.agent.host.frozen

    @property
    def flagged(self) -> Drain | None:
        drain, place = self._drain, self.place
        return drain if drain is not None and place is not None and drain.number == place.number else None

    def soon(self, seconds: float, call: Callable[[], None]) -> None:
        def if_it_runs() -> None:
            if self.alive and not self.hung:
                call()

        self.agent.loop.after(seconds, lambda: self.agent.host.deliver(if_it_runs))

    # ---- the channel: the agent's end of the connection

    def send(self, message: Message) -> None:
        self.node.sends(self, message)
        self.soon(self._takes_s(1), lambda: self._hear(message))

    def peer(self) -> tuple[int, int]:
        return self.pid, 0

    def close(self) -> None:
        pass

    def _takes_s(self, way: int) -> float:
        """In order, mostly at once."""
        now = self.agent.loop.now
        self._arrivals[way] = max(self._arrivals[way], now + (0.001 if self.agent.chance.random() < 0.9 else 0.05))
        return self._arrivals[way] - now

    def connect(self) -> None:
        self.seat = self.node.conductor.admit(cast("Connection", self), self.pid, self.local_rank)

    def _say(self, message: Message) -> None:
        def arrive() -> None:
            if self.seat is not None:
                self.node.conductor.receive(self.seat, message)

        self.agent.loop.after(self._takes_s(0), lambda: self.agent.host.deliver(arrive))

    def end(self, code: int) -> None:
        """The process ends. The agent reads to the end of the connection first, or the kernel tells it before."""
        if not self.alive:
            return
        self.code, self.place = code, None
        gone_s = self._takes_s(0) if code == 0 or self.agent.chance.random() < 0.5 else 0.0
        self.agent.loop.after(gone_s, lambda: self.agent.host.deliver(self._gone))

    def _gone(self) -> None:
        if self.seat is not None:
            self.node.conductor.gone(self.seat)
        self.node.ended(self)

    # ---- what its agent says

    def _hear(self, message: Message) -> None:
        if isinstance(message, Exit):
            self.end(message.code)
        elif isinstance(message, Ping):
            self._say(Pong())
        elif isinstance(message, Welcome):
            self._free(planned=False)
        elif isinstance(message, Formation):
            if self._formation is None or message.number > self._formation.number:
                self._formation = message
            self._enter_if_free()
        elif isinstance(message, Drain):
            if self._drain is None or message.number > self._drain.number:
                self._drain = message
        elif isinstance(message, Over) and message.number > self._over:
            self._over = message.number
            if self.blocked:
                return
            if self.place is not None and self.place.number <= message.number:
                self.place = None
                self._free_soon()
            elif self.place is None and message.number >= (self._offered or self._number):
                self._free_soon()

    # ---- from round to round

    def _free_soon(self) -> None:
        """It leaves its round, which takes longer while it saves or evaluates."""
        if self._frees:
            return
        self._frees, self._offered = True, 0
        seconds = self.agent.chance.choice([0.005, 0.02, 0.1, 0.6] * 8 + [SEVER_S + 1.0])
        self.busy = "saving" if seconds > SEVER_S else ""
        self.soon(seconds, lambda: self._free(planned=False))

    def _free(self, *, planned: bool) -> None:
        self._frees, self.busy = False, ""
        if self.place is None:
            self._offered = max(self._number, self._over) + 1
            self._say(self._ready(self._offered, planned=planned))
            self._enter_if_free()

    def _ready(self, number: int, *, planned: bool) -> Ready:
        state = StateReport(round=self.step.round, step=self.step.step) if self.step is not None else None
        return Ready(
            number=number,
            planned=planned,
            state=state,
            joinable=not self.inside,
            in_call=self.inside,
            newcomer=self.newcomer,
        )

    def _enter_if_free(self) -> None:
        found = self._formation
        if found is not None and self._offered and found.number >= self._offered and found.number > self._over:
            self._enter(found)

    def _enter(self, formation: Formation) -> None:
        self._number, self._offered = formation.number, 0
        f = formation
        self.enter(Place(f.number, f.nonce, f.nodes, f.world_size, f.rank))

    def lose_contact(self, unreachable: tuple[str, ...]) -> None:
        if self.blocked:
            return
        place, self.place = self.place, None
        if place is not None:
            tried = unreachable[0] if unreachable and self.agent.chance.random() < 0.5 else ""
            self._say(Failed(number=place.number, error="closed", forming=not self.formed, tried=tried))
            if self._over >= place.number:
                self._free_soon()

    def made_step(self) -> None:
        if self.step is not None and self.step.step % PROGRESS_STEPS == 0:
            self._say(Progress(round=self.step.round, step=self.step.step, epoch=0, samples=0))

    def switch(self) -> None:
        drain, self.place = self.flagged, None
        following = drain.next if drain is not None else None
        if following is None and self.evicted:
            self._say(Leaving(status="stopped", step=0))
            self.end(0)
        elif following is None:
            self._free(planned=True)
        else:
            self._say(self._ready(following.number, planned=True))
            self._enter(following)
            if following.number <= self._over:
                self.lose_contact(())

    def finish(self) -> None:
        if self.place is not None:
            self._say(Leaving(status="done", step=0))
            self.end(0)

    def evict(self) -> None:
        self.evicted = True
        self._say(Evicted(reason="SIGTERM"))


class InPlace(Agent):
    """Workers stay; rounds come to them. ``team`` of them are simulated, which may act for more."""

    def __init__(self, node: SimNode, watch: Watcher, size: int, team: int = 0) -> None:
        super().__init__(node, watch, size)
        self.team = team or size
        self.workers: list[SimWorker] = []
        self.evicted = self._done = self._begins = False
        self._pids = itertools.count(FIRST_PID)
        self._hung: dict[int, str] = {}
        periodic = cast("type[PeriodicThread]", lambda name, turn, clock: Turns(self.host, turn))
        self._writer = RecordWriter(node.member, self.loop, periodic)
        facts = WorkerFacts(
            node.member.create_revision,
            lambda pid: self._hung.pop(pid, None),
            self._committed,
            lambda pid: next((each.busy for each in self.workers if each.pid == pid), ""),
            lambda pid: {},
        )
        ports = ConductorPorts(self._writer, lambda progress: None, self._ask, self._kill)
        core = Conductor(ConductorConfig("run", self.name, self.base, SEVER_S), facts)
        self.conductor = ConductorShell(core, ports, self.loop, periodic)
        self._watchdog = Watchdog(HANG_S, self.conductor.watched, self._kill_hung, self.loop)
        self._places = ShardSlots(node.member, self.name, self._nodes, self.conductor, self.loop)
        node.see = self.conductor.see
        node.start(self._arrived)

    def _arrived(self) -> None:
        for each in (self.conductor, self._writer):
            each.start()
        if has_places(self.node.limits):
            self.host.start(self._look_for_place())
        self._begin()

    @property
    def trainers(self) -> Sequence[Trainer]:  # type: ignore[override]
        return self.workers

    # ---- the conductor's ports

    def _ask(self, nodes: tuple[str, ...], answered: Callable[[Reached], None]) -> None:
        def look() -> None:
            records = {name: each.record for name, each in self._nodes().items()}
            missing = tuple(name for name in nodes if name in records and not self.reaches(name))
            answered(Reached(missing if records else None, records))

        self.loop.after(self.chance.choice([0.01, 0.5, CONTACT_S]), lambda: self.host.deliver(look))

    reaches: Callable[[str], bool] = staticmethod(lambda other: True)

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
            self.watch.assigned(self.name, own, worker.local_rank, formation)
        elif isinstance(message, Over):
            self.watch.told_over(self.name, message.number)

    # ---- what torchrun does

    def _begin(self) -> None:
        """Start workers, again."""
        if not self._begins and self.alive:
            self._begins = True
            self.host.start(straight(self._start))

    def _start(self) -> None:
        sleep(self.chance.uniform(0.1, 0.5))
        for worker in self.workers:
            worker.end(-15)
        if self.evicted or self._done or self._is_closed():
            self._leave_soon()
            return
        limit = Deadline.after(JOIN_TIMEOUT_S, self.loop)
        begin_life(self.conductor, self.node.member, self._places, self.team, limit)
        self._begins = False
        self.workers = [SimWorker(self, next(self._pids), rank) for rank in range(self.team)]
        for worker in self.workers:
            worker.soon(self.chance.uniform(0.1, 0.6), worker.connect)

    def ended(self, worker: SimWorker) -> None:
        """torchrun reaps ``worker``."""
        if worker not in self.workers:
            return
        if worker.code:
            self._begin()
        elif all(each.code == 0 for each in self.workers):
            self._done = True
            self.host.start(straight(self._end))

    def _end(self) -> None:
        """All have ended well: at torchrun's exit barrier, if they have passed the end of the training."""
        member, seen = self.node.member, self.node.view.look().round
        if self.conductor.passed and seen is not None and seen.member(self.name) is not None:
            self._writer.close()
            limit = Deadline.after(JOIN_TIMEOUT_S, self.loop)
            finish(member, seen.number, limit, JOIN_TIMEOUT_S, passed=True)
        self._leave_soon()

    def _is_closed(self) -> bool:
        seen = self.node.view.look().round
        return seen is not None and seen.state is State.CLOSED

    def _leave_soon(self) -> None:
        self.left = True
        self.loop.after(0.1, self.node.leave)

    def _nodes(self) -> dict[str, NodeView]:
        """All nodes, read from the store."""
        nodes: dict[str, NodeView] = {}
        if self.node.link.whole and not self.node.etcd.down:
            for item in self.node.etcd.read(KEYS.nodes, KEYS.nodes + "\x7f"):
                if (name := KEYS.node_id(item.key)) is not None:
                    record = NodeRecord.decode(item.value, item.key)
                    nodes[name] = NodeView(name, item.create_revision, item.mod_revision, record)
        return nodes

    def _look_for_place(self) -> Process:
        while True:
            yield self._places.turn()

    # ---- what happens to it

    def crash_worker(self) -> None:
        living = [each for each in self.workers if each.alive]
        if living:
            self.chance.choice(living).end(1)

    def hang_worker(self) -> None:
        living = [each for each in self.workers if each.alive and each.seat is not None]
        if not living:
            return
        worker = self.chance.choice(living)
        if worker.place is not None and self.chance.random() < 0.5:
            worker.blocked = True
        else:
            worker.hung = True
            self.host.start(self._watch())

    def _watch(self) -> Process:
        while any(each.hung and each.alive for each in self.workers):
            yield self._watchdog.look()

    def accuse(self, suspects: tuple[Ghost, ...]) -> None:
        document, _ = self.conductor.at_work()
        if document is not None:
            self.conductor.accuse(document, suspects, "no answer from " + ", ".join(each.node for each in suspects))

    def exclude(self) -> None:
        """Others ask this agent what its workers do."""
        _, workers = self.conductor.at_work()
        hung = {each.pid for each in self.workers if each.hung}
        for each in workers:
            if each.pid in hung:
                self.conductor.exclude(each, "its process is stopped")

    def evict(self) -> None:
        self.evicted = True
        for worker in self.workers:
            worker.evict()

    def finish(self) -> None:
        for worker in self.workers:
            worker.finish()
