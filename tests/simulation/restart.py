"""A node in restart mode: workers are started for each round, as its torchrun handler does."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from elastic_trainer.agent.rendezvous.restart import (
    fields_behind,
    finish,
    has_ended_by_plan,
    join_round,
    round_is_over,
)
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import RunClosedError
from elastic_trainer.membership.documents import RoundDocument, RoundMember
from elastic_trainer.membership.documents import RoundState as State
from elastic_trainer.membership.member import closed_error
from elastic_trainer.membership.writes import RoundFailure
from elastic_trainer.model import Cause, Incarnation
from elastic_trainer.worker.recovery import Recovery
from tests.simulation.agents import Agent
from tests.simulation.in_place import JOIN_TIMEOUT_S
from tests.simulation.invariants import NO_REPLACED, Violation
from tests.simulation.loop import sleep
from tests.simulation.node import SimNode
from tests.simulation.workers import FIRST_PID, SimAssignment, SimWorker

if TYPE_CHECKING:
    from tests.simulation.world import World


class Restart(Agent):
    """Workers are started for each round; one acts for those of a node."""

    team = 1

    def __init__(self, node: SimNode, world: World, size: int) -> None:
        super().__init__(node, world, size)
        self.workers: list[SimWorker] = []
        self.life, self.done = 0, False
        self._current: RoundDocument | None = None
        self._failed = False
        self._pids = itertools.count(FIRST_PID)
        node.start(self._run)

    def crash_worker(self) -> None:
        for worker in self.workers:
            worker.thread.strikes_in, worker.thread.strike = self.chance.randint(1, 12), lambda: worker.end(1)  # noqa: B023

    def ended(self, worker: SimWorker) -> None:
        if worker in self.workers and worker.code != -15:
            self._failed, self.done = worker.code != 0, worker.code == 0
            self.node.changed.fire()

    def evict(self) -> None:
        """SIGTERM: the node goes at once."""
        self.left = True
        self.leave()

    def _run(self) -> None:
        """What torchrun's agent does, with the decisions of its rendezvous handler."""
        member, limit = self.node.member, Deadline.after(JOIN_TIMEOUT_S, self.loop)
        try:
            while True:
                planned = self._left()
                self.life, self._failed = self.life + 1, False
                reached = next((each.step for each in self.workers), None)
                shown = {"life": self.life, "reached": reached, "planned": planned} | fields_behind(self._current)
                record = self.base.model_copy(update=shown)
                self._current = join_round(member, record, limit, JOIN_TIMEOUT_S, lambda: None)
                own = Incarnation(self.node.key.create_revision, self.life)
                self.world.invariants.took(self.name, self._entry.incarnation, own)
                self.world.invariants.started(self.name, self.life, self._current.number)
                sleep(self.chance.uniform(0.2, 0.8))
                self._work(self._current)
                for worker in self.workers:
                    worker.end(-15)
                sleep(self.chance.choice([0.01, 0.1, 0.5]))
        except RunClosedError:
            self.left = True
            self.leave()

    @property
    def _entry(self) -> RoundMember:
        """This node's in its round."""
        mine = self._current.member(self.name) if self._current is not None else None
        if mine is None:
            raise Violation(NO_REPLACED, f"{self.name} is no member of its round")
        return mine

    def _left(self) -> bool:
        """Its workers have ended: whether that was by agreement."""
        current, seen = self._current, self.node.view.observation().round
        if current is None or seen is None or round_is_over(current, seen):
            return True
        failure = RoundFailure(current.number, f"workers of {self.name} failed", True, Cause.WORKER_LOST)
        return has_ended_by_plan(self.node.member, failure, Deadline.after(JOIN_TIMEOUT_S, self.loop))

    def _work(self, current: RoundDocument) -> None:
        """Until the round is over, or the workers have failed or are done. Raises RunClosedError."""
        view = self.node.view
        if not self._failed and not round_is_over(current, view.observation().round):
            self._begin(current)
        while not self._failed and not self.done and not round_is_over(current, view.observation().round):
            sleep(1.0, self.node.changed)
        if self.done and not self._failed:
            limit = Deadline.after(JOIN_TIMEOUT_S, self.loop)
            ended = finish(self.node.member, current.number, limit, JOIN_TIMEOUT_S, passed=False)
            if ended is not None and ended.state is State.CLOSED:
                raise closed_error(ended)

    def _begin(self, current: RoundDocument) -> None:
        nodes = tuple(member.node for member in current.members)
        worker = SimWorker(self, self.world, next(self._pids), 0)
        worker.assigned = SimAssignment(
            current.number, nodes.index(self.name), len(nodes), 0, 1, nonce=current.nonce, nodes=nodes
        )
        self.workers = [worker]
        worker.begin(Recovery(worker.state))
