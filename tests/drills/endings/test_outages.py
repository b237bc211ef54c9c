"""What training must not even notice: etcd frozen, restarted member by member, cut off; an agent that stands still."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import EXIT_FAILURE
from elastic_trainer.local.etcd import EtcdCluster, EtcdServer
from elastic_trainer.local.hosts import reachable
from elastic_trainer.membership.documents import NodeState, RoundState
from elastic_trainer.store.api import Put
from tests.drills.endings.job import LIMIT_S, QUICK, Job
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
        own_etcd.pause()
        pause(1.5 * TTL_S)
        job.await_steps(20)
        own_etcd.resume()
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
def test_an_agent_that_stands_still_comes_back(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """One torchrun is frozen past its lease, its worker is not: the other goes on alone. Thawed, the node joins again
    by a planned change, its worker still the same process."""
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=2) as job:
        job.start(2)
        first = job.await_world("n0", "n1")
        pids = _workers(job)
        os.kill(job.node("n1").pid, signal.SIGSTOP)
        alone = job.await_world("n0", after=first)
        job.await_steps(20)
        os.kill(job.node("n1").pid, signal.SIGCONT)
        job.await_world("n0", "n1", after=alone)
        assert _workers(job) == pids
        assert [entry.state for entry in job.journal()].count(RoundState.BROKEN) == 1
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


@pytest.mark.timeout(300)
def test_all_members_of_etcd_restart_one_after_the_other(tmp_path: Path, etcd_binary: str, run_id: str) -> None:
    """A rolling upgrade of a three-member etcd, its first member down from the beginning of the job: no step is lost,
    no round broken, no worker restarted."""
    with EtcdCluster(3, directory=tmp_path / "etcd") as etcd:
        endpoint = etcd.endpoint
        etcd.kill(0)
        with Job(tmp_path / "job", endpoint, run_id, most=2, options={"ttl": "5"}) as job:
            job.start(2)
            job.await_world("n0", "n1")
            pids = _workers(job)
            for index in range(3):
                etcd.restart(index)
                job.await_steps(15)
            assert _workers(job) == pids
            assert [entry.state for entry in job.journal()] == [RoundState.ACTIVE]
            assert job.finish() == {"n0": 0, "n1": 0}
            job.check_lossless()


def _workers(job: Job) -> list[int]:
    """The process ids of all nodes' workers."""
    found = [node.worker() for node in job.nodes]
    return [worker.pid for worker in found if worker is not None]
