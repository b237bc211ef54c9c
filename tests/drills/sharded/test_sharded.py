"""Sharded models in place: 2 nodes of 2 ranks, workers and nodes killed at random moments and at the commit barrier.

``ELASTIC_TRAINER_SHARD_KILLS=N`` kills N times; the seed is printed, and ``ELASTIC_TRAINER_SOAK_SEED`` plays it again.
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

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.drills.measure import Book
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import Node
from elastic_trainer.local.ledger import LineKind, audit
from tests.drills.endings.job import Job
from tests.drills.sharded.train import SAMPLES, Net
from tests.integration.training.launch import ran
from tests.support import seeds
from tests.unit.checkpoint.states import newest_of

pytestmark = pytest.mark.usefixtures("sharded_torch")

SCRIPT = Path(__file__).with_name("train.py")
COUNT = "ELASTIC_TRAINER_SHARD_KILLS"
KILLS = int(os.environ.get(COUNT, "0")) or 2
FREELY = {"ttl": "10", "regroup_grace": "10", "failure_limit": "100000"}
"""Many failures are no poisoned batch here."""
FORCED = max(1, KILLS // 10)
"""How often each of the faults comes that no kill from outside would hit."""
SHARDS = 2
PACE_S, AHEAD = (0.01, 25) if COUNT in os.environ else (0.05, 12)
"""Seconds of rest in each step, which leave the processors to others; and how many steps ahead a fault is announced."""
CLOSE = 5e-6
"""To one process after exactly as many steps; gradients that are counted twice make 1e-3 of it."""
ROUGH = 2e-3
"""The same of bfloat16, whose last bit is worth 0.004 of a gradient."""
STAGES: dict[str, Any] = {"mesh": [2, 1], "names": ["pp", "dp_shard"], "micro": 2, "schedule": "1F1B"}
MIXTURE: dict[str, Any] = {"mesh": [2, 2], "names": ["dp_shard_mod_ep", "ep"]}
INTERLEAVED = STAGES | {"stages_each": 2, "schedule": None}
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, CLOSE),
    "accumulating": ({"micro": 2}, CLOSE),
    "tensor parallel": ({"mesh": [1, 2], "names": ["dp_shard", "tp"]}, 4 * CLOSE),
    "three nodes": ({"nodes": 3}, CLOSE),
    "sharded and tensor parallel": ({"mesh": [2, 2], "names": ["dp_shard", "tp"], "shards": 4}, 4 * CLOSE),
    "bfloat16": ({"policy": "reduced", "sgd": True}, ROUGH),
    "scaled and averaged": ({"scaler": True, "average": 0.9, "activations": True}, CLOSE),
    "stages": (STAGES, CLOSE),
    "stages of shards": (STAGES | {"mesh": [2, 2], "shards": 4, "schedule": "GPipe", "scaler": True}, CLOSE),
    "interleaved stages of shards": (INTERLEAVED | {"mesh": [2, 2], "shards": 4}, CLOSE),
    "experts": (MIXTURE | {"shards": 4, "double": True}, CLOSE),
}
"""Options of train.py (and how many nodes and ranks a node), and how close the result is. All but the first are for the
long form."""


class Sharded:
    """A job of sharded models, and what it must have done in the end."""

    def __init__(
        self,
        directory: Path,
        endpoint: str,
        run: str,
        *,
        nodes: int = 2,
        shards: int = SHARDS,
        least: int | None = None,
        most: int | None = None,
        shard_nodes: int = 1,
        **options: Any,
    ) -> None:
        self.directory, self.options, self._struck = directory / "job", options, 0
        self.nodes, self.shards = nodes, shards
        self.directory.mkdir()
        self.job = Job(
            self.directory,
            endpoint,
            run,
            entry=[str(SCRIPT), str(self.directory), json.dumps(options)],
            least=least or shard_nodes,
            most=most or nodes,
            options=FREELY | {"recovery": options.pop("recovery", "in_place"), "shard_nodes": str(shard_nodes)},
            workers=shards // shard_nodes,
            max_restarts=1_000_000,
        )

    def await_together(self) -> None:
        """Wait until all ranks of all nodes make steps together."""
        names, began, known = {node.name for node in self.job.running}, SYSTEM.monotonic(), len(self.job.lines())

        def together() -> bool:
            new = [line for line in self.job.lines()[known:] if line.event is LineKind.STEP and line.t > began]
            whole = {line.node for line in new if line.world == self.nodes * self.shards}
            return len(names) == self.nodes and whole >= names

        self.job.wait_for(together, f"{names} do not train together")

    def workers(self, node: Node) -> list[int]:
        """The processes of this node's workers."""
        found = [node.worker(local_rank) for local_rank in range(self.job.spec.workers)]
        return [each.pid for each in found if each is not None]

    def kill(self, chance: random.Random, kind: str) -> Node:
        """SIGKILL a worker or a node; the workers of the others go on in their processes. One of those."""
        victim, *others = chance.sample(self.job.running, self.nodes)
        before = [self.workers(other) for other in others]
        if kind == "node":
            assert victim.kill() is not None
            self.job.add()
        else:
            assert victim.kill_worker(chance.randrange(self.shards)) is not None
        self.await_together()
        assert [self.workers(other) for other in others] == before
        return others[0]

    def strike(self, kind: str) -> None:
        """A fault at a moment that no kill from outside would hit; see Faults."""
        victim, *others = self.job.running
        before, ends = [self.workers(other) for other in others], self.workers(victim)
        self._struck += 1
        fault = {"id": self._struck, "node": victim.name, "kind": kind, "step": self.job.newest() + AHEAD}
        (self.directory / "next").write_text(json.dumps(fault))
        (self.directory / "next").rename(self.directory / "fault")
        self.job.wait_for((self.directory / f"came-{self._struck}").exists, f"{kind} did not happen")
        self.job.wait_for(lambda: not set(ends) & set(self.workers(victim)), f"{victim.name} lives")
        self.await_together()
        assert [self.workers(other) for other in others] == before

    def ended(self, tmp_path: Path, *, restarted: bool = False, ranks: int | None = None) -> float:
        """Let it end; how far its parameters are from those of one process after as many steps."""
        job, living = self.job, [node.name for node in self.job.running]
        everyone = self.nodes * self.shards
        codes = job.finish()
        assert [codes[name] for name in living] == [0] * len(living), job.describe()
        assert not processes.marked(job.ledger_marks)
        logs = "".join(job.log(node.name) for node in job.nodes)
        assert '"ranks.differed"' not in logs
        assert '"ledger.differs"' not in logs
        assert any(f'"{each}.loaded"' in logs for each in ("checkpoint", "snapshot")) == restarted
        found = audit(job.lines(), SAMPLES)
        assert found.exact, found.reason
        assert restarted or Book(job.lines()).committed_again() == 0
        one_replica = (ranks or everyone) < everyone or "whole_job" in self.options
        assert self.compared() > 0 or one_replica
        results = [torch.load(each) for each in self.directory.glob("result-*")]
        assert len(results) == (ranks or everyone)
        (steps,) = {each["step"] for each in results}
        (alone := tmp_path / "alone").mkdir()
        options = {**self.options, "steps": steps, "pace_s": 0.0, "like_nccl": 0}
        if "pp" in options.get("names", ()):  # nothing in the reference is a stage
            options |= {"mesh": [1], "names": ["dp_shard"]}
        assert ran([str(SCRIPT), str(alone), json.dumps(options)], limit_s=300.0 + steps / 20).code == 0
        (reference,) = (torch.load(each) for each in alone.glob("result-*"))
        for each in results:
            for mine, expected in zip(each["metrics"], reference["metrics"], strict=True):
                assert mine == pytest.approx(expected, rel=0.1)
        print({"steps": steps, "rounds": max(line.round for line in job.lines())})
        return max(
            float((each["parameters"][name] - whole).abs().max())
            for each in results
            for name, whole in reference["parameters"].items()
            if name in each["parameters"]
        )

    def compared(self) -> int:
        """All that held one shard after one step had the same bits; how often that could be compared."""
        digests = defaultdict(list)
        for path in self.directory.glob("shards-*"):
            for line in map(json.loads, path.read_text().splitlines()):
                digests[line["step"], line["round"], line["shard_rank"]].append(line["digest"])
        different = [key for key, each in digests.items() if len(set(each)) > 1]
        assert different == []
        return sum(len(each) > 1 for each in digests.values())


