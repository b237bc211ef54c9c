"""Faults by chance, one upon the other, on a stage: many more orders of events than anybody would write down.

*Runs in* the main thread of the command or test. *Owns* nothing beyond the stage.
*Fails by* DrillError when a fault did not really happen, or the job does not come to rest afterwards.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import psutil

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.drills.stage import DrillError, Setting, Stage
from elastic_trainer.drills.strikes import freeze, kill_nodes
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import Node, kill
from tests.drills.cluster.clocks import MovedClocks
from tests.drills.cluster.schedule import Blow, Planned, Situation, draw

SETTING = Setting(
    nodes=3,
    min_nodes=2,
    max_nodes=4,
    pause_s=0.04,
    limit_s=180.0,
    # So many failures in so little time are no sign of a poisoned batch.
    options={"failure_limit": "100000"},
)
_IDLE_S = 0.2


class Storm:
    """Strikes ``stage`` by the chance of ``seed``; ``done`` counts what has really happened.

    ``spared`` names a node that is struck by nothing but jumps of its clock.
    """

    def __init__(self, stage: Stage, seed: int, clocks: MovedClocks | None = None) -> None:
        self._stage, self._chance, self._clocks = stage, random.Random(seed), clocks
        self._etcd_back: Deadline | None = None
        self._thaw: tuple[Node, Deadline] | None = None
        self.spared: str | None = None
        self.done: Counter[Blow] = Counter()
        self.told: list[str] = []

    def rage(self, over: Callable[[], bool], at_rest: Callable[[], object] = lambda: None) -> None:
        """Strike until ``over()``, then let all be repaired and wait until everybody trains.

        Calls ``at_rest`` whenever everybody trains between two faults.
        """
        self._stage.settled()
        while not over():
            planned = draw(self._chance, self._situation())
            if planned is None:
                self._pass(_IDLE_S)
                continue
            if planned.after_repair:
                self._repair()
                at_rest()
            self._pass(planned.wait_s)
            self._strike(planned)
        self._repair()
        quiet(self._stage)
        self._stage.restore()
        at_rest()

    def _repair(self) -> None:
        """etcd is back, nobody is frozen, and everybody who should trains."""
        self._end_outage()
        self._end_freeze()
        if len(self._stage.expected) < self._stage.setting.min_nodes:
            self._stage.cluster.add()
        self._stage.settled()

    def _situation(self) -> Situation:
        stage = self._stage
        stage.look()
        return Situation(
            running=tuple(sorted(stage.expected)),
            holders=tuple(holders(stage)),
            min_nodes=stage.setting.min_nodes,
            max_nodes=stage.setting.max_nodes,
            etcd_answers=self._etcd_back is None,
            frozen=self._thaw is not None,
            clocks_move=self._clocks is not None,
        )

    def _pass(self, seconds: float) -> None:
        """Let time pass; etcd comes back and a frozen node is thawed when it is due."""
        deadline = Deadline.after(seconds)
        while not deadline.expired:
            pause(min(0.02, deadline.remaining_s()))
            if self._etcd_back is not None and self._etcd_back.expired:
                self._end_outage()
            if self._thaw is not None and self._thaw[1].expired:
                self._end_freeze()

    def _end_outage(self) -> None:
        if self._etcd_back is not None:
            self._stage.server.restart()
            self._etcd_back = None

    def _end_freeze(self) -> None:
        if self._thaw is not None:
            node, _ = self._thaw
            node.thaw()
            self._stage.welcome(node.name)
            self._thaw = None

    def _strike(self, planned: Planned) -> None:
        """Do it, unless the time that has passed has made it impossible."""
        situation = self._situation()
        if planned.node is not None and not self._may_strike(planned, planned.node, situation):
            return
        if not self._performed(planned):
            return
        self.done[planned.blow] += 1
        self.told.append(f"{planned.blow} {planned.node or ''} after {planned.wait_s:.2f} s".replace("  ", " "))

    def _may_strike(self, planned: Planned, name: str, situation: Situation) -> bool:
        if planned.blow is Blow.CLOCK_JUMP:
            return name in situation.running
        return name in situation.running and name != self.spared and bool(set(situation.holders) - {name})

    def _performed(self, planned: Planned) -> bool:
        stage = self._stage
        if planned.blow is Blow.JOIN:
            stage.cluster.add()
        elif planned.blow is Blow.OUTAGE:
            stage.server.kill()
            if stage.server.is_healthy():
                raise DrillError("etcd answers although it was killed")
            self._etcd_back = Deadline.after(planned.seconds)
        elif planned.node is not None:
            return self._node_struck(planned.blow, stage.node(planned.node), planned.seconds)
        return True

    def _node_struck(self, blow: Blow, node: Node, seconds: float) -> bool:
        stage = self._stage
        if blow is Blow.WORKER_KILL:
            worker = node.worker(self._chance.randrange(stage.setting.workers))
            if worker is None:
                return False
            kill([worker])
        elif blow is Blow.NODE_KILL:
            kill_nodes(stage, [node.name])
        elif blow is Blow.FREEZE:
            stage.retire(node.name)
            self._thaw = node, Deadline.after(seconds)
            freeze(stage, node.family())
        elif blow is Blow.CLOCK_JUMP and self._clocks is not None:
            self._clocks.move(node.name, seconds)
        else:
            stage.retire(node.name)
            node.terminate()
        return True


def holders(stage: Stage) -> dict[str, psutil.Process]:
    """First workers, by node, of nodes whose workers all live and hold the training state."""
    found = {name: _holding(stage, name) for name in sorted(stage.expected)}
    return {name: worker for name, worker in found.items() if worker is not None}


def _holding(stage: Stage, name: str) -> psutil.Process | None:
    workers = [stage.node(name).worker(place) for place in range(stage.setting.workers)]
    hold = all(each is not None and processes.alive(each) and stage.book.has_opened(each.pid) for each in workers)
    return workers[0] if hold else None


def quiet(stage: Stage) -> None:
    """Wait until every node that was asked to go has gone."""
    asked = [node for node in stage.cluster.running if node.name not in stage.expected]
    stage.until(lambda: not any(node.running for node in asked), "the departure of drained nodes")
