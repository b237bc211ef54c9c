"""Storage takes very long for a save: what fails, joins or leaves meanwhile costs what it costs otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.local.cluster import kill
from elastic_trainer.local.ledger import LineKind, audit
from tests.drills.checkpoint.soaked import SAMPLES, SNAPSHOT_EVERY_S
from tests.drills.endings.job import LASTING, Job
from tests.support.slowstorage import SLOW, SlowStorage

SCRIPT = Path(__file__).with_name("soaked.py")
FSYNC_S, MORE_S = float(os.environ.get("ELASTIC_TRAINER_FSYNC_S", "15")), 10.0
"""A save takes several of the first (200: ten minutes in all); what waited for one would take more than the second
longer than without."""


def world_of(job: Job, names: set[str]) -> Callable[[], bool]:
    """Whether these nodes have made steps together from now on."""
    began = SYSTEM.monotonic()

    def together() -> bool:
        lines = [line for line in job.lines() if line.event is LineKind.STEP and line.t > began + 0.5]
        return {line.node for line in lines if line.world == len(names)} >= names

    return together


def costs(job: Job, storage: SlowStorage, fsync_s: float) -> dict[str, float]:
    """Seconds until the job trains on after each of a worker's death, a join and a leave, amid a save of its own."""
    found = {}

    def measure(what: str, act: Callable[[], object], names: set[str]) -> None:
        old = storage.writing()
        storage.takes(fsync_s)
        under_way: set[str] = job.wait_for(lambda: not fsync_s or storage.writing() - old, "nobody saves") or set()
        began = SYSTEM.monotonic()
        act()
        job.wait_for(world_of(job, names), f"no training after {what}")
        found[what] = SYSTEM.monotonic() - began
        assert not fsync_s or under_way & storage.writing(), "the save was over too soon to show anything"
        storage.takes(0.0)
        pause(1.0)

    last = job.order()[-1]
    names = set(job.order())
    measure("kill", job.node(last).kill_worker, names)
    measure("join", job.add, names | {f"n{len(job.nodes)}"})
    measure("leave", job.nodes[-1].terminate, names)
    job.exit_code(job.nodes[-1])
    return found


@pytest.mark.timeout(300)
def test_what_happens_amid_a_long_save_costs_no_more(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """A worker is lost, a node joins and one leaves, each without a save under way and amid one that takes far longer:
    the job trains on as soon. Then all workers die amid such a save: what was computed since it began is not lost."""
    storage = SlowStorage(tmp_path, tmp_path / "job" / "checkpoints")
    directory = tmp_path / "job"
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SLOW), "SLOW_FSYNC": str(storage.file)}
    more: dict[str, Any] = {"entry": [str(SCRIPT), str(directory), "1000000000", "0.02"], "environment": environment}
    with Job(directory, etcd_endpoint, run_id, least=1, most=3, options=LASTING, **more) as job:
        job.start(2)
        job.await_world("n0", "n1")
        without, amid = costs(job, storage, 0.0), costs(job, storage, FSYNC_S)
        print(without, amid)
        assert all(amid[what] < 2 * without[what] + MORE_S for what in without), (without, amid)
        storage.takes(FSYNC_S)
        old = storage.writing()
        job.wait_for(lambda: storage.writing() - old, "nobody saves")
        pause(15 * SNAPSHOT_EVERY_S)
        job.await_steps(10)
        before = [line for line in job.lines() if line.event is LineKind.STEP]
        kill([worker for node in job.running if (worker := node.worker()) is not None])
        lost_from = max(line.t for line in before) - 8 * SNAPSHOT_EVERY_S
        job.wait_for(world_of(job, {node.name for node in job.running}), "no training after the death of all")
        opened = max((line for line in job.lines() if line.event is LineKind.OPENED), key=lambda line: line.t)
        kept = min(line.step for line in before if line.t >= lost_from)
        assert kept <= opened.step, (kept, opened.step)
        storage.takes(0.0)
        codes = job.finish()
        assert (codes["n0"], codes["n1"]) == (0, 0)
        assert audit(job.lines(), SAMPLES).exact
