"""Faults by chance, one upon the other, on a stage: many more orders of events than anybody would write down.

What the job cannot be asked to survive never happens: one living worker that holds the training state is always left.

*Runs in* the main thread of the test. *Owns* nothing beyond the stage.
*Fails by* DrillError when a fault did not really happen, or the job does not come to rest afterwards.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import psutil

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.drills.stage import DrillError, Setting, Stage
from elastic_trainer.drills.strikes import freeze, kill_nodes
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import Node, kill
from tests.drills.cluster.clocks import MovedClocks
from tests.drills.cluster.schedule import Blow

SETTING = Setting(
    nodes=3,
    min_nodes=2,
    max_nodes=4,
    pause_s=0.04,
    limit_s=180.0,
    # So many failures in so little time are no sign of a poisoned batch.
    options={"failure_limit": "100000"},
)
WEIGHTS = {
    Blow.WORKER_KILL: 5.0,
    Blow.NODE_KILL: 2.0,
    Blow.JOIN: 2.0,
    Blow.DRAIN: 1.0,
    Blow.OUTAGE: 1.0,
    Blow.FREEZE: 1.0,
    Blow.CLOCK_JUMP: 1.0,
}
SECONDS = {Blow.OUTAGE: (0.2, 2.0), Blow.FREEZE: (0.2, 6.0), Blow.CLOCK_JUMP: (-7200.0, 7200.0)}
"""The length of an outage or a freeze, and where a clock jumps to from the right time."""
WAITS_S = ((0.0, 0.1), (0.1, 1.0))
"""Into the recovery from the blow before, and behind it."""
REPAIRED = 0.4
"""How often the blow before is allowed to be repaired whole."""
SEASONED = 0.8
"""How often a node that holds the state is struck, rather than one that starts."""


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
        stage = self._stage
        stage.await_steps()
        while not over():
            if self._chance.random() < REPAIRED:
                self._repair()
                at_rest()
            self._pass(self._chance.uniform(*self._chance.choice(WAITS_S)))
            self._strike()
        self._repair()
        asked = [node for node in stage.cluster.running if node.name not in stage.expected]
        stage.until(lambda: not any(node.running for node in asked), "the departure of drained nodes")
        stage.restore()
        at_rest()

    def _repair(self) -> None:
        """etcd is back, nobody is frozen, and everybody who should trains."""
        self._end_outage()
        self._end_freeze()
        if len(self._stage.expected) < self._stage.setting.min_nodes:
            self._stage.cluster.add()
        self._stage.await_steps()

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

    def _strike(self) -> None:
        stage, chance = self._stage, self._chance
        stage.observe()
        running, holding = sorted(stage.expected), set(holders(stage))
        struck = [name for name in running if name != self.spared and holding - {name}]
        blow = chance.choice(self._possible(running, struck))
        name = chance.choice(running)
        if blow is not Blow.CLOCK_JUMP and struck:
            seasoned = [each for each in struck if each in holding]
            name = chance.choice(seasoned if seasoned and chance.random() < SEASONED else struck)
        if self._performed(blow, stage.node(name), chance.uniform(*SECONDS.get(blow, (0.0, 0.0)))):
            self.done[blow] += 1
            self.told.append(f"{blow} {'' if blow in (Blow.JOIN, Blow.OUTAGE) else name}")

    def _possible(self, running: Sequence[str], struck: Sequence[str]) -> list[Blow]:
        """What may happen now, as often as its weight; a node joins first where there are too few."""
        setting, frozen = self._stage.setting, self._thaw is not None
        may = {
            **dict.fromkeys((Blow.WORKER_KILL, Blow.NODE_KILL, Blow.DRAIN), bool(struck)),
            Blow.FREEZE: bool(struck) and not frozen,
            Blow.JOIN: len(running) + frozen < setting.max_nodes,
            Blow.OUTAGE: self._etcd_back is None,
            Blow.CLOCK_JUMP: self._clocks is not None,
        }
        if len(running) < setting.min_nodes:
            return [Blow.JOIN]
        return [blow for blow, weight in WEIGHTS.items() if may[blow] for _ in range(round(weight))]

    def _performed(self, blow: Blow, node: Node, seconds: float) -> bool:
        stage = self._stage
        if blow is Blow.JOIN:
            stage.cluster.add()
        elif blow is Blow.OUTAGE:
            stage.server.kill()
            if stage.server.is_healthy():
                raise DrillError("etcd answers although it was killed")
            self._etcd_back = Deadline.after(seconds)
        elif blow is Blow.WORKER_KILL:
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
        elif self._clocks is not None and blow is Blow.CLOCK_JUMP:
            self._clocks.move(node.name, seconds)
        else:
            stage.retire(node.name)
            node.terminate()
        return True


def holders(stage: Stage) -> dict[str, psutil.Process]:
    """First workers, by node, of nodes whose workers all live and hold the training state."""
    found = {}
    for name in sorted(stage.expected):
        workers = [stage.node(name).worker(place) for place in range(stage.setting.workers)]
        hold = all(each is not None and processes.alive(each) and stage.book.has_opened(each.pid) for each in workers)
        if hold and workers[0] is not None:
            found[name] = workers[0]
    return found
