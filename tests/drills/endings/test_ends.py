"""The end of a run and of its parts: together, late, never needed, or one by one."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import EXIT_CONFIG, EXIT_LEFT
from elastic_trainer.local import processes
from elastic_trainer.membership.documents import Incident, NodeState, RunResult
from tests.drills.endings.job import LASTING, LIMIT_S, Job
from tests.support.metadata import MetadataServer


@pytest.mark.timeout(300)
def test_all_end_together_with_spares_and_latecomers(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Members end at the same step; a spare that was never needed ends with them; who comes later has nothing to do.
    All exit with 0, and the last step is a checkpoint. A start with another command is refused in a sentence."""
    with Job(tmp_path, etcd_endpoint, run_id, most=2, options=LASTING) as job:
        job.start(2)
        job.await_world("n0", "n1")
        job.add()
        job.wait_for(lambda: job.shows("n2", NodeState.READY), "the spare does not get ready")
        assert job.finish() == {"n0": 0, "n1": 0, "n2": 0}
        assert job.steps("n0")[-1].step == job.steps("n1")[-1].step == job.saved_step()
        assert not job.steps("n2")
        assert job.closed().result is RunResult.SUCCEEDED
        late = job.add()
        assert job.exit_code(late) == 0
        assert job.sentences(late.name) == []
        again = job.add_with(entry=[*job.spec.entry, "--slow", "0"])
        assert job.exit_code(again) == EXIT_CONFIG
        (said,) = job.sentences(again.name)
        assert f"run {run_id!r} has finished at 2" in said
        assert "Traceback" not in "".join(job.log(node.name) for node in job.nodes)
        assert not any(job.present(node.name) for node in job.nodes)
        job.check_lossless()


@pytest.mark.timeout(400)
def test_a_training_that_all_ranks_have_passed_has_succeeded(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """After the training rank 0 still exports. Whoever leaves by plan, is lost or fails meanwhile: the run has
    succeeded, events say nothing else, and a replacement has nothing to do."""
    for index, end in enumerate(("leave other", "leave head", "kill head", "fail")):
        with Job(tmp_path / str(index), etcd_endpoint, f"{run_id}-{index}", "--linger", most=2) as job:
            job.start(2)
            job.await_world("n0", "n1")
            head, other = (job.node(name) for name in job.order())
            job.tell("stop")
            job.wait_for(partial(job.shows, other.name, NodeState.DONE), "the node does not get done")
            gone = other if end == "leave other" else head
            if end == "fail":
                job.tell("fail")
            elif end == "kill head":
                gone.kill()
            else:
                gone.terminate()
            if end != "fail":
                job.wait_for(partial(job.absent, gone.name), "the node does not leave")
            job.tell("go")
            exits = {"leave other": EXIT_LEFT, "leave head": EXIT_LEFT, "kill head": -9, "fail": 1}
            assert job.exit_codes() == {gone.name: exits[end], (head if gone is other else other).name: 0}
            closed = job.closed()
            assert closed.result is RunResult.SUCCEEDED, end
            assert closed.reason.startswith(f"{gone.name} did not finish")
            incidents = job.store.range(job.keys.incidents, Deadline.after(LIMIT_S)).items
            kinds = [Incident.decode(each.value, each.key).kind for each in incidents]
            assert kinds == (["worker_died", "node_gave_up"] if end == "fail" else []), end
            if end == "fail":
                (sentence,) = job.sentences(gone.name)
                why = "exit code 1: OSError: the export failed"
                assert f"{why}, after the end of the training: the run has succeeded" in sentence
            assert job.exit_code(job.add()) == 0


@pytest.mark.timeout(300)
def test_workers_do_not_outlive_their_torchrun(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """SIGKILL to one torchrun alone: its worker, in a session of its own, leaves at once; the other node goes on."""
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=2) as job:
        job.start(2)
        first = job.await_world("n0", "n1")
        orphan = job.node("n1").worker()
        assert orphan is not None
        os.kill(job.node("n1").pid, signal.SIGKILL)
        assert processes.wait_gone([orphan], Deadline.after(LIMIT_S)) == []
        job.await_world("n0", after=first)
        assert job.finish() == {"n0": 0, "n1": -9}
        job.check_lossless()


@pytest.mark.timeout(300)
def test_a_node_whose_cloud_takes_it_back_leaves_by_plan(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """The metadata service tells one of two nodes that it is preempted: that one exits with 143, the other goes on
    with every sample used once and no step made twice."""
    with (
        MetadataServer() as server,
        Job(
            tmp_path, etcd_endpoint, run_id, least=1, most=2, options=LASTING | {"preemption": f"gce@{server.url}"}
        ) as job,
    ):
        job.start(2)
        first = job.await_world("n0", "n1")
        assert all(node.running for node in job.nodes)
        server.preempt()
        job.wait_for(lambda: any(not node.running for node in job.nodes), "nobody leaves")
        (gone,) = [node for node in job.nodes if not node.running]
        assert job.exit_code(gone) == EXIT_LEFT
        assert "node.preempted" in job.log(gone.name)
        (stays,) = [node for node in job.nodes if node is not gone]
        job.await_world(stays.name, after=first)
        assert job.finish() == {gone.name: EXIT_LEFT, stays.name: 0}
        job.check_lossless()
