"""Nodes on several hosts that share nothing but a network and a directory: each has its own loopback and name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from elastic_trainer.local import agents
from elastic_trainer.membership.documents import RoundState
from tests.drills.endings.job import LASTING, Job
from tests.support.networks import AnySegment, HostNetwork, OwnName
from tests.support.requirements import here

pytestmark = [pytest.mark.timeout(400), pytest.mark.root]
DEBIAN = HostNetwork(own_name=OwnName.LOOPBACK)
SLOW_TO_FORM = LASTING | {"form_timeout": "3"}


@pytest.fixture
def segment() -> AnySegment:
    """The one that tests run on."""
    return here()


def announced(job: Job) -> dict[str, str]:
    records = {node.name: job.record(node.name) for node in job.nodes}
    return {name: record.address for name, record in records.items() if record is not None}


def complaints(job: Job) -> list[str]:
    """Reasons in the journal that speak of nodes that do not reach each other."""
    return [each.reason for each in job.journal() if "forming" in each.reason or "reach" in each.reason]


@pytest.mark.usefixtures("segment")
def test_a_job_that_starts_on_one_host_grows_onto_another(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """In place, on a network above 127.0.0.0: while it is alone its gloo groups use the loopback, and those of the next
    round do not. No try is in vain."""
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=2, options=LASTING) as job:
        job.add()
        first = job.await_world("n0", count=5)
        job.add()
        job.await_world("n0", "n1", after=first, count=20)
        assert complaints(job) == []
        assert announced(job) == {name: host.address for name, host in job.hosts.items()}
        assert job.finish() == {"n0": 0, "n1": 0}
        job.check_lossless()


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
@pytest.mark.parametrize("spelled", ["localhost", "n0", "address"])
def test_etcd_on_the_head_machine(
    segment: AnySegment, tmp_path: Path, etcd_binary: str, run_id: str, recovery: str, spelled: str
) -> None:
    """Whatever the head calls its etcd, it announces an address that others can use, and the second host trains with
    it. Both hosts have Debian's ``/etc/hosts``."""
    with segment.using(DEBIAN):
        head = segment.attach("n0", [tmp_path], tmp_path / "ledger")
        served = ",".join(f"http://{each}:2379" for each in ("127.0.0.1", "127.0.1.1", head.address))
        flags = [f"--data-dir={tmp_path / 'etcd'}", f"--listen-client-urls={served}", "--unsafe-no-fsync"]
        flags += ["--advertise-client-urls=http://localhost:2379"]
        etcd = agents.spawn([etcd_binary, *flags], tmp_path / "etcd.log", dict(os.environ), head.pid)
        endpoint = {"address": f"{head.address}:2379"}.get(spelled, f"{spelled}:2379")
        with Job(tmp_path, f"{head.address}:2379", run_id, options=LASTING | {"recovery": recovery}) as job:
            job.hosts["n0"] = head
            job.add_with(endpoint=endpoint)
            job.add()
            job.await_world("n0", "n1", count=10)
            assert etcd.poll() is None
            assert announced(job) == {name: host.address for name, host in job.hosts.items()}
            assert job.finish() == {"n0": 0, "n1": 0}
            job.check_lossless()
        etcd.wait(60)  # it has ended with its host


@pytest.mark.parametrize("fault", ["silent", "misled"])
def test_hosts_that_do_not_reach_each_other_do_not_end_the_run(
    segment: AnySegment, tmp_path: Path, etcd_endpoint: str, run_id: str, fault: str
) -> None:
    """Both reach etcd. All packets between them are lost, or the workers of the second publish their loopback
    (``GLOO_SOCKET_IFNAME``), which only they know. The first trains on, with growing pauses between two tries, and the
    sentence names both and where the one looked for the other."""
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=2, options=SLOW_TO_FORM) as job:
        job.add()
        first = job.await_world("n0", count=5)
        job.hosts["n1"] = segment.attach("n1", [tmp_path], tmp_path / "ledger")
        if fault == "silent":
            segment.part("n0", "n1")
            segment.part("n1", "n0")
        job.add_with(environment={"GLOO_SOCKET_IFNAME": "lo"} if fault == "misled" else {})
        job.wait_for(lambda: job.document().left_out == "n1", "n1 is not left out")
        job.await_steps(100)
        reasons = [entry.reason for entry in job.journal()]
        assert RoundState.CLOSED not in [entry.state for entry in job.journal()], reasons
        why = {
            "silent": "which others cannot reach (to check, run 'elastic-trainer doctor --endpoint HOST:2379 --run-id"
            " check --peers 2' on both): ",
            "misled": "as workers of node n1 publish 127.0.0.1, which no other host reaches: GLOO_SOCKET_IFNAME=lo; ",
        }[fault]
        told = [each for each in reasons if each.startswith("node n1 is excluded, ")]
        assert told, reasons
        assert all(each.startswith(f"node n1 is excluded, {why}") for each in told), told
        either = "|".join(re.escape(host.address) for host in job.hosts.values())
        tried = {
            "silent": rf"node (n0|n1) does not answer its peer (n1|n0) at ({either}):\d+ ",
            "misled": rf"node (n0|n1) cannot reach node (n1|n0) at "
            rf"(127\.0\.0\.1, which its worker published|({either}), which)|workers of node n1 publish",
        }[fault]
        assert all(re.search(tried, each) for each in told), told
        assert "node.quarantined" in job.log("n1")
        if fault == "silent":
            segment.reunite("n0", "n1")
            segment.reunite("n1", "n0")
            job.await_world("n0", "n1", after=first, count=10)
            assert job.finish() == {"n0": 0, "n1": 0}
            job.check_lossless()


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("alone", [True, False])
def test_a_node_that_misleads_others_is_left_out_though_it_came_first(
    tmp_path: Path, etcd_endpoint: str, run_id: str, alone: bool
) -> None:
    """Its workers publish their loopback (``GLOO_SOCKET_IFNAME``). It knows so, and the two healthy nodes train; if it
    has trained ``alone`` before, it trains on without them, as its steps would be lost. Either way it is named."""
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=3, options=SLOW_TO_FORM | {"last_call": "10"}) as job:
        job.add_with(environment={"GLOO_SOCKET_IFNAME": "lo"})
        first = job.await_world("n0", count=5) if alone else 0
        job.add()
        job.add()
        said = "as workers of node n0 publish 127.0.0.1, which no other host reaches: GLOO_SOCKET_IFNAME=lo"
        job.wait_for(lambda: any(said in entry.reason for entry in job.journal()), "n0 is not named")
        if alone:
            job.await_world("n0", after=first, count=20)
            job.check_lossless()
        else:
            job.await_world("n1", "n2", count=20)
        reasons = [entry.reason for entry in job.journal()]
        assert RoundState.CLOSED not in [entry.state for entry in job.journal()], reasons
