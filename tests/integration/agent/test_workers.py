"""Workers of a plain script are killed: torchrun with this backend brings the job back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.plainjob import PlainJob


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
