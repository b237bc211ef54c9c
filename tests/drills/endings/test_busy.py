"""A worker is lost while the others save, evaluate, or are between two steps: the others wait for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_trainer.clock import pause
from elastic_trainer.membership.documents import RoundState
from tests.drills.endings.evaluating import EPOCHS
from tests.drills.endings.job import LASTING, Job

SCRIPT = Path(__file__).with_name("busy.py")
SEVER_S = 2.0
QUICK = LASTING | {"sever_timeout": f"{SEVER_S:g}"}
ALL = ("n0", "n1", "n2")
HELD_S = 11.0
"""Longer than ``sever_timeout``, and than the others wait for a member that is not busy."""


def busy_job(directory: Path, endpoint: str, run: str, **options: str) -> Job:
    entry = ["-m", "tests.drills.endings.busy", str(directory)]
    return Job(directory, endpoint, run, least=1, options=QUICK | options, entry=entry)


def pids(job: Job, names: Sequence[str]) -> dict[str, int]:
    workers = {name: job.node(name).worker() for name in names}
    return {name: worker.pid for name, worker in workers.items() if worker is not None}


def ask(job: Job, what: str, *busy: str) -> None:
    """Ask for ``what``, once, and wait until these nodes are at it, which they stay until they may end it."""
    directory = job.spec.directory
    for name in ("marked", "free"):
        (directory / name).unlink(missing_ok=True)
    job.tell(what)
    job.wait_for(lambda: all((directory / f"busy-{name}").exists() for name in busy), f"{busy} do not get busy")
    (directory / what).unlink()
    for name in busy:
        (directory / f"busy-{name}").unlink()


def hold(job: Job, nodes: Sequence[str], doing: str, seconds: float) -> None:
    """Wait until the agents of these nodes have said what their workers are ``doing``; then some time more."""
    said = f'"busy": "{doing}"'
    job.wait_for(lambda: all(said in job.log(name) for name in nodes), f"nobody waits for what is {doing}")
    pause(seconds)


def broken(job: Job) -> list[str]:
    return [entry.reason for entry in job.journal() if entry.state is RoundState.BROKEN]


@pytest.mark.timeout(600)
def test_survivors_that_are_busy_are_neither_killed_nor_left_behind(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """One of three workers is lost while all are between two steps and then in an evaluation, longer than
    ``sever_timeout`` and the time of a node that is not busy; then one while rank 0 saves. The same processes go on,
    no committed step is lost, and the logs say what was waited for. One that never comes back from an evaluation is
    waited for until ``phase_timeout`` is over."""
    with busy_job(tmp_path, etcd_endpoint, run_id, phase_timeout="18") as job:
        job.start(3)
        before = job.await_world(*ALL, count=20)
        for turn, what in enumerate(("evaluate", "slow"), 1):
            *stay, victim = job.order()
            there = pids(job, stay)
            ask(job, what, *(ALL if what == "evaluate" else stay[:1]))
            stood = job.newest()
            assert job.node(victim).kill_worker() is not None
            if what == "evaluate":
                hold(job, stay, "between two steps", HELD_S)
                job.tell("marked")
                hold(job, stay, "in evaluation", SEVER_S + 1.0)
            else:
                hold(job, stay[:1], "in checkpoint", HELD_S)
            job.tell("free")
            before = job.await_world(*ALL, after=before)
            assert pids(job, stay) == there
            assert len(broken(job)) == turn, broken(job)
            assert job.newest() > stood
            reason = "in evaluation" if what == "evaluate" else "in checkpoint"
            assert f"({reason}) to be free" in "".join(job.log(name) for name in stay)
        assert all("worker.killed" not in job.log(name) for name in ALL)
        head, stuck, victim = job.order()
        there = pids(job, [head])
        job.tell(f"stick-{stuck}")
        ask(job, "evaluate", *ALL)
        assert job.node(victim).kill_worker() is not None
        job.tell("marked")
        job.tell("free")
        job.await_world(*ALL, after=before)
        assert pids(job, [head]) == there
        assert "it has made no progress for" in job.log(stuck)
        assert "(in evaluation, after step" in job.log(stuck)
        assert job.finish() == dict.fromkeys(ALL, 0)
        job.check_lossless()
        assert job.saved_step() == job.newest()


@pytest.mark.timeout(300)
def test_a_node_that_stood_still_in_an_evaluation_does_not_join_in_the_middle_of_the_script(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """The others have evaluated and trained on without it when it is thawed: its worker begins anew. Each sample is
    used once, each epoch evaluated once."""
    entry = ["-m", "tests.drills.endings.evaluating", str(tmp_path)]
    with Job(tmp_path, etcd_endpoint, run_id, least=1, entry=entry) as job:
        job.tell("hold")
        job.start(3)
        job.wait_for(lambda: all((tmp_path / f"evaluating-{name}").exists() for name in ALL), "they do not evaluate")
        first = job.await_world(*ALL)
        worker = job.node("n2").worker()
        assert worker is not None
        for signal_ in (signal.SIGSTOP, signal.SIGCONT):
            for pid in (worker.pid, job.node("n2").pid):
                os.kill(pid, signal_)
            if signal_ == signal.SIGSTOP:
                (tmp_path / "hold").unlink()
                alone = job.await_world("n0", "n1", after=first, count=15)
        job.await_world(*ALL, after=alone)
        assert job.exit_codes() == dict.fromkeys(ALL, 0)
        assert "in the middle of a call" in job.log("n2")
        job.check_lossless()
        means = {name: (tmp_path / f"mean-{name}").read_text().split() for name in ALL}
        assert means["n0"] == means["n1"] == ["1.5"] * EPOCHS
        assert set(means["n2"]) == {"1.5"}
