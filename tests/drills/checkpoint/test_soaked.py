"""Workers, agents and whole nodes killed at random moments of snapshot, seal, commit, rescue and restore.

``ELASTIC_TRAINER_SAVE_KILLS=N`` kills N times in each mode; the seed is printed, and ``ELASTIC_TRAINER_SOAK_SEED``
plays it again.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.checkpoint.manager import Entry
from elastic_trainer.checkpoint.manifest import GoneError
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import Node, kill
from elastic_trainer.local.ledger import Line, LineKind, audit
from tests.drills.checkpoint.killing import COUNT
from tests.drills.checkpoint.soaked import SAMPLES
from tests.drills.endings.job import Job
from tests.integration.training.launch import ran
from tests.support import seeds
from tests.support.slowstorage import SLOW, SlowStorage

SCRIPT = Path(__file__).with_name("soaked.py")
KILLS = int(os.environ.get(COUNT, "0")) or 4
BUDGET_S = math.inf if COUNT in os.environ else 20.0
"""A slow machine kills ``LEAST`` at least, and no more once that much time is over."""
LEAST = min(3, KILLS)
FSYNC_S = 0.1
"""What each fsync of a checkpoint takes, of which there are several."""
PAUSE_S = 0.02
"""Between two steps."""
UPON = 0.3
"""The part of kills that comes into the recovery from the one before."""
FREELY = {"ttl": "10", "regroup_grace": "10", "failure_limit": "100000"}
"""Many failures are no poisoned batch here."""


class Victim(StrEnum):
    WORKER = "worker"
    WORKERS = "all workers"
    AGENT = "agent"
    NODE_IN_TURN = "agent, then worker"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Kill:
    """One that happened, in round ``round`` or behind it; the newest checkpoint was that of ``saved_step``."""

    victim: Victim
    round: int
    saved_step: int


class Soak:
    """Kills in ``job``, whose checkpoints are in ``manager``."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job, self._random = job, random.Random(seed)
        self._manager = CheckpointManager(job.spec.directory / "checkpoints")
        self.done: list[Kill] = []
        self._newest: tuple[int, int] = (0, 0)
        self._bag: list[Victim] = []

    def rage(self, kills: int, least: int, budget_s: float) -> None:
        """Kill, and look what is left each time."""
        budget = Deadline.after(budget_s) if budget_s < math.inf else None
        for number in range(kills):
            if number >= least and budget is not None and budget.expired:
                break
            if number == 0 or self._random.random() > UPON:
                self.await_training()
            pause(self._random.uniform(0.0, 2.0))
            self._strike(self._drawn())
        self.await_training()

    def _drawn(self) -> Victim:
        if not self._bag:
            self._bag = self._random.sample(list(Victim), len(Victim))
        return self._bag.pop()

    def _strike(self, victim: Victim) -> None:
        """One kill, for sure: what is to die may be starting."""
        self.check()
        while not self._kill(victim):
            pause(0.05)
        reached = max((line.round for line in self._job.lines()), default=0)
        self.done.append(Kill(victim, reached, self._newest[1]))
        print(f"{SYSTEM.monotonic():.1f} {self.done[-1]}", flush=True)

    def _kill(self, victim: Victim) -> bool:
        nodes = self._job.running
        node = self._random.choice(nodes)
        if victim is Victim.WORKER:
            return node.kill_worker() is not None
        if victim is Victim.WORKERS:
            workers = [worker for each in nodes if (worker := each.worker()) is not None]
            if len(workers) == len(nodes):
                kill(workers)
            return len(workers) == len(nodes)
        if victim is Victim.NODE:
            done = node.kill() is not None
        else:
            done = self._kill_agent(node, then_worker=victim is Victim.NODE_IN_TURN)
        if done:
            self._job.add()
        return done

    def _kill_agent(self, node: Node, *, then_worker: bool) -> bool:
        family = node.family()
        if not family:
            return False
        agent, *rest = family
        kill([agent])
        if then_worker:
            pause(self._random.uniform(0.0, 0.5))
            kill(rest)
        return True

    # ---- what is left

    def await_training(self) -> None:
        names = [node.name for node in self._job.running]
        began = SYSTEM.monotonic()

        def together() -> bool:
            new = [line for line in self._job.lines() if line.event is LineKind.STEP and line.t > began]
            return {line.node for line in new if line.world == 2} >= set(names)  # and a worker whose agent is dead

        self._job.wait_for(together, f"{names} do not train together")
        self.check()

    def check(self) -> None:
        """The newest checkpoint is whole, and none of before is missing that was newer."""
        entry = self._whole()
        found = (entry.manifest.round, entry.step) if entry is not None else (0, 0)
        assert found >= self._newest, f"the newest checkpoint was {self._newest}, and is {found}"
        self._newest = found

    def _whole(self) -> Entry | None:
        while (entry := self._manager.newest()) is not None:
            try:
                self._manager.load(entry)
            except GoneError:  # newer ones came meanwhile
                continue
            return entry
        return None


def too_old(kills: Sequence[Kill], lines: Sequence[Line]) -> list[Line]:
    """Workers that began from an older state than a checkpoint that was there before their round formed."""
    opened = [line for line in lines if line.event is LineKind.OPENED]
    return [line for line in opened for each in kills if line.round > each.round and line.step < each.saved_step]


@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_whatever_dies_at_whatever_moment_nothing_that_is_saved_is_lost(
    tmp_path: Path, etcd_endpoint: str, run_id: str, recovery: str
) -> None:
    """Each time the job goes on, the newest checkpoint is whole and none is older than before; in the end every sample
    was used once, and the parameters have the bits of a run without any of it."""
    seed = seeds.seed(soak=COUNT in os.environ)
    directory = tmp_path / "job"
    directory.mkdir()
    storage = SlowStorage(tmp_path, directory / "checkpoints")
    storage.takes(FSYNC_S)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SLOW), "SLOW_FSYNC": str(storage.file)}
    entry = [str(SCRIPT), str(directory), "1000000000", str(PAUSE_S)]
    options = FREELY | {"recovery": recovery}
    limits: dict[str, Any] = {"least": 1, "most": 2, "max_restarts": 1_000_000}
    with Job(directory, etcd_endpoint, run_id, entry=entry, options=options, environment=environment, **limits) as job:
        job.start(2)
        soak = Soak(job, seed)
        soak.rage(KILLS, LEAST, BUDGET_S)
        living = [node.name for node in job.running]
        codes = job.finish()
        assert [codes[name] for name in living] == [0, 0], job.describe()
        soak.check()
        lines, logs = job.lines(), "".join(job.log(node.name) for node in job.nodes)
        assert not processes.marked(job.ledger_marks)
    counts = Counter(str(each.victim) for each in soak.done)
    events = ("snapshot.rescued", "snapshot.not_rescued", "snapshot.loaded", "checkpoint.loaded")
    print(dict(counts), {each: logs.count(f'"{each}"') for each in events})
    assert len(soak.done) >= LEAST
    assert too_old(soak.done, lines) == []
    found = audit(lines, SAMPLES)
    assert found.exact, found.reason
    assert "checkpoint.quarantined" not in logs
    digests = {path.read_text() for path in directory.glob("digest-*")}
    (digest,) = digests
    (alone := tmp_path / "alone").mkdir()
    assert ran([str(SCRIPT), str(alone), digest.split()[0]], limit_s=120.0 + 10 * KILLS).code == 0
    assert digest == (alone / "digest-0").read_text()
