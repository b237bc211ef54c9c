"""SIGKILL at random moments: the newest checkpoint is whole, and nothing committed is lost; readers beside a writer.

``ELASTIC_TRAINER_SAVE_KILLS=N`` kills N times in each way.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.checkpoint.manifest import Kind, kind_of
from elastic_trainer.clock import Deadline
from tests.drills.checkpoint import killing
from tests.unit.checkpoint.states import Heard, newest_of

KILLS = int(os.environ.get(killing.COUNT, "0")) or 25


@pytest.mark.timeout(600 + 10 * KILLS)
@pytest.mark.parametrize("saver", [killing.save_for_ever, killing.save_beside_for_ever, killing.save_together_for_ever])
def test_the_newest_checkpoint_survives_every_kill(tmp_path: Path, saver: killing.Saver) -> None:
    """After each kill the newest one verifies, holds its step's content and is not older than what was committed."""
    killing.kill_savers(tmp_path, KILLS, seed=11, saver=saver).check()
    CheckpointManager(tmp_path).sweep()
    assert {kind_of(name) for name in os.listdir(tmp_path)} == {Kind.COMMITTED}


@pytest.mark.timeout(300)
def test_a_reader_always_finds_a_whole_checkpoint(tmp_path: Path) -> None:
    """While another process saves and removes as fast as it can, loading never fails, lies, or goes back in time."""
    context = killing.forks()
    hear, say = context.Pipe(duplex=False)
    child = context.Process(target=killing.save_for_ever, args=(tmp_path, say), daemon=True)
    child.start()
    heard = Heard()
    steps: list[int] = []
    try:
        for _ in range(2):
            assert hear.poll(killing.START_LIMIT_S)
            hear.recv()
        enough = Deadline.after(killing.START_LIMIT_S)  # a disk may be so busy that the writer stands still for a while
        while len(steps) < 60 or (steps[-1] == steps[0] and not enough.expired):
            loaded = newest_of(CheckpointManager(tmp_path, on_event=heard.append))
            assert killing.holds(loaded.state, loaded.manifest.step)
            steps.append(loaded.manifest.step)
    finally:
        child.kill()
        child.join(killing.START_LIMIT_S)
    assert steps == sorted(steps)
    assert steps[-1] > steps[0], "the writer did not move: the drill proved nothing"
    assert set(heard.kinds()) == {"checkpoint.loaded"}
