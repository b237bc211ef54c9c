"""What operators ask of a run that trains: stop, drain, pause, resume and restart; no step is lost or made twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.cli.main import main
from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.membership.documents import RoundState
from tests.drills.endings.job import LASTING, Job

pytestmark = pytest.mark.timeout(300)


def ask(job: Job, endpoint: str, verb: str, *more: str) -> None:
    """Carried out within a minute, as the command says."""
    assert main([verb, job.spec.run, "--endpoint", endpoint, "--timeout", "60", *more]) == 0


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_a_run_is_paused_restarted_and_stopped_and_loses_nothing(
    tmp_path: Path, etcd_endpoint: str, run_id: str, recovery: str
) -> None:
    options = {**LASTING, "recovery": recovery}
    with Job(tmp_path, etcd_endpoint, run_id, most=2, options=options) as job:
        nodes = job.start(2)
        job.await_world("n0", "n1")
        ask(job, etcd_endpoint, "pause")
        at = job.newest()
        before = [each.worker() for each in nodes]
        assert job.newest() == at, "a paused run made a step"
        ask(job, etcd_endpoint, "resume")
        job.await_steps(5)
        assert [each.worker() for each in nodes] == before

        ask(job, etcd_endpoint, "restart")
        job.await_steps(5)
        after = [each.worker() for each in nodes]
        assert not set(after) & set(before)

        ask(job, etcd_endpoint, "stop")
        assert job.exit_codes() == {"n0": EXIT_LEFT, "n1": EXIT_LEFT}
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
        assert "no node 'n9' (one of: n0)" in capsys.readouterr().err
