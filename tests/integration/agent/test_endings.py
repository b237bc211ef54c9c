"""How nodes and runs end: for good, in failure, reopened, refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import EXIT_CONFIG, EXIT_LEFT
from elastic_trainer.membership.documents import NodeState, RoundState, RunResult
from tests.support.plainjob import LIMIT_S, PlainJob
from tests.support.waiting import eventually


@pytest.mark.timeout(200)
def test_a_node_that_fails_for_good_leaves_and_a_node_that_disagrees_is_refused(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """A node with no restarts left ends with status 1; the others are at least min and go on. One that was started
    with other limits gets one sentence and status 78, and disturbs nobody."""
    with PlainJob(tmp_path, etcd_endpoint, run_id, flags=["--alone"]) as job:
        job.start(2)
        job.add_with(max_restarts=0)
        order = job.await_order()
        first = job.await_world(*order)
        job.tell("fail-n2")
        assert job.exit_code(job.node("n2")) == 1
        others = [name for name in order if name != "n2"]
        second = job.await_world(*others, after=first)
        assert not job.present("n2")

        stranger = job.add_with(max_nodes=4)
        assert job.exit_code(stranger) == 78
        sentence = "elastic-trainer: this node disagrees with the run: max nodes 4 here, 3 in the run (start all nodes"
        assert sentence in job.log(stranger.name)
        assert "Traceback" not in job.log(stranger.name)
        another = job.add_with(entry=[*job.spec.entry, "--another"])
        assert job.exit_code(another) == 78
        said = f"elastic-trainer: run {run_id!r} is another job's: other arguments of the script (give this job a name"
        assert said in job.log(another.name)
        assert job.document().number == second
        job.tell("stop")
        assert [job.exit_code(job.node(name)) for name in others] == [0, 0]


@pytest.mark.timeout(200)
def test_a_run_that_failed_is_closed_until_it_is_reopened(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """One node finishes, the one of rank 0 fails for good: the run has failed. Whoever comes later is told so, with
    the way back in, and exits with 1. Reopened, it goes on with the next round number and ends in success."""
    with PlainJob(tmp_path, etcd_endpoint, run_id, most=2, flags=["--alone"], max_restarts=0) as job:
        job.start(2)
        order = job.await_order()
        job.await_world(*order)
        job.tell(f"finish-{order[1]}")
        job.await_state(order[1], NodeState.DONE)
        job.tell(f"fail-{order[0]}")
        assert job.exit_code(job.node(order[0])) == 1
        assert job.exit_code(job.node(order[1])) in (0, 1)
        closed = job.document()
        assert (closed.state, closed.result) == (RoundState.CLOSED, RunResult.FAILED)

        late = job.add()
        assert job.exit_code(late) == 1
        assert "elastic-trainer: the run has failed" in job.log(late.name)
        assert "reopen=true" in job.log(late.name)
        assert "Traceback" not in job.log(late.name)

        options = {**job.spec.options, "reopen": "true"}
        again = [job.add_with(options=options).name for _ in range(2)]
        job.await_round(*again, after=closed.number)
        opened = job.document()
        assert (opened.number, opened.epoch) == (closed.number + 1, closed.epoch + 1)
        job.tell("stop")
        assert [job.exit_code(job.node(name)) for name in again] == [0, 0]
        assert job.document().result is RunResult.SUCCEEDED


BACK_OFF_S = 60.0
WRONG = f"import sys; print('epochs is wrong', file=sys.stderr); sys.exit({EXIT_CONFIG})"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("recovery", "restarts"), [("restart", 100), ("in_place", 100), ("restart", 0)])
def test_a_worker_whose_configuration_is_wrong_ends_its_node_at_once(
    tmp_path: Path, etcd_endpoint: str, run_id: str, recovery: str, restarts: int
) -> None:
    """With 78, which job controllers do not try again, and without a second try of its own."""
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    options = {"recovery": recovery, "last_call": "0"}
    with PlainJob(
        tmp_path / "job", etcd_endpoint, run_id, least=1, options=options, max_restarts=restarts, entry=[str(script)]
    ) as job:
        node = job.add()
        assert job.exit_code(node) == EXIT_CONFIG, job.describe()
        assert job.log(node.name).count("epochs is wrong") == 1
        assert not job.present(node.name)


@pytest.mark.timeout(300)
def test_a_node_that_fails_for_good_does_not_stay_for_its_back_off(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """In place a node whose workers get nowhere keeps away longer each time, in the end for a minute. When torchrun
    gives up, the process ends, and none of its threads holds it."""
    script = tmp_path / "crash.py"
    script.write_text("import os, sys; sys.exit(5 + int(os.environ['TORCHELASTIC_RESTART_COUNT']) % 2)")  # unlike
    options = {"recovery": "in_place"}
    with PlainJob(
        tmp_path / "job", etcd_endpoint, run_id, least=1, options=options, max_restarts=9, entry=[str(script)]
    ) as job:
        node = job.add()
        job.wait_for(lambda: "exitcode  : 6" in job.log(node.name), "torchrun does not give up")
        assert node.wait(Deadline.after(BACK_OFF_S / 2)) == 1, job.describe()


FAREWELL_FAILS = """\
from torch.distributed.run import main
from elastic_trainer.membership.member import Member
def leave(member, departure=None):
    raise RuntimeError("can't create new thread at interpreter shutdown")
Member.leave = leave
main()
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("code", [EXIT_LEFT, EXIT_CONFIG])
def test_the_exit_code_stands_whatever_the_farewell_does(
    code: int, tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """A farewell that cannot be sent, as on Python 3.12.0 to 3.12.2, does not change what a job controller does: 143
    after a SIGTERM, 78 for a worker with a wrong configuration and no restart left."""
    script, begun, log = tmp_path / "script.py", tmp_path / "begun", tmp_path / "log"
    wait = "time.sleep(300)" if code == EXIT_LEFT else f"sys.exit({code})"
    script.write_text(f"import pathlib, sys, time\npathlib.Path({str(begun)!r}).touch()\n{wait}\n")
    command = ["-c", FAREWELL_FAILS, "--nnodes=1", f"--rdzv-id={run_id}", "--rdzv-backend=etcd3"]
    command += [f"--rdzv-endpoint={etcd_endpoint}", str(script)]
    with log.open("w") as output, subprocess.Popen([sys.executable, *command], stdout=output, stderr=output) as node:
        try:
            eventually(begun.exists, "the worker does not start", LIMIT_S)
            if code == EXIT_LEFT:
                node.terminate()
            assert node.wait(LIMIT_S) == code, log.read_text()
        finally:
            node.kill()
    assert "departure.failed" in log.read_text()
