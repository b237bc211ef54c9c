"""SIGKILL at random moments: the newest checkpoint is whole, and nothing committed is lost.

``ELASTIC_TRAINER_SAVE_KILLS=N`` kills N times in each way.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.checkpoint.manifest import Kind, kind_of
from tests.drills.checkpoint.killing import (
    COUNT,
    Saver,
    kill_savers,
    save_beside_for_ever,
    save_for_ever,
    save_together_for_ever,
)

KILLS = int(os.environ.get(COUNT, "0")) or 25


@pytest.mark.timeout(600 + 10 * KILLS)
@pytest.mark.parametrize("saver", [save_for_ever, save_beside_for_ever, save_together_for_ever])
def test_the_newest_checkpoint_survives_every_kill(tmp_path: Path, saver: Saver) -> None:
    """After each kill the newest one verifies, holds its step's content and is not older than what was committed."""
    casualties = kill_savers(tmp_path, KILLS, seed=11, saver=saver)
    assert casualties.broken == []
    assert casualties.kills == KILLS
    assert casualties.saves > 0
    assert casualties.interrupted > 0, "no kill hit a save: the drill proved nothing"
    CheckpointManager(tmp_path).sweep()
    assert {kind_of(name) for name in os.listdir(tmp_path)} == {Kind.COMMITTED}
