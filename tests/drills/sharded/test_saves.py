"""What a real sharded job saves, among faults in the middle of saves, and who can resume it.

Each shard rank writes its own file. Every copy that a rank makes is recorded, so that a checkpoint is compared bit by
bit with what its ranks held.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.checkpoint.codec import fingerprint
from elastic_trainer.cli.main import main
from elastic_trainer.local.cluster import Node
from tests.drills.sharded.test_sharded import CLOSE, SCRIPT, SHARDS, Sharded
from tests.drills.sharded.train import Net, named_tensors
from tests.integration.training.launch import ran
from tests.unit.checkpoint.states import newest_of

pytestmark = pytest.mark.usefixtures("sharded_torch")

SAVE_EVERY = 6


class Saved(Sharded):
    """A sharded job that saves, and what it has saved."""

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def newest_saved(self) -> int:
        entry = CheckpointManager(self.checkpoints).newest() if self.checkpoints.exists() else None
        return 0 if entry is None else entry.step

    def fail_save(self, kind: str, shard_rank: int) -> Node:
        """The next save meets a fault at this shard rank; the node that it happened on."""
        (self.directory / "next").write_text(json.dumps({"kind": kind, "shard_rank": shard_rank}))
        (self.directory / "next").rename(self.directory / "save-fault")
        faulted = self.directory / "save-faulted"
        self.job.wait_for(faulted.exists, f"no save met {kind} at shard rank {shard_rank}")
        name = faulted.read_text()
        faulted.unlink()
        return next(node for node in self.job.nodes if node.name == name)

    def await_saved(self) -> None:
        """Wait for a checkpoint of a step that is made from now on, and compare it with what its ranks copied."""
        goal = self.job.newest() + 1
        self.job.wait_for(lambda: self.newest_saved() >= goal, f"no step from {goal} on is saved")
        compared(self.directory, self.checkpoints)

    def await_copied(self) -> None:
        """Wait until all shard ranks have copied a step that is not saved, and the next save is two steps away."""
        self.job.wait_for(self._copied, "no step behind a save is copied")

    def _copied(self) -> bool:
        copies = []
        for path in self.directory.glob("copies-*"):
            lines = path.read_text().rpartition("\n")[0].splitlines()[-2:]
            copies.append(tuple(json.loads(line)["step"] for line in lines))
        whole, begun = max((each for each in copies if len(each) == 2), default=(0, 0))
        return (
            copies.count((whole, begun)) >= SHARDS and whole > self.newest_saved() and begun % SAVE_EVERY in range(1, 5)
        )

    def kill_all(self) -> None:
        for node in self.job.running:
            for local_rank in range(SHARDS):
                node.kill_worker(local_rank)


def compared(directory: Path, checkpoints: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint as an unsharded program loads it: bit by bit what all shard ranks copied at that moment."""
    loaded = newest_of(CheckpointManager(checkpoints))
    moment = (loaded.manifest.round, loaded.manifest.step)
    whole: dict[str, torch.Tensor] = dict(named_tensors(loaded.state))
    covered = {name: set[str]() for name in whole}
    for path in directory.glob("copies-*"):
        whole_lines = path.read_text().rpartition("\n")[0].splitlines()  # a worker may be writing the next one
        for copy in map(json.loads, whole_lines):
            boxes = copy["boxes"] if (copy["round"], copy["step"]) == moment else {}
            for name, (offset, shape, digest) in boxes.items():
                box = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
                assert fingerprint({"": whole[name][box].contiguous()}) == digest, (loaded.name, name)
                covered[name].add(str(offset))
    assert {len(each) for each in covered.values()} == {SHARDS}, covered
    return whole


def test_whatever_happens_amid_a_save_the_next_one_is_whole_and_any_number_of_ranks_resumes_it(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """A worker dies in its file, also that of shard rank 0; a node dies; a worker never comes; all die at once."""
    job = Saved(
        tmp_path, etcd_endpoint, run_id, pace_s=0.05, save_every=SAVE_EVERY, snapshot_every_s=0.1, patience_s=2.0
    )
    with job.job as cluster:
        cluster.start(2)
        job.await_together()
        for kind, shard_rank in (("dies", 1), ("dies", 0), ("stalls", 1), ("absent", 1)):
            before = {node.name: job.workers(node) for node in cluster.running}
            victim = job.fail_save(kind, shard_rank)
            if kind == "stalls":
                assert victim.kill() is not None
                cluster.add()
            job.await_together()
            job.await_saved()
            kept = [node for node in cluster.running if node.name != victim.name or kind == "absent"]
            assert all(job.workers(node) == before[node.name] for node in kept if node.name in before), kind
        assert "place 1 did not come to write its shards" in "".join(cluster.log(node.name) for node in cluster.nodes)
        cluster.await_steps(8)
        job.await_copied()
        job.kill_all()
        job.await_together()
        logs = "".join(cluster.log(node.name) for node in cluster.nodes)
        assert '"snapshot.rescued"' in logs
        job.await_saved()
        assert job.ended(tmp_path, restarted=True) < CLOSE
    loads_anywhere(tmp_path, job.directory, job.checkpoints)


def loads_anywhere(tmp_path: Path, directory: Path, checkpoints: Path) -> None:
    """In a process alone, by two ranks, exported and in a plain model: the same bits."""
    whole = compared(directory, checkpoints)
    for ranks in (1, 2):
        (there := tmp_path / f"ranks-{ranks}").mkdir()
        words = [str(SCRIPT), str(there), json.dumps({"shows": str(checkpoints), "seed": 5})]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        outcome = ran([*(launcher if ranks > 1 else []), *words])
        assert outcome.code == 0, outcome.err
        for rank in range(ranks):
            shown = torch.load(there / f"shown-{rank}")
            assert shown.pop("step") > 0
            assert shown.keys() == whole.keys()
            assert all(torch.equal(shown[name], each) for name, each in whole.items())
    goal = tmp_path / "model.safetensors"
    assert main(["checkpoints", "export", str(checkpoints), str(goal), "--to", "safetensors"]) == 0
    bare = Net()
    bare.load_state_dict(load_file(goal))
    assert all(torch.equal(each, whole[name]) for name, each in bare.state_dict().items())
