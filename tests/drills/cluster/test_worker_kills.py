"""Workers killed in a row, amid long saves and evaluations: the others go on in place, and nothing is lost.

``ELASTIC_TRAINER_WORKER_KILLS=N`` kills N workers, with saves and evaluations of up to 90 s; the seed is printed, and
``ELASTIC_TRAINER_SOAK_SEED`` plays it again.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import pytest

from elastic_trainer.clock import pause
from elastic_trainer.drills.measure import compared
from elastic_trainer.drills.run import conclusions
from elastic_trainer.drills.stage import DrillError, Setting, Stage, now, staged
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import kill
from elastic_trainer.local.ledger import FileTail, LineKind, audit
from tests.drills.cluster.interludes import INTERLUDES, Mark, Program
from tests.drills.cluster.storm import holders
from tests.drills.cluster.undisturbed import undisturbed
from tests.support import seeds

# A busy machine may keep a living agent from answering in half a second; many failures are no poisoned batch here.
FREELY = {"regroup_grace": "10", "failure_limit": "100000"}
COUNT = "ELASTIC_TRAINER_WORKER_KILLS"


@dataclass(frozen=True, slots=True)
class Pace:
    """How many kills, one of ``interlude_every`` amid work of ``least_s`` or more, most of which is yet to come then.

    ``sever_timeout`` is shorter than much of that.
    """

    kills: int
    least: int
    budget_s: float
    """A slow machine kills ``least`` at least, and no more once that much time is over."""
    shortest_s: float
    longest_s: float
    steps_between: int
    pause_s: float
    interlude_every: int
    least_s: float
    sever_timeout: str
    limit_s: float


def _pace() -> Pace:
    asked = int(os.environ.get(COUNT, "0"))
    if asked <= 0:
        return Pace(8, 6, 40.0, 0.5, 4.0, 30, 0.06, 3, 2.5, "1.5", 120.0)
    return Pace(asked, asked, math.inf, 1.0, 90.0, 600, 0.05, 10, 1.0, "30", 900.0)


PACE = _pace()


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
SEASONED_STEPS, SEASONED = 10, 0.9
"""A worker that is killed sooner again and again backs off from joining, which costs time: how often none is."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One that happened. ``amid``: how many workers were in an interlude then and lived on.

    ``t`` (monotonic): before it the process lived. A later one may have the same number.
    """

    node: str
    pid: int
    t: float
    amid: int


class Kills:
    """SIGKILLs one worker of ``stage`` after another by the chance of ``seed``; some worker always survives.

    ``done`` is what has really happened.
    """

    def __init__(self, stage: Stage, seed: int, *, interlude_every: int, least_s: float) -> None:
        self._stage, self._chance = stage, random.Random(seed)
        self._interlude_every, self._least_s = interlude_every, least_s
        self._tails: dict[Path, FileTail] = {}
        self._newest: dict[int, Mark] = {}
        self.done: list[Kill] = []

    def rage(self, count: int, least: int = 0, budget_s: float = math.inf) -> None:
        """Kill ``count`` workers, then wait until everybody trains; ``least`` of them where they take ``budget_s``."""
        self._stage.await_steps()
        enough = now() + budget_s
        for number in range(1, count + 1):
            if number > least and now() > enough:
                break
            moment = Moment.UPON if self._chance.random() < 0.2 else Moment.TRAINING
            moment = Moment.INTERLUDE if number % self._interlude_every == 0 else moment
            while True:
                self._stage.until(partial(self._ripe, moment), f"the {moment} for kill {number}")
                under_way = self._under_way(self._holders())
                lasts_s = max((mark.seconds for mark in under_way.values()), default=0.0)
                pause(self._chance.uniform(0.0, SOON_S.get(moment, INTERLUDE_PART * lasts_s)))
                if moment is not Moment.INTERLUDE or self._under_way(self._holders()):
                    break  # else this machine took so long to look that it is over
            self._kill()
        self._stage.await_steps()

    def _holders(self) -> dict[str, int]:
        """Workers that live and hold the training state, by node."""
        self._stage.observe()
        return {name: worker.pid for name, worker in holders(self._stage).items()}

    def _under_way(self, pids: dict[str, int]) -> dict[str, Mark]:
        """The interludes that these workers are in, from what they write."""
        for path in (self._stage.directory / INTERLUDES).glob("*.jsonl"):
            for text in self._tails.setdefault(path, FileTail(path)).read():
                mark = Mark.model_validate_json(text)
                self._newest[mark.pid] = mark
        found = {name: self._newest[pid] for name, pid in pids.items() if pid in self._newest}
        return {name: mark for name, mark in found.items() if not mark.ended}

    def _ripe(self, moment: Moment) -> bool:
        """Whether a kill may come at that moment: one who holds the state is left then."""
        pause(LOOK_S)
        holders = self._holders()
        if len(holders) < 2 or moment is Moment.UPON:
            return len(holders) >= 2
        if moment is Moment.INTERLUDE:
            marks = self._under_way(holders).values()
            return any(mark.seconds >= self._least_s and now() - mark.t < mark.seconds / 4 for mark in marks)
        standing, book = self._stage.book.standing(), self._stage.book
        if standing is None or standing.world < 2 or len(standing.nodes) < standing.world:
            return False
        last_s = self.done[-1].t if self.done else 0.0
        return all(holders.get(name) == pid and book.steps_after(pid, last_s) for name, pid in standing.pids.items())

    def _kill(self) -> None:
        """Mostly one that has trained for a while."""
        holders, book = self._holders(), self._stage.book
        seasoned = [name for name, pid in holders.items() if len(book.steps_after(pid, 0.0)) >= SEASONED_STEPS]
        name = self._chance.choice(seasoned if seasoned and self._chance.random() < SEASONED else list(holders))
        worker = self._stage.node(name).worker()
        if worker is None or worker.pid != holders[name]:
            raise DrillError(f"the worker of {name} has ended, and nobody killed it")
        amid = len(self._under_way(holders).keys() - {name})
        t = now()
        kill([worker])
        self.done.append(Kill(name, worker.pid, t, amid))


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("etcd_binary")
@pytest.mark.skipif(COUNT in os.environ, reason="a soak")
def test_an_evaluation_is_completed_by_one_who_is_left_of_too_few(tmp_path: Path) -> None:
    """Of two nodes, the least there may be, one loses its worker amid an evaluation: the other completes that by itself
    as soon as the first is back, which joins behind it; no step is committed twice, and every sample counts once."""
    evaluations = Program(2.0, 3.0, every=40, seed=965)
    early = [evaluations.behind(step) for step in range(1, 250)]
    assert {str(due[0]) for due in early if due is not None} == {"evaluation"}
    setting = Setting(nodes=2, min_nodes=2, max_nodes=2, entry=evaluations.entry, limit_s=120.0, options=FREELY)
    with staged(setting, tmp_path) as stage:
        kills = Kills(stage, 1, interlude_every=1, least_s=2.0)
        kills.rage(2)
        assert [kill.amid for kill in kills.done] == [1, 1]
        assert (
            stage.book.committed_again({kill.pid for kill in kills.done} | set(stage.await_steps().pids.values())) == 0
        )
        assert conclusions(stage) == []


@pytest.mark.timeout(600 + 60 * PACE.kills)
@pytest.mark.usefixtures("etcd_binary")
def test_workers_killed_in_a_row_cost_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kill is recovered from in place, also amid evaluations, saves and phases that outlast ``sever_timeout``: no
    worker ends that was not killed, no step is committed twice by one process, every sample counts once,
    and the parameters equal, bit by bit, those of the same job on one process without any fault."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seed = seeds.seed(soak=COUNT in os.environ)
    setting = Setting(
        nodes=4,
        min_nodes=1,
        max_nodes=4,
        samples=500,
        width=64,
        pause_s=PACE.pause_s,
        reduction="tree",
        entry=Program(PACE.shortest_s, PACE.longest_s, PACE.steps_between, seed).entry,
        limit_s=PACE.limit_s,
        options={**FREELY, "sever_timeout": PACE.sever_timeout},
    )
    with staged(setting, tmp_path / "job") as stage:
        kills = Kills(stage, seed, interlude_every=PACE.interlude_every, least_s=PACE.least_s)
        kills.rage(PACE.kills, PACE.least, PACE.budget_s)
        final = stage.await_steps()
        workers = {name: stage.node(name).worker() for name in final.nodes}
        restarts = {
            name: int(processes.environment(worker).get("TORCHELASTIC_RESTART_COUNT", "-1"))
            for name, worker in workers.items()
            if worker is not None
        }
        assert conclusions(stage) == []
        digests = stage.digests()
        lines = stage.book.lines
        logs = "".join(node.log.read_text(errors="replace") for node in stage.cluster.nodes)
    done = len(kills.done)
    assert PACE.least <= done <= PACE.kills
    killed_of = Counter(each.node for each in kills.done)
    assert restarts == {name: killed_of[name] for name in final.nodes}, "a worker ended that was not killed"
    opened = {line.pid: line.t for line in lines if line.event is LineKind.OPENED}  # the last time of each
    killed = {kill.pid: kill.t for kill in kills.done}
    assert {pid for pid, t in opened.items() if t > killed.get(pid, 0.0)} == set(final.pids.values())
    assert '"worker.killed"' not in logs
    assert sum(kill.amid > 0 for kill in kills.done) >= done // PACE.interlude_every // 2
    assert stage.book.committed_again(opened) == 0
    assert audit(lines, setting.samples).steps_rolled_back <= done
    assert compared(digests) > 0
    found = {each.step: each.digest for each in digests}
    expected = undisturbed(setting, tmp_path / "alone", max(found), 300.0 + PACE.kills)
    assert found == {step: expected[step] for step in found}
