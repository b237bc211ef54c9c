"""What operators ask of a run that trains: stop, drain, pause, resume and restart; no step is lost or made twice."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from elastic_trainer.cli.main import main
from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.local.cluster import Node
from elastic_trainer.membership.documents import RoundState
from tests.drills.endings.job import LASTING, Job

pytestmark = pytest.mark.timeout(300)


def ask(job: Job, endpoint: str, verb: str, *more: str) -> None:
    """Carried out within a minute, as the command says."""
    assert main([verb, job.spec.run, "--endpoint", endpoint, "--timeout", "60", *more]) == 0


def waits(job: Job) -> bool:
    """Whether no step is made in a second."""
    at = job.newest()
    time.sleep(1.0)
    return job.newest() == at


def workers(nodes: list[Node]) -> set[psutil.Process | None]:
    """Both of each node."""
    return {node.worker(number) for node in nodes for number in range(2)}


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_a_run_is_paused_restarted_and_stopped_and_loses_nothing(
    tmp_path: Path, etcd_endpoint: str, run_id: str, recovery: str
) -> None:
    """Restarted while it is paused, it waits again, a second later; each node has two workers."""
    options = {**LASTING, "recovery": recovery}
    with Job(tmp_path, etcd_endpoint, run_id, most=2, options=options, workers=2) as job:
        nodes = job.start(2)
        job.wait_for(lambda: job.newest() > 5, "the job does not train")
        ask(job, etcd_endpoint, "pause")
        assert waits(job)
        before = workers(nodes)
        ask(job, etcd_endpoint, "restart")
        after = workers(nodes)
        assert not after & before
        job.wait_for(lambda: main(["pause", run_id, "--endpoint", etcd_endpoint, "--timeout", "5"]) == 0, "no pause")
        assert waits(job)
        ask(job, etcd_endpoint, "resume")
        job.await_steps(5)
        assert workers(nodes) == after
        assert "worker.died" not in job.log("n0") + job.log("n1")

        ask(job, etcd_endpoint, "stop")
        assert job.exit_codes() == {"n0": EXIT_LEFT, "n1": EXIT_LEFT}
        job.check_lossless()


def test_who_dies_while_all_are_paused_is_replaced_and_the_run_waits_again(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    with Job(tmp_path, etcd_endpoint, run_id, most=2, options=LASTING) as job:
        first, second = job.start(2)
        job.await_world("n0", "n1")
        ask(job, etcd_endpoint, "pause")
        assert waits(job)
        survivor = first.worker()
        assert second.kill_worker() is not None
        job.wait_for(lambda: job.document().number > 1, "no other round forms")
        ask(job, etcd_endpoint, "pause")
        assert waits(job)
        ask(job, etcd_endpoint, "resume")
        job.await_steps(5)
        assert first.worker() == survivor
        job.check_lossless()


def test_a_node_is_drained_and_one_nodes_workers_restarted(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """In place: the others keep their processes."""
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=3, options=LASTING) as job:
        job.start(3)
        after = job.await_world("n0", "n1", "n2")
        others = [job.node(name).worker() for name in ("n0", "n2")]
        worker = job.node("n1").worker()
        ask(job, etcd_endpoint, "restart", "--node", "n1")
        after = job.await_world("n0", "n1", "n2", after=after)
        assert job.node("n1").worker() != worker
        assert [job.node(name).worker() for name in ("n0", "n2")] == others
        assert not [line for line in job.log("n1").splitlines() if "worker.died" in line]
        ask(job, etcd_endpoint, "drain", "--node", "n1")
        assert job.exit_code(job.node("n1")) == EXIT_LEFT
        job.await_world("n0", "n2", after=after)
        assert [job.node(name).worker() for name in ("n0", "n2")] == others
        job.check_lossless()


def test_a_node_leaves_that_waits_for_others_since_one_has_left(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """In place: no round will come in which it could leave by plan. It is not killed, and nothing counts as lost."""
    with Job(tmp_path, etcd_endpoint, run_id, most=2, options=LASTING) as job:
        nodes = job.start(2)
        job.await_world("n0", "n1")
        nodes[0].terminate()
        job.wait_for(lambda: job.document().state is RoundState.DRAINING, "the first does not leave")
        assert job.exit_code(nodes[0]) == EXIT_LEFT
        nodes[1].terminate()
        assert job.exit_code(nodes[1]) == EXIT_LEFT
        assert "worker.lost" not in job.log("n1")
        assert all(entry.state is not RoundState.BROKEN for entry in job.journal())
        job.check_lossless()


def test_who_asks_the_wrong_thing_gets_one_sentence(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", run_id, "--node", "n9", "--endpoint", etcd_endpoint]) == 78
    assert "no run" in capsys.readouterr().err
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=1, options=LASTING) as job:
        job.start(1)
        job.await_world("n0")
        assert main(["drain", run_id, "--node", "n9", "--endpoint", etcd_endpoint]) == 78
        assert "no node 'n9' (its nodes: n0)" in capsys.readouterr().err
