"""etcd goes away and comes back under a running job, and before one."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.local.etcd import EtcdServer
from tests.support.plainjob import BRIEF, PlainJob, Step


@pytest.mark.timeout(300)
def test_an_outage_costs_nothing_and_a_failure_within_one_waits_for_its_end(
    tmp_path: Path, own_etcd: EtcdServer, run_id: str
) -> None:
    """etcd is killed for longer than the lease lasts: the same processes step on in the same round, during the outage
    and after it. A worker that is killed while etcd is down brings its node back when etcd is."""
    with PlainJob(tmp_path / "job", own_etcd.endpoint, run_id, most=2, options=BRIEF) as job:
        job.start(2)
        order = job.await_order()
        round_ = job.await_world(*order)
        before = _processes(job, order)

        own_etcd.kill()
        down_at = SYSTEM.monotonic()
        for name in order:
            job.await_steps(name, 50)
        while SYSTEM.monotonic() < down_at + float(BRIEF["ttl"]) + 2.0:
            pause(0.1)
        own_etcd.restart()
        for name in order:
            job.await_steps(name, 100)
        assert _processes(job, order) == before
        assert job.document().number == round_
        assert len(job.journal()) == 1

        own_etcd.kill()
        assert job.node(order[1]).kill_worker() is not None
        pause(2.0)
        assert {node.exit_code() for node in job.nodes} == {None}
        own_etcd.restart()
        job.await_world(*order, after=round_)
        assert job.finish() == {"n0": 0, "n1": 0}


def _processes(job: PlainJob, nodes: list[str]) -> list[tuple[int, int]]:
    last: list[Step | None] = [job.last(name) for name in nodes]
    return [(step.pid, step.round) for step in last if step is not None]
