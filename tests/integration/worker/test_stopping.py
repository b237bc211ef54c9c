"""Stopping: all ranks agree on a step, save it, and leave; if they cannot agree, they leave in time."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.variables import ENV_LEAVE_WITHIN as LEAVE_WITHIN
from tests.integration.worker.launch import finished, free_port, plain, standalone, started, tail
from tests.support.slowstorage import SLOW, SlowStorage
from tests.support.waiting import eventually

LONG = ["1000", "--step-s", "0.02", "--stop-timeout-s", "25"]


def ledger(directory: Path) -> dict[str, str]:
    return {"ELASTIC_TRAINER_LEDGER_DIR": str(directory / "ledger")}


def lines(directory: Path) -> list[dict[str, Any]]:
    found = []
    for path in (directory / "ledger").glob("*.jsonl"):
        found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return found


def steps_of(directory: Path, rank: int) -> int:
    return max(
        (line["step"] for line in lines(directory) if line["event"] == "step" and line["rank"] == rank), default=0
    )


def assert_stopped_together(directory: Path, world: int) -> None:
    """All ranks have closed as stopped at one step, which is the newest checkpoint."""
    closed = [line for line in lines(directory) if line["event"] == "closed"]
    newest = CheckpointManager(directory / "checkpoints").newest()
    assert newest is not None
    assert sorted(line["rank"] for line in closed) == list(range(world))
    assert {(line["step"], line["status"]) for line in closed} == {(newest.step, "stopped")}
    assert {steps_of(directory, rank) for rank in range(world)} == {newest.step}


def test_a_save_that_outlasts_the_machine_is_given_up(tmp_path: Path) -> None:
    """The process ends before SIGKILL comes, by plan; what was written does not count, and the next start resumes."""
    log, slow = tmp_path / "log", SlowStorage(tmp_path, tmp_path / "checkpoints")
    environment = {**ledger(tmp_path), "SLOW_FSYNC": str(slow.file), "PYTHONPATH": str(SLOW)}
    cold = ["env", *plain("train.py", tmp_path, *LONG)]  # a fork would not read PYTHONPATH
    with started(cold, log, {**environment, LEAVE_WITHIN: "1"}) as process:
        eventually(lambda: steps_of(tmp_path, 0) > 3, lambda: tail(log))
        slow.takes(3600.0)
        process.send_signal(signal.SIGTERM)
        assert finished(process, log) == 143, tail(log)
    said = log.read_text()
    assert "the 1 s that this machine has after a SIGTERM are over; the checkpoint that was being written" in said
    assert CheckpointManager(tmp_path / "checkpoints").newest() is None
    assert slow.writing()
    shutil.rmtree(tmp_path / "ledger")
    with started(plain("train.py", tmp_path, *LONG), log, {**ledger(tmp_path), LEAVE_WITHIN: "100"}) as process:
        eventually(lambda: steps_of(tmp_path, 0) > 3, lambda: tail(log))
        process.send_signal(signal.SIGTERM)
        assert finished(process, log) == 143, tail(log)
    assert_stopped_together(tmp_path, 1)


def test_sigterm_to_torchrun_stops_all_workers_at_one_step(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(standalone(2, "train.py", tmp_path, *LONG), log, ledger(tmp_path)) as process:
        eventually(lambda: steps_of(tmp_path, 1) > 3, lambda: tail(log))
        process.send_signal(signal.SIGTERM)
        assert finished(process, log) != 0
    assert_stopped_together(tmp_path, 2)


def test_a_rank_that_waits_for_a_frozen_peer_leaves_in_time_when_told_to(tmp_path: Path) -> None:
    """Blocked in a collective, it ends within its stop timeout, without a checkpoint that the peer lacks. There is no
    launcher: rank 0 hosts the store."""
    log, port = tmp_path / "log", str(free_port())
    words = plain("train.py", tmp_path, *LONG, "--freeze-at", 5, "--die-rank", 1, "--stop-timeout-s", 1)
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    with ExitStack() as stack:
        survivor, _ = (
            stack.enter_context(started(words, log, {"RANK": rank, "LOCAL_RANK": rank, **common, **ledger(tmp_path)}))
            for rank in "01"
        )
        eventually(lambda: steps_of(tmp_path, 1) == 5, lambda: tail(log))
        pause(0.5)
        began = SYSTEM.monotonic()
        survivor.send_signal(signal.SIGTERM)
        assert finished(survivor, log) == 143, tail(log)
        assert SYSTEM.monotonic() - began < 30.0
    assert "the ranks did not agree to stop in time" in log.read_text()
