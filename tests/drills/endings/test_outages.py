"""What training must not even notice: etcd frozen or cut off, an agent that another one replaced."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import EXIT_FAILURE
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.hosts import reachable
from elastic_trainer.membership.documents import NodeState
from elastic_trainer.store.api import Put
from tests.drills.endings.job import LIMIT_S, QUICK, Job
from tests.support.etcd import freeze, thaw
from tests.support.proxy import Proxy

TTL_S = float(QUICK["ttl"])


@pytest.mark.timeout(300)
def test_etcd_frozen_for_longer_than_all_leases(tmp_path: Path, own_etcd: EtcdServer, run_id: str) -> None:
    """All leases end when it thaws. Training goes on through it, no step is lost; and afterwards the nodes still
    master a failure, and the end."""
    with Job(tmp_path, own_etcd.endpoint, run_id, most=2) as job:
        job.start(2)
        first = job.await_world("n0", "n1")
        pids = _workers(job)
        freeze(own_etcd)
        pause(1.5 * TTL_S)
        job.await_steps(20)
        thaw(own_etcd)
        job.await_world("n0", "n1", after=first)
        job.await_steps(20)
        assert _workers(job) == pids
        job.node("n1").kill_worker()
        at = job.newest()
        job.wait_for(lambda: job.newest() > at + 20, "the failure is not mastered")
        assert job.finish() == {"n0": 0, "n1": 0}
        job.check_lossless()


@pytest.mark.timeout(300)
def test_a_node_cut_off_from_etcd_alone_comes_back(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Its lease ends, so the other goes on without it. Mended, it joins again with its process and no step is lost."""
    with Proxy(etcd_endpoint) as proxy, Job(tmp_path, etcd_endpoint, run_id, least=1, most=2) as job:
        job.start(1)
        job.add_with(endpoint=proxy.endpoint)
        first = job.await_world("n0", "n1")
        pids = _workers(job)
        proxy.cut()
        alone = job.await_world("n0", after=first)
        proxy.mend()
        job.await_world("n0", "n1", after=alone)
        assert _workers(job) == pids
        assert job.finish() == {"n0": 0, "n1": 0}
        job.check_lossless(again=1)


@pytest.mark.timeout(300)
def test_a_node_that_was_replaced_while_it_stood_still_ends(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Another live node has its name when it is thawed: it says so and frees its device. The run goes on."""
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=2) as job, socket.create_server((reachable(), 0)) as agent:
        job.start(2)
        first = job.await_world("n0", "n1")
        record = job.record("n1")
        assert record is not None
        os.kill(job.node("n1").pid, signal.SIGSTOP)
        job.await_world("n0", after=first)
        job.wait_for(lambda: job.absent("n1"), "its lease does not end")
        here = {"address": reachable(), "probe_port": agent.getsockname()[1]}
        other = record.model_copy(update={"state": NodeState.WARMING, **here})
        lease = job.store.grant(LIMIT_S, Deadline.after(LIMIT_S)).id
        put = Put(job.keys.node("n1"), other.encode(), lease)
        job.store.transact([], [put], deadline=Deadline.after(LIMIT_S))
        os.kill(job.node("n1").pid, signal.SIGCONT)
        assert job.exit_code(job.node("n1")) == EXIT_FAILURE
        (sentence,) = job.sentences("n1")
        assert "another live node of this run has the id 'n1'" in sentence
        job.await_steps(20)
        assert job.finish() == {"n0": 0, "n1": EXIT_FAILURE}


def _workers(job: Job) -> list[int]:
    found = [node.worker() for node in job.nodes]
    return [worker.pid for worker in found if worker is not None]
