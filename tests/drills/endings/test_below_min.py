"""Too few nodes are left: the state is made durable at once, kept in memory, and given up only after a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.membership.documents import NodeState
from tests.drills.endings.job import Job

SOON_S = 60.0
"""A few seconds, on a loaded machine."""


@pytest.mark.timeout(300)
def test_survivors_keep_their_state_until_another_node_comes(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """One of two nodes is lost, two are needed: what the other has in memory is a checkpoint soon. Its process waits;
    the node that comes later gets the state from it, and no committed step is made again."""
    with Job(tmp_path, etcd_endpoint, run_id, most=2) as job:
        job.start(2)
        first = job.await_world("n0", "n1", count=10)
        worker = job.node("n0").worker()
        assert worker is not None
        job.node("n1").kill()
        job.wait_for(lambda: any((tmp_path / "checkpoints").glob("step-*")), "nothing was saved", SOON_S)
        stood = job.newest()
        assert job.saved_step() == stood
        job.add()
        job.await_world("n0", "n2", after=first)
        assert job.newest() > stood
        survivor = job.node("n0").worker()
        assert survivor is not None
        assert survivor.pid == worker.pid
        assert job.finish() == {"n0": 0, "n1": -9, "n2": 0}
        job.check_lossless()


@pytest.mark.timeout(300)
def test_the_last_node_hands_over_through_storage(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """The only node of a job is told to go while a spare stands ready: nobody stays who holds the state in memory, so
    it is saved first, and the spare goes on behind it."""
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=1) as job:
        job.start(1)
        first = job.await_world("n0", count=10)
        job.add()
        job.wait_for(lambda: job.shows("n1", NodeState.READY), "the spare does not get ready")
        job.node("n0").terminate()
        assert job.exit_code(job.node("n0")) == 143
        job.await_world("n1", after=first)
        assert job.steps("n1")[0].step == job.steps("n0")[-1].step + 1
        assert job.finish() == {"n0": 143, "n1": 0}
        job.check_lossless()
