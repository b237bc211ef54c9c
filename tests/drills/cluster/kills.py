"""SIGKILL one worker after another, at random moments and amid long saves and evaluations; some worker always survives.

*Runs in* the main thread of the test. *Owns* nothing beyond the stage.
*Fails by* DrillError when a fault did not really happen, or the job does not train again.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import psutil

from elastic_trainer.clock import pause
from elastic_trainer.drills.stage import DrillError, Stage, now
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import kill
from elastic_trainer.local.ledger import FileTail
from tests.drills.cluster.interludes import INTERLUDES, Mark
from tests.drills.cluster.storm import holders

SEASONED_STEPS = 10
"""A worker that is killed sooner time and again backs off from joining, which costs the test time."""
SEASONED = 0.9


class Moment(StrEnum):
    """When the next kill comes."""

    UPON = "upon"
    """Into the recovery from the one before."""
    TRAINING = "training"
    """Somewhere in the training, once two or more nodes do it together again."""
    INTERLUDE = "interlude"
    """While the victim or another one is amid an evaluation, a save or a phase."""


SOON_S = {Moment.UPON: 0.15, Moment.TRAINING: 0.6}
LOOK_S = 0.08
"""Between two looks, each of which asks all processes of the machine for their parents."""
INTERLUDE_PART = 0.3
"""How far into an interlude a kill is drawn at most."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One that happened. ``amid``: how many workers were in an interlude then and lived on.

    ``t`` (monotonic): before it the process lived. A later one may have the same number.
    """

    node: str
    pid: int
    t: float
    moment: Moment
    amid: int


class Interruptions:
    """Which workers are amid an interlude, from what they write."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / INTERLUDES
        self._tails: dict[Path, FileTail] = {}
        self._newest: dict[int, Mark] = {}

    def under_way(self, pids: Iterable[int]) -> dict[int, Mark]:
        """The interludes that these processes are in."""
        for path in self._directory.glob("*.jsonl"):
            for text in self._tails.setdefault(path, FileTail(path)).read():
                mark = Mark.model_validate_json(text)
                self._newest[mark.pid] = mark
        return {pid: self._newest[pid] for pid in pids if pid in self._newest and not self._newest[pid].ended}


class Kills:
    """Strikes the workers of ``stage`` by the chance of ``seed``; ``done`` is what has really happened."""

    def __init__(self, stage: Stage, seed: int, *, interlude_every: int, least_s: float) -> None:
        self._stage, self._chance = stage, random.Random(seed)
        self._interlude_every, self._least_s = interlude_every, least_s
        self._interruptions = Interruptions(stage.directory)
        self._last_s = 0.0
        self._trained: dict[int, tuple[str, psutil.Process]] = {}
        self.done: list[Kill] = []

    def rage(self, count: int, least: int = 0, budget_s: float = math.inf) -> None:
        """Kill ``count`` workers, then wait until everybody trains; ``least`` of them where they take ``budget_s``."""
        self._stage.settled()
        enough = now() + budget_s
        for number in range(1, count + 1):
            if number > least and now() > enough:
                break
            moment = Moment.INTERLUDE if number % self._interlude_every == 0 else self._drawn()
            self._stage.until(partial(self._ripe, moment), f"the {moment} for kill {number}")
            pause(self._delay_s(moment))
            self._kill(moment)
        self._stage.settled()

    def by_node(self) -> Counter[str]:
        """How often the worker of each node was killed."""
        return Counter(kill.node for kill in self.done)

    def _drawn(self) -> Moment:
        return Moment.UPON if self._chance.random() < 0.2 else Moment.TRAINING

    def _holders(self) -> dict[str, int]:
        """Workers that live and hold the training state, by node."""
        self._stage.look()
        found = holders(self._stage)
        self._trained |= {worker.pid: (name, worker) for name, worker in found.items()}
        self._check_survivors()
        return {name: worker.pid for name, worker in found.items()}

    def _check_survivors(self) -> None:
        killed = {kill.pid for kill in self.done}
        for pid, (name, worker) in self._trained.items():
            if pid not in killed and not processes.alive(worker):
                raise DrillError(f"the worker of {name}, process {pid}, has ended, and nobody killed it")

    def _ripe(self, moment: Moment) -> bool:
        """Whether a kill may come at that moment: one who holds the state is left then."""
        pause(LOOK_S)
        holders = self._holders()
        if len(holders) < 2:
            return False
        if moment is Moment.UPON:
            return True
        if moment is Moment.INTERLUDE:
            marks = self._interruptions.under_way(holders.values()).values()
            return any(mark.seconds >= self._least_s and now() - mark.t < mark.seconds / 4 for mark in marks)
        standing = self._stage.book.standing()
        if standing is None or standing.world < 2 or len(standing.nodes) < standing.world:
            return False
        return all(
            holders.get(name) == pid and self._stage.book.steps_after(pid, self._last_s)
            for name, pid in standing.pids.items()
        )

    def _delay_s(self, moment: Moment) -> float:
        if moment is not Moment.INTERLUDE:
            return self._chance.uniform(0.0, SOON_S[moment])
        marks = self._interruptions.under_way(self._holders().values()).values()
        return self._chance.uniform(0.0, INTERLUDE_PART * max((mark.seconds for mark in marks), default=0.0))

    def _kill(self, moment: Moment) -> None:
        holders = self._holders()
        name = self._victim(holders)
        worker = self._stage.node(name).worker()
        if worker is None or worker.pid != holders[name]:
            raise DrillError(f"the worker of {name} has ended, and nobody killed it")
        amid = self._interruptions.under_way(pid for node, pid in holders.items() if node != name)
        self._last_s = now()
        kill([worker])
        self.done.append(Kill(name, worker.pid, self._last_s, moment, len(amid)))

    def _victim(self, holders: dict[str, int]) -> str:
        """Mostly one that has trained for a while."""
        seasoned = [
            name for name, pid in holders.items() if len(self._stage.book.steps_after(pid, 0.0)) >= SEASONED_STEPS
        ]
        return self._chance.choice(seasoned if seasoned and self._chance.random() < SEASONED else list(holders))
