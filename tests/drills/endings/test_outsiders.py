"""Nobody but its owner ends a training: not the children of its script, not whoever connects to its ports."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.local import processes
from elastic_trainer.local.etcd import EtcdServer
from tests.drills.endings.job import LASTING, LIMIT_S, Job
from tests.support.crowd import crowding

SCRIPT = Path(__file__).with_name("forking.py")
LISTENING = """
import json, psutil, sys
found = psutil.Process(int(sys.argv[1])).net_connections()
print(json.dumps([each.laddr for each in found if each.status == psutil.CONN_LISTEN]))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer) -> Iterator[Job]:
    """Two nodes that train together, and in the end have used each sample once, in their first round."""
    directory = tmp_path_factory.mktemp("outsiders")
    entry = [str(SCRIPT), str(directory)]
    with Job(directory, etcd.endpoint, "outsiders", entry=entry, max_nodes=2, options=LASTING) as job:
        job.start(2)
        job.await_world("n0", "n1")
        workers = [worker_of(job, node.name).pid for node in job.nodes]
        yield job
        job.await_steps(3)
        assert [worker_of(job, node.name).pid for node in job.nodes] == workers
        assert job.finish() == {"n0": 0, "n1": 0}, job.describe()
        assert {line.round for line in job.lines() if line.round} == {1}
        job.check_lossless()


def worker_of(job: Job, name: str) -> psutil.Process:
    worker = job.node(name).worker()
    assert worker is not None, job.describe()
    return worker


def test_children_of_the_script_have_nothing_of_its_session(job: Job) -> None:
    """They get signals as in any program, and end as they would; their parents train on with each other."""
    for node in job.nodes:
        path = job.spec.directory / f"children.{node.name}"
        job.wait_for(path.exists, f"{node.name} is not through")
        assert json.loads(path.read_text()) == {
            "pool": [1, 2, 3],
            "terminated": [-15, -15],
            "inherited": {"sockets": 0, "wakeup": -1, "default": True, "blocked": 0, "status": 0},
            "grandchild": [15],
            "loader": 28,
            "program": -15,
            "leaves": 7,
            "fails": 1,
        }
        assert "evicted" not in job.log(node.name)
        assert "a child's mistake" in job.log(node.name)


def test_whoever_connects_to_master_port_ends_nothing(job: Job) -> None:
    """One that says what a client of torch's store says, and a flood of those that say nothing."""
    for node in job.nodes:
        trap = ("127.0.0.1", int(processes.environment(worker_of(job, node.name))["MASTER_PORT"]))
        with ExitStack() as stack:
            with job.near(node.name):
                for _ in range(200):
                    stranger = stack.enter_context(socket.socket())
                    stranger.setblocking(False)
                    stranger.connect_ex(trap)
                first = stack.enter_context(socket.create_connection(trap, 30.0))
            first.sendall(b"\x00\xce\x72\x5f\x3c")
            job.wait_for(lambda: "connection.refused" in job.log(node.name), "nobody looks at the connections")  # noqa: B023
            job.await_steps(5)
        assert job.log(node.name).count("connection.refused") == 1


def test_a_node_opens_its_ports_at_the_address_that_it_announces_alone(job: Job) -> None:
    """Liveness, the store of rounds, metrics: none can be reached by another address of the machine, and the trap by
    its own processes alone."""
    for node in job.nodes:
        record = job.record(node.name)
        assert record is not None
        inside = job.hosts[node.name].command if job.hosts else []
        looked = [*inside, sys.executable, "-c", LISTENING, str(node.pid)]
        opened = [tuple(each) for each in json.loads(subprocess.check_output(looked))]
        assert {record.store_port, record.probe_port} < {port for _, port in opened}
        assert {address for address, _ in opened} - {"127.0.0.1"} == {record.address} - {"127.0.0.1"}


@pytest.mark.parametrize("count", [70, 200])
def test_slow_connections_do_not_keep_a_kubelet_from_asking(job: Job, count: int) -> None:
    """They fill the port of a node that trains: each probe finds it healthy, within the time that a kubelet gives."""
    found = job.store.get(job.keys.node_health("n0"), Deadline.after(LIMIT_S)).first
    assert found is not None
    url = json.loads(found.value)["metrics"]
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    with job.near("n0"), crowding(parts.port, count, parts.hostname):
        for _ in range(40):
            with urllib.request.urlopen(f"{url}/healthz", timeout=10.0) as answer:
                assert answer.status == 200
    job.await_steps(3)
