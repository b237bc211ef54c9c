"""All workers of a job are killed at once between two saves: their agents have kept their newest state."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.local.ledger import LineKind
from tests.drills.endings.job import LASTING, Job
from tests.integration.training.launch import ran

SCRIPT = Path(__file__).with_name("soaked.py")
STEPS, PAUSE_S, SAVED_AT = 300, 0.02, 20
KILLED_AT = (100, 200)
MOST_AGAIN = 60
"""More steps than fit into four intervals between snapshots, on a machine of any speed: each takes ``PAUSE_S``."""


def kill_all_at(step: int, job: Job, manager: CheckpointManager) -> None:
    """SIGKILL every worker of every node at once; return when what they had in memory is committed."""
    job.wait_for(lambda: job.newest() >= step, "the job stands still")
    pids = [worker.pid for node in job.nodes if (worker := node.worker()) is not None]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    least = max(job.newest() - MOST_AGAIN, SAVED_AT + 1)
    job.wait_for(lambda: manager.entries()[0].step >= least, "nobody commits what is in memory")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_a_job_whose_workers_all_die_loses_one_snapshot_interval(
    tmp_path: Path, etcd_endpoint: str, run_id: str, recovery: str
) -> None:
    """Twice: the job resumes from memory, not from storage; the state is committed without its workers; and in the end
    the parameters have the bits of a run without any of it."""
    assert ran([str(SCRIPT), str(alone := tmp_path / "alone"), str(STEPS)]).code == 0
    directory = tmp_path / "job"
    directory.mkdir()
    entry = [str(SCRIPT), str(directory), str(STEPS), str(PAUSE_S), str(SAVED_AT)]
    with Job(directory, etcd_endpoint, run_id, entry=entry, most=2, options=LASTING | {"recovery": recovery}) as job:
        job.start(2)
        manager = CheckpointManager(directory / "checkpoints")
        for step in KILLED_AT:
            kill_all_at(step, job, manager)
        assert job.exit_codes() == {"n0": 0, "n1": 0}, job.describe()
        logs = "".join(job.log(node.name) for node in job.nodes)
        assert logs.count('"snapshot.rescued"') >= len(KILLED_AT)
        # Where the kill came between the snapshots of two nodes, the newer one is read as it was rescued.
        loaded, rescued = (
            re.findall(rf'"checkpoint": "([^"]+)"[^\n]*"{event}"', logs)
            for event in ("checkpoint.loaded", "snapshot.rescued")
        )
        assert logs.count('"snapshot.loaded"') + len(loaded) == len(KILLED_AT), job.describe()
        assert set(loaded) <= set(rescued), job.describe()
        opened = [line.step for line in job.lines() if line.event is LineKind.OPENED and line.step]
        assert len(opened) == 2 * len(KILLED_AT)
        assert min(opened) > KILLED_AT[0] - MOST_AGAIN, opened
    digests = {path.read_text() for path in directory.glob("digest-*")}
    assert digests == {(alone / "digest-0").read_text()}
