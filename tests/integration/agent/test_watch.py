"""A script that knows nothing of this project, started by ``python -m elastic_trainer.watch``."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import NodeHealth
from tests.support.plainjob import LIMIT_S, SCRIPT, PlainJob


def health(job: PlainJob, node: str) -> NodeHealth | None:
    found = job.store.get(job.keys.node_health(node), Deadline.after(LIMIT_S)).first
    return NodeHealth.decode(found.value, found.key) if found is not None else None


@pytest.mark.timeout(300)
def test_its_steps_are_seen_and_a_worker_that_hangs_is_ended(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """All nodes see ranks and steps; after the restart they step together, and the record says who hung and why."""
    entry = ["-m", "elastic_trainer.watch", str(SCRIPT), str(tmp_path), "--optimizer"]
    options = {"step_timeout": "5", "first_step_timeout": "60"}
    with PlainJob(tmp_path, etcd_endpoint, run_id, least=2, most=2, entry=entry, options=options) as job:
        job.start(2)
        first, second = order = job.await_order()
        begun = job.await_world(*order)

        def seen() -> bool:
            found = health(job, second)
            return found is not None and [(each.rank, each.step > 0) for each in found.ranks] == [(1, True)]

        job.wait_for(seen, "no steps are seen")
        worker = job.last(second)
        (tmp_path / f"hang-{second}").touch()
        job.await_world(first, second, after=begun)
        after = job.last(second)
        assert worker is not None
        assert after is not None
        assert after.pid != worker.pid
        (broken,) = [each for each in job.journal() if each.round == begun and each.reason.startswith("node")]
        assert "it has made no progress for" in broken.reason
        assert set(job.finish().values()) == {0}
