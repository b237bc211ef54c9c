"""A run is asked for a checkpoint: by the command, through etcd, and by a signal to one of its workers."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.cli.main import main
from elastic_trainer.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_UNAVAILABLE
from tests.drills.endings.job import LASTING, Job
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)


def ask(endpoint: str, run: str, *words: str) -> int:
    return main(["checkpoints", "save", run, "--endpoint", endpoint, *words])


def saved(directory: Path) -> list[str]:
    return [entry.name for entry in reversed(CheckpointManager(directory / "checkpoints").entries())]


def noted(job: Job) -> list[dict[str, Any]]:
    lines = [text for path in job.spec.ledger.glob("*.jsonl") for text in path.read_text().splitlines()]
    return [line for line in map(json.loads, lines) if line["event"] == "checkpoint"]


def requested(job: Job, count: int) -> bool:
    return job.log("n0").count("save.requested") == count


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_a_run_saves_when_it_is_asked(
    recovery: str, tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command names the checkpoint once it is there, two that ask at once get the same; a signal to any worker does
    the same, once. Training goes on, and a run that is over says so."""
    with Job(tmp_path, etcd_endpoint, run_id, least=2, most=2, options=LASTING | {"recovery": recovery}) as job:
        job.start(2)
        job.await_world("n0", "n1")
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask, etcd_endpoint, run_id) for _ in range(2)]
        assert [each.result() for each in asked] == [0, 0]
        named = capsys.readouterr().out.split()
        assert saved(tmp_path) == sorted(set(named))
        assert 1 <= len(set(named)) <= 2  # the second may have come after the first was answered
        assert ask(etcd_endpoint, run_id, "--no-wait") == 0
        eventually(lambda: len(saved(tmp_path)) == len(set(named)) + 1, "no checkpoint comes")
        assert "asked run" in capsys.readouterr().out

        eventually(lambda: len(noted(job)) == len(saved(tmp_path)), "a worker wrote no checkpoint down")
        before = noted(job)
        first, *others = (job.node(name).worker() for name in job.order())
        for each in others:
            assert each is not None
            each.send_signal(signal.SIGUSR1)
        eventually(lambda: len(noted(job)) > len(before), "no checkpoint comes after the signal")
        job.await_steps(60)
        assert len(noted(job)) == len(before) + 1
        for each in (*others, first):
            assert each is not None
            each.send_signal(signal.SIGUSR1)
        eventually(lambda: len(noted(job)) > len(before) + 1, "no checkpoint comes after signals to all")
        job.await_steps(60)
        assert len(noted(job)) == len(before) + 2
        assert job.finish() == {"n0": 0, "n1": 0}
        job.check_lossless()
    capsys.readouterr()
    assert ask(etcd_endpoint, run_id) == EXIT_FAILURE
    assert f"run {run_id!r} does not train: it has finished" in capsys.readouterr().err


def test_a_run_that_cannot_save_says_why(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no run; there is no checkpoint directory; nobody answers in time, and the request is withdrawn."""
    assert ask(etcd_endpoint, run_id) == EXIT_CONFIG
    assert "there is no run" in capsys.readouterr().err
    with Job(tmp_path, etcd_endpoint, run_id, "--nowhere", least=1, most=1, options=LASTING) as job:
        job.start(1)
        job.await_world("n0")
        assert ask(etcd_endpoint, run_id) == EXIT_CONFIG
        assert "cannot save: the job has no checkpoint directory" in capsys.readouterr().err
        worker = job.node("n0").worker()
        assert worker is not None
        worker.send_signal(signal.SIGUSR1)
        job.wait_for(lambda: "the session has no checkpoint_dir" in job.log("n0"), "the signal is not refused")
        worker.suspend()
        assert ask(etcd_endpoint, run_id, "--timeout", "1") == EXIT_UNAVAILABLE
        assert "has not saved within 1 s" in capsys.readouterr().err
        worker.resume()
        job.await_steps(5)
        assert ask(etcd_endpoint, run_id) == EXIT_CONFIG
        assert job.finish() == {"n0": 0}


def test_a_request_while_a_save_is_written_gets_a_later_state(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Job(tmp_path, etcd_endpoint, run_id, "--slow", "1.5", least=1, most=1, options=LASTING) as job:
        job.start(1)
        job.await_world("n0")
        worker = job.node("n0").worker()
        assert worker is not None
        for count in (1, 2):
            worker.send_signal(signal.SIGUSR1)
            job.wait_for(partial(requested, job, count), "the signal is lost")
            job.await_steps(20)
        assert len(noted(job)) < 2
        asked_at = job.newest()
        assert ask(etcd_endpoint, run_id) == 0
        assert job.newest() > asked_at + 20
        (named,) = capsys.readouterr().out.split()
        assert saved(tmp_path)[-1] == named
        eventually(lambda: len(noted(job)) == 3, "a worker wrote no checkpoint down")
        steps = [line["step"] for line in noted(job)]
        assert steps == sorted(set(steps))
        assert steps[-1] >= asked_at
        assert job.finish() == {"n0": 0}
