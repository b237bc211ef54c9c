"""Workers of a plain script are killed: torchrun with this backend brings the job back."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.membership.documents import RoundState, RunResult
from tests.support.plainjob import PlainJob


@pytest.mark.timeout(300)
def test_five_killed_workers_in_a_row_and_an_end_in_success(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Each time all three nodes go on with their old ranks, rank 0's worker included; no node is lost. The finished
    run is closed, and a node that comes late has nothing to do: exit status 0."""
    with PlainJob(tmp_path, etcd_endpoint, run_id) as job:
        job.start(3)
        order = job.await_order()
        round_ = job.await_world(*order)
        for victim in (order[1], order[0], order[2], order[0], order[1]):
            assert job.node(victim).kill_worker() is not None
            round_ = job.await_world(*order, after=round_)
        assert round_ == 6
        reasons = [entry.reason for entry in job.journal() if entry.state is RoundState.BROKEN]
        assert len(reasons) == 5
        assert all("its workers failed" in reason for reason in reasons), reasons
        assert job.finish() == {"n0": 0, "n1": 0, "n2": 0}
        assert (job.document().state, job.document().result) == (RoundState.CLOSED, RunResult.SUCCEEDED)
        late = job.add()
        assert job.exit_code(late) == 0
        assert job.last(late.name) is None
        assert "Traceback" not in job.log(late.name)


@pytest.mark.timeout(200)
def test_a_crash_takes_its_siblings_along_on_unequal_nodes(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Two workers on one node, one on the other: ranks are contiguous by node, and after one of the two was killed
    all three processes are new ones with the same ranks."""
    with PlainJob(tmp_path, etcd_endpoint, run_id, least=2, most=2) as job:
        job.add_with(workers=2)
        job.add()
        job.await_steps("n0", 3, local_rank=1)
        job.await_steps("n1", 3)
        before = [job.last("n0", 0), job.last("n0", 1), job.last("n1", 0)]
        assert job.node("n0").kill_worker(1) is not None
        job.await_round("n0", "n1", after=1)
        job.await_steps("n0", 3, local_rank=1)
        after = [job.last("n0", 0), job.last("n0", 1), job.last("n1", 0)]
        for old, new in zip(before, after, strict=True):
            assert old is not None
            assert new is not None
            assert (new.rank, new.world, new.round) == (old.rank, 3, 2)
            assert new.pid != old.pid
        assert job.finish() == {"n0": 0, "n1": 0}