@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.parametrize("kind", KINDS if COUNT in os.environ else ["plain"])
def test_whatever_is_killed_the_survivors_go_on_and_no_step_is_lost(
    tmp_path: Path, etcd_endpoint: str, run_id: str, kind: str
) -> None:
    """Workers and whole nodes die and join; replicas hold the same bits after each round, and the result is that of one
    process after exactly as many steps."""
    seed = seeds.seed(soak=COUNT in os.environ)
    chance = random.Random(seed)
    options, close = KINDS[kind]
    sharded = Sharded(tmp_path, etcd_endpoint, run_id, pace_s=PACE_S, **options)
    with sharded.job as job:
        job.start(sharded.nodes)
        sharded.await_together()
        for fault in ("barrier", "half", "backward") * FORCED:
            sharded.strike(fault)
        assert "step.rolled_forward" in "".join(job.log(node.name) for node in job.nodes)
        for number in range(KILLS):
            pause(chance.uniform(0.0, 0.5))
            sharded.kill(chance, "node" if number % 2 else "worker")
        error = sharded.ended(tmp_path)
    print({"error": error})
    assert error < close


@pytest.mark.parametrize("stages", [STAGES, INTERLEAVED], ids=["one", "two"])
def test_a_fault_in_the_middle_of_a_schedule_is_undone_and_repeated(
    tmp_path: Path, etcd_endpoint: str, run_id: str, stages: dict[str, Any]
) -> None:
    """One stage on each rank, or two: amid sends and receives, in the update's barrier, and as a whole node."""
    sharded = Sharded(tmp_path, etcd_endpoint, run_id, pace_s=PACE_S, save_every=7, **stages)
    with sharded.job as job:
        job.start(2)
        sharded.await_together()
        for fault in ("schedule", "barrier", "half"):
            sharded.strike(fault)
        sharded.kill(random.Random(1), "node")
        error = sharded.ended(tmp_path)
    print({"error": error})
    assert error < CLOSE
    saved = newest_of(CheckpointManager(sharded.directory / "checkpoints"))
    Net().load_state_dict(saved.state["model"])  # all stages, as one


