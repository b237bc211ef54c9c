"""The nodes of a job write each checkpoint together: it is rank 0's state, whatever becomes of those who help."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.local.ledger import LineKind
from tests.drills.checkpoint.sharing_job import SAVE_EVERY
from tests.drills.endings.job import LASTING, Job
from tests.unit.checkpoint.states import same

SCRIPT = "tests.drills.checkpoint.sharing_job"
SHARED, HELPED, LATE = "checkpoint.shared", "checkpoint.helped", "checkpoint.helper_late"
RESCUED = "snapshot.rescued"


def job_of(directory: Path, endpoint: str, run: str, *arguments: str, **options: str) -> Job:
    directory.mkdir()
    entry = ["-m", SCRIPT, str(directory), *arguments]
    return Job(directory, endpoint, run, entry=entry, most=3, options=LASTING | options)


def said(job: Job, event: str) -> list[dict[str, Any]]:
    lines = [line for node in job.nodes for line in job.log(node.name).splitlines() if f'"{event}"' in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


def held(directory: Path, step: int) -> dict[int, dict[str, torch.Tensor]]:
    paths = directory.glob(f"held-{step}-*[0-9]")
    return {int(path.name.split("-")[2]): torch.load(path, weights_only=True) for path in paths}


def check_rank0s(directory: Path, checkpoints: Path, world: int, rescued: frozenset[str] = frozenset()) -> list[str]:
    """Each checkpoint is rank 0's state to the bit, and no other rank's, but for the ``rescued``; their names."""
    manager = CheckpointManager(checkpoints)
    entries = [each for each in manager.entries() if each.step % SAVE_EVERY == 0]
    for entry in entries:
        states = held(directory, entry.step)
        assert len(states) == world
        matches = [rank for rank, state in states.items() if same(manager.load(entry).state["model"], state)]
        assert matches == [0] or (entry.name in rescued and len(matches) == 1)
    return [entry.name for entry in entries]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nodes", "recovery"), [(2, "restart"), (3, "in_place")])
def test_several_nodes_write_the_state_of_rank_0(
    tmp_path: Path, etcd_endpoint: str, run_id: str, nodes: int, recovery: str
) -> None:
    """Buffers differ between ranks; every save of a job without faults is there."""
    with job_of(directory := tmp_path / "job", etcd_endpoint, run_id, "12", "12", recovery=recovery) as job:
        job.start(nodes)
        assert set(job.exit_codes().values()) == {0}, job.describe()
        names = check_rank0s(directory, directory / "checkpoints" / "all", nodes)
        assert len(names) == 12 // SAVE_EVERY
        shared, helped = said(job, SHARED), said(job, HELPED)
    assert {each["checkpoint"] for each in shared} == set(names)
    assert not any(each["late"] for each in shared)
    together = [each for each in shared if each["own"] and each["helped"]]
    assert together, shared
    for each in together:
        assert each["helped"] == sum(one["files"] for one in helped if one["checkpoint"] == each["checkpoint"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_a_helper_that_is_killed_in_the_middle_of_a_file_costs_nothing(
    tmp_path: Path, etcd_endpoint: str, run_id: str, recovery: str
) -> None:
    """In place rank 0 writes that file itself, while the job trains on. Else an agent commits its node's copy."""
    with job_of(directory := tmp_path / "job", etcd_endpoint, run_id, "12", "4", recovery=recovery) as job:
        job.start(2)

        def helping() -> list[int]:
            saving = {int(path.name.split("-")[3]) for path in directory.glob("held-4-0-*[0-9]")}
            workers = [worker for node in job.nodes if (worker := node.worker()) is not None]
            return [each.pid for each in workers if saving and each.pid not in saving and writes(each.pid)]

        (helper,) = job.wait_for(helping, "nobody helps")
        os.kill(helper, signal.SIGKILL)
        assert set(job.exit_codes().values()) == {0}, job.describe()
        rescued = frozenset(each["checkpoint"] for each in said(job, RESCUED))
        names = check_rank0s(directory, directory / "checkpoints" / "all", 2, rescued)
        late = [each["checkpoint"] for each in said(job, LATE)]
    assert len(names) == 12 // SAVE_EVERY
    if recovery == "in_place":
        assert not rescued
        assert late == [names[-1]]
        job.check_lossless()
    else:
        assert min(line.step for line in job.lines() if line.event is LineKind.OPENED and line.round > 1) >= SAVE_EVERY


@pytest.mark.timeout(300)
def test_a_save_that_has_begun_when_a_peer_dies_is_not_made_again(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """Rank 0 waits with the third save until the first is stored, and then for its peer, which is gone."""
    with job_of(directory := tmp_path / "job", etcd_endpoint, run_id, "12", "stalled", recovery="in_place") as job:
        job.start(2)

        def both() -> list[Path]:
            saving = sorted(directory.glob("held-12-*[0-9]"))
            return saving if len(saving) == 2 else []

        (_, peer) = job.wait_for(both, "the third save does not begin")
        os.kill(int(peer.name.split("-")[3]), signal.SIGKILL)
        (directory / "released").touch()
        assert set(job.exit_codes().values()) == {0}, job.describe()
        (died,) = said(job, "worker.died")
        assert died["reason"] == "worker 0 (rank 1) was killed by SIGKILL"
        assert len(check_rank0s(directory, directory / "checkpoints" / "all", 2)) == 12 // SAVE_EVERY
        job.check_lossless()


def writes(pid: int) -> bool:
    """Whether the process has a file of tensors of an unfinished checkpoint open."""
    try:
        opened = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        return False
    return any("/tmp-" in path and "tensors" in path for path in opened)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("writers", ["own", "rank0"])
def test_where_nobody_can_or_is_to_help_rank_0_writes_alone(
    tmp_path: Path, etcd_endpoint: str, run_id: str, writers: str
) -> None:
    """Nodes with directories of their own wait for no help; with ``rank0`` no other rank even copies the state."""
    with job_of(directory := tmp_path / "job", etcd_endpoint, run_id, "8", "100", writers) as job:
        job.start(2)
        assert set(job.exit_codes().values()) == {0}, job.describe()
        shared = [each for each in said(job, SHARED) if each.get("rank") == 0]  # agents commit what others hold
        node = {each["node"] for each in shared}.pop() if writers == "own" else "all"
        assert len(check_rank0s(directory, directory / "checkpoints" / node, 2)) == 8 // SAVE_EVERY
        assert len(shared) == (8 // SAVE_EVERY if writers == "own" else 0)
        assert said(job, HELPED) == []
    assert not any(each["helped"] or each["late"] for each in shared)
