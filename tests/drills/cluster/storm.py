"""Faults by chance, one upon the other, on a stage: many more orders of events than anybody would write down.

*Runs in* the main thread of the command or test. *Owns* nothing beyond the stage.
*Fails by* DrillError when a fault did not really happen, or the job does not come to rest afterwards.
"""

from __future__ import annotations

import random
from collections import Counter

import psutil

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.drills.stage import DrillError, Setting, Stage
from elastic_trainer.drills.strikes import kill_nodes
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import kill
from tests.drills.cluster.schedule import Blow, Planned, Situation, draw

SETTING = Setting(
    nodes=3,
    min_nodes=2,
    max_nodes=4,
    pause_s=0.04,
    limit_s=180.0,
    # So many failures in so little time are no sign of a poisoned batch.
    options={"failure_limit": "100000", "stalled_rounds": "100000"},
)
_IDLE_S = 0.2


class Storm:
    """Strikes ``stage`` by the chance of ``seed``; ``done`` counts what has really happened."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage, self._chance = stage, random.Random(seed)
        self._etcd_back: Deadline | None = None
        self.done: Counter[Blow] = Counter()
        self.told: list[str] = []

    def rage(self, count: int) -> None:
        """Strike ``count`` times, then let all be repaired and wait until everybody trains."""
        self._stage.settled()
        while self.done.total() < count:
            planned = draw(self._chance, self._situation())
            if planned is None:
                self._pass(_IDLE_S)
                continue
            if planned.after_repair:
                self._repair()
            self._pass(planned.wait_s)
            self._strike(planned)
        self._repair()
        quiet(self._stage)
        self._stage.restore()

    def _repair(self) -> None:
        """etcd is back, and everybody who should trains."""
        self._end_outage()
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
        )

    def _pass(self, seconds: float) -> None:
        """Let time pass; etcd comes back when it is due."""
        deadline = Deadline.after(seconds)
        while not deadline.expired:
            pause(min(0.02, deadline.remaining_s()))
            if self._etcd_back is not None and self._etcd_back.expired:
                self._end_outage()

    def _end_outage(self) -> None:
        if self._etcd_back is not None:
            self._stage.server.restart()
            self._etcd_back = None

    def _strike(self, planned: Planned) -> None:
        """Do it, unless the time that has passed has made it impossible."""
        situation = self._situation()
        if planned.node is not None and not self._may_lose(planned.node, situation):
            return
        if not self._performed(planned):
            return
        self.done[planned.blow] += 1
        self.told.append(f"{planned.blow} {planned.node or ''} after {planned.wait_s:.2f} s".replace("  ", " "))

    @staticmethod
    def _may_lose(name: str, situation: Situation) -> bool:
        return name in situation.running and bool(set(situation.holders) - {name})

    def _performed(self, planned: Planned) -> bool:
        stage = self._stage
        if planned.blow is Blow.JOIN:
            stage.cluster.add()
        elif planned.blow is Blow.OUTAGE:
            stage.server.kill()
            if stage.server.is_healthy():
                raise DrillError("etcd answers although it was killed")
            self._etcd_back = Deadline.after(planned.lasts_s)
        elif planned.node is not None and planned.blow is Blow.WORKER_KILL:
            worker = stage.node(planned.node).worker()
            if worker is None:
                return False
            kill([worker])
        elif planned.node is not None and planned.blow is Blow.NODE_KILL:
            kill_nodes(stage, [planned.node])
        elif planned.node is not None:
            stage.retire(planned.node)
            stage.node(planned.node).terminate()
        return True


def holders(stage: Stage) -> dict[str, psutil.Process]:
    """Workers that live and hold the training state, by node."""
    workers = {name: stage.node(name).worker() for name in sorted(stage.expected)}
    return {
        name: worker
        for name, worker in workers.items()
        if worker is not None and processes.alive(worker) and stage.book.has_opened(worker.pid)
    }


def quiet(stage: Stage) -> None:
    """Wait until every node that was asked to go has gone."""
    asked = [node for node in stage.cluster.running if node.name not in stage.expected]
    stage.until(lambda: not any(node.running for node in asked), "the departure of drained nodes")