@pytest.mark.parametrize("version", [1, 2])
def test_kernels_that_hang_are_aborted_and_what_they_leave_is_not_committed(
    tmp_path: Path, etcd_endpoint: str, run_id: str, version: int
) -> None:
    """Over groups that behave like NCCL's: a lost peer never shows, and an aborted sum ends without an error. nccl2's
    watchdog sees the peer go, and lets the process live since the agent says so."""
    sharded = Sharded(tmp_path, etcd_endpoint, run_id, pace_s=PACE_S, like_nccl=version)
    with sharded.job as job:
        job.start(2)
        sharded.await_together()
        for fault in ("kernel", "barrier"):
            sharded.strike(fault)
        error = sharded.ended(tmp_path)
    print({"error": error})
    assert error < CLOSE
    assert sum(int(each.read_text()) for each in sharded.directory.glob("aborts-*")) > 0


def test_a_node_of_another_size_is_refused_and_the_others_go_on(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    sharded = Sharded(tmp_path, etcd_endpoint, run_id, pace_s=PACE_S)
    with sharded.job as job:
        (first,) = job.start(1)
        job.await_steps(5)
        before = sharded.workers(first)
        second = job.add_with(workers=1, max_restarts=1)
        assert job.exit_code(second) not in (0, None)
        assert "this node has 1 processes and the node of rank 0 has 2" in job.log(second.name)
        job.await_steps(10)
        assert sharded.workers(first) == before
