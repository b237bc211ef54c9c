"""The local cluster: its nodes can be killed, frozen and stopped, and are complete processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster, Node
from elastic_trainer.variables import ENV_LEDGER_DIR

pytestmark = pytest.mark.timeout(180)

WORKERS = 2

SCRIPT = """
import subprocess, sys, threading
helper = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"], start_new_session=True)
print("helper", helper.pid, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """One node on torchrun's own backend; its two workers wait for ever, each with a helper in a session of its own."""
    script = tmp_path / "wait.py"
    script.write_text(SCRIPT)
    spec = ClusterSpec(
        run="cluster-test",
        directory=tmp_path / "run",
        endpoint="127.0.0.1:0",
        entry=(str(script),),
        min_nodes=1,
        max_nodes=1,
        workers=WORKERS,
        backend="c10d",
    )
    with LocalCluster(spec) as cluster:
        yield cluster


def await_family(node: Node, size: int) -> list[psutil.Process]:
    """The node's processes once there are ``size`` of them, and each worker has its helper.

    A helper that is not a program of its own yet is one more process, and its worker waits for it in the kernel."""
    deadline = Deadline.after(90.0)
    while len(family := node.family()) < size or node.log.read_text().count("helper") < WORKERS:
        assert node.running, node.log.read_text()
        assert not deadline.expired, node.log.read_text()
        pause(0.05)
    return family


def test_a_worker_orphaned_by_its_torchrun_is_found_at_the_stop(cluster: LocalCluster) -> None:
    (node,) = cluster.start(1)
    await_family(node, 5)
    psutil.Process(node.pid).kill()
    node.wait(Deadline.after(10.0))
    assert len(processes.marked(cluster.ledger_marks)) >= 4
    cluster.stop()
    assert processes.marked(cluster.ledger_marks) == []


def test_a_node_outlives_the_thread_that_asked_for_it(cluster: LocalCluster) -> None:
    """The kernel ties the signal to a thread; a drill may start nodes from one of its own."""
    thread = threading.Thread(target=cluster.add)
    thread.start()
    thread.join()
    (node,) = cluster.nodes
    await_family(node, 5)
    assert node.running


def test_nothing_starts_for_a_parent_that_is_gone() -> None:
    """The signal would never come, so the command is not run."""
    program = [sys.executable, "-c", "print('ran')"]
    command = [sys.executable, "-m", "elastic_trainer.local.parent_death", "1", "0", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (75, "")


def test_the_environment_finds_its_processes(tmp_path: Path) -> None:
    """By all marks together, never this process itself."""
    marks = {ENV_LEDGER_DIR: str(tmp_path), "OTHER": "x"}
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=marks)
    try:
        assert [each.pid for each in processes.marked(marks)] == [child.pid]
        assert processes.marked({**marks, "OTHER": "y"}) == []
    finally:
        processes.kill_all(processes.tree(child.pid), marks, Deadline.after(10.0))
        child.communicate()
    assert child.returncode == -9


def test_a_process_is_found_as_soon_as_it_was_started(tmp_path: Path) -> None:
    """Until the kernel has built its new image its environment reads empty."""
    marks = {ENV_LEDGER_DIR: str(tmp_path)}
    for _ in range(50):
        with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env=marks) as child:
            assert processes.environment(psutil.Process(child.pid)) == marks
            child.kill()


def test_a_process_whose_first_thread_has_ended_is_alive_until_all_have() -> None:
    """The kernel calls it a zombie from the first on; it still holds its memory and sockets."""
    code = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        process, deadline = psutil.Process(child.pid), Deadline.after(30.0)
        while process.status() != psutil.STATUS_ZOMBIE and not deadline.expired:
            pause(0.01)
        assert process.status() == psutil.STATUS_ZOMBIE
        assert processes.alive(process)
        child.kill()
        assert processes.wait_gone([process], Deadline.after(10.0)) == []
        assert child.poll() == -9
    finally:
        child.kill()
        child.communicate()
