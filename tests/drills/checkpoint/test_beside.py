"""A reader beside a writer whose retention removes checkpoints under its hands."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.clock import Deadline
from tests.drills.checkpoint.killing import START_LIMIT_S, forks, holds, save_for_ever
from tests.unit.checkpoint.states import newest_of, Heard


@pytest.mark.timeout(300)
def test_a_reader_always_finds_a_whole_checkpoint(tmp_path: Path) -> None:
    """While another process saves and removes as fast as it can, loading never fails, lies, or goes back in time."""
    context = forks()
    hear, say = context.Pipe(duplex=False)
    child = context.Process(target=save_for_ever, args=(tmp_path, say), daemon=True)
    child.start()
    heard = Heard()
    steps: list[int] = []
    try:
        for _ in range(2):
            assert hear.poll(START_LIMIT_S)
            hear.recv()
        enough = Deadline.after(START_LIMIT_S)  # a disk may be so busy that the writer stands still for a while
        while len(steps) < 60 or (steps[-1] == steps[0] and not enough.expired):
            loaded = newest_of(CheckpointManager(tmp_path, on_event=heard.append))
            assert holds(loaded.state, loaded.manifest.step)
            steps.append(loaded.manifest.step)
    finally:
        child.kill()
        child.join(START_LIMIT_S)
    assert steps == sorted(steps)
    assert steps[-1] > steps[0], "the writer did not move: the drill proved nothing"
    assert set(heard.kinds()) == {"checkpoint.loaded"}
