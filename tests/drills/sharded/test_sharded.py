"""Sharded models in place: 2 nodes of 2 ranks, workers and nodes killed at random moments and at the commit barrier.

``ELASTIC_TRAINER_SHARD_KILLS=N`` kills N times; the seed is printed, and ``ELASTIC_TRAINER_KILL_SEED`` plays it again.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.drills.measure import Book
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import Node
from elastic_trainer.local.ledger import LineKind, audit
from tests.drills.endings.job import Job
from tests.drills.sharded.train import SAMPLES
from tests.integration.training.launch import ran

SCRIPT = Path(__file__).with_name("train.py")
COUNT, SEED = "ELASTIC_TRAINER_SHARD_KILLS", "ELASTIC_TRAINER_KILL_SEED"
KILLS = int(os.environ.get(COUNT, "0")) or 3
FREELY = {"ttl": "10", "regroup_grace": "10", "failure_limit": "100000", "stalled_rounds": "100000"}
"""Many failures are no poisoned batch here."""
PLACES = 2
CLOSE, FAR = 5e-6, 1e-3
"""To one process after exactly as many steps; and what gradients that are counted twice make of it."""


class Sharded:
    """A job of sharded models, and what it must have done in the end."""

    def __init__(self, directory: Path, endpoint: str, run: str, **options: Any) -> None:
        self.directory, self.options, self._struck = directory / "job", options, 0
        self.directory.mkdir()
        self.job = Job(
            self.directory,
            endpoint,
            run,
            entry=[str(SCRIPT), str(self.directory), json.dumps(options)],
            least=1,
            most=2,
            options=FREELY | {"recovery": options.pop("recovery", "in_place")},
            workers=PLACES,
            max_restarts=1_000_000,
        )

    def await_together(self) -> None:
        """Wait until all ranks of both nodes make steps together."""
        names, began = {node.name for node in self.job.running}, SYSTEM.monotonic()

        def together() -> bool:
            new = [line for line in self.job.lines() if line.event is LineKind.STEP and line.t > began]
            return len(names) == 2 and {line.node for line in new if line.world == 2 * PLACES} >= names

        self.job.wait_for(together, f"{names} do not train together")

    def workers(self, node: Node) -> list[int]:
        """The processes of this node's workers."""
        found = [node.worker(place) for place in range(PLACES)]
        return [each.pid for each in found if each is not None]

    def kill(self, chance: random.Random, kind: str) -> None:
        """SIGKILL a worker or a node; the workers of the other node go on in their processes."""
        victim, other = chance.sample(self.job.running, 2)
        before = self.workers(other)
        if kind == "node":
            assert victim.kill() is not None
            self.job.add()
        else:
            assert victim.kill_worker(chance.randrange(PLACES)) is not None
        self.await_together()
        assert self.workers(other) == before

    def strike(self, kind: str) -> None:
        """A fault at a moment that no kill from outside would hit; see Faults."""
        victim, other = self.job.running
        before, ends = self.workers(other), self.workers(victim)
        self._struck += 1
        fault = {"id": self._struck, "node": victim.name, "kind": kind, "step": self.job.newest() + 25}
        (self.directory / "next").write_text(json.dumps(fault))
        (self.directory / "next").rename(self.directory / "fault")
        self.job.wait_for((self.directory / f"came-{self._struck}").exists, f"{kind} did not happen")
        self.job.wait_for(lambda: not set(ends) & set(self.workers(victim)), f"{victim.name} lives")
        self.await_together()
        assert self.workers(other) == before

    def ended(self, tmp_path: Path, *, exact: bool = True) -> float:
        """Let it end; how far its parameters are from those of one process after as many steps."""
        job, living = self.job, [node.name for node in self.job.running]
        codes = job.finish()
        assert [codes[name] for name in living] == [0] * len(living), job.describe()
        assert not processes.marked(job.ledger_marks)
        logs = "".join(job.log(node.name) for node in job.nodes)
        assert '"ranks.differed"' not in logs or not exact
        assert '"checkpoint.loaded"' not in logs
        found = audit(job.lines(), SAMPLES)
        assert found.exact, found.reason
        assert Book(job.lines()).committed_again() == 0
        assert self.compared() > 0
        results = [torch.load(each) for each in self.directory.glob("result-*")]
        assert len(results) == 2 * PLACES
        (steps,) = {each["step"] for each in results}
        (alone := tmp_path / "alone").mkdir()
        options = {**self.options, "steps": steps, "pace_s": 0.0, "keeps_stale": False}
        assert ran([str(SCRIPT), str(alone), json.dumps(options)], limit_s=300.0).code == 0
        (reference,) = (torch.load(each) for each in alone.glob("result-*"))
        for each in results:
            for mine, expected in zip(each["metrics"], reference["metrics"], strict=True):
                assert not exact or mine == pytest.approx(expected, rel=1e-4)
            assert not exact or (each["rows"] - reference["rows"]).abs().max() < 1e-3
        print({"steps": steps, "rounds": max(line.round for line in job.lines())})
        return max(
            float((each["parameters"][name] - whole).abs().max())
            for each in results
            for name, whole in reference["parameters"].items()
        )

    def compared(self) -> int:
        """All that held one place after one step had the same bits; how often that could be compared."""
        digests = defaultdict(list)
        for path in self.directory.glob("shards-*"):
            for line in map(json.loads, path.read_text().splitlines()):
                digests[line["step"], line["round"], line["place"]].append(line["digest"])
        different = [key for key, each in digests.items() if len(set(each)) > 1]
        assert different == []
        return sum(len(each) > 1 for each in digests.values())


@pytest.mark.timeout(300 + 60 * KILLS)
def test_whatever_is_killed_the_survivors_go_on_and_no_step_is_lost(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """Workers and whole nodes die and join; replicas hold the same bits after each round, and the result is that of one
    process after exactly as many steps."""
    seed = int(os.environ.get(SEED, "0")) or (1 if COUNT not in os.environ else random.SystemRandom().getrandbits(31))
    print(f"{SEED}={seed}")
    chance = random.Random(seed)
    sharded = Sharded(tmp_path, etcd_endpoint, run_id, pace_s=0.01)
    with sharded.job as job:
        job.start(2)
        sharded.await_together()
        for kind in ("barrier", "half", "backward"):
            sharded.strike(kind)
        assert "step.rolled_forward" in "".join(job.log(node.name) for node in job.nodes)
        for number in range(KILLS):
            pause(chance.uniform(0.0, 0.5))
            sharded.kill(chance, "node" if number % 3 == 2 else "worker")
        error = sharded.ended(tmp_path)
    print({"error": error})
    assert error < CLOSE


def test_gradients_that_are_not_cleared_are_counted_twice(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Replicas agree then all the same: only the comparison with one process finds it, so that test can fail."""
    sharded = Sharded(tmp_path, etcd_endpoint, run_id, pace_s=0.01, keeps_stale=True)
    with sharded.job as job:
        job.start(2)
        sharded.await_together()
        sharded.strike("backward")
        error = sharded.ended(tmp_path, exact=False)
    print({"error": error})
    assert error > FAR
