"""The progress of the job in the store: rare, newest, and never that of a round that is over."""

from __future__ import annotations

import pytest

from elastic_trainer.agent.rendezvous.in_place import PROGRESS_EVERY_S, ProgressWriter
from elastic_trainer.ipc.channel import Progress
from elastic_trainer.store.api import Put, RunKeys
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore
from tests.support.waiting import soon

KEYS = RunKeys("/p", "run")


class Scene:
    """A round, and the writer of its progress."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(MemoryBackend(self.clock))
        self.writer = ProgressWriter(self.store, KEYS, self.clock)
        self.round = self.begin_round()

    def begin_round(self) -> int:
        return self.store.transact([], [Put(KEYS.round, b"{}")], deadline=soon()).revision

    def offer(self, step: int, round_revision: int | None = None) -> None:
        progress = Progress(round=1, step=step, epoch=0, samples=0)
        self.writer.offer(progress, self.round if round_revision is None else round_revision)

    @property
    def written(self) -> int | None:
        found = self.store.get(KEYS.progress, soon()).first
        return Progress.model_validate_json(found.value).step if found is not None else None


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_progress_is_written_at_most_once_a_second(scene: Scene) -> None:
    """The first at once, then the newest of each second; the last one when it ends."""
    for step in (1, 2, 3):
        scene.offer(step)
        scene.writer.turn()
        assert scene.written == 1
    scene.clock.advance(PROGRESS_EVERY_S)
    scene.writer.turn()
    assert scene.written == 3
    scene.offer(9999)
    scene.writer.close()
    assert scene.written == 9999


def test_progress_of_a_round_that_is_over_is_not_written(scene: Scene) -> None:
    """A rank 0 that was left behind must not undo what its successor reports."""
    old, new = scene.round, scene.begin_round()
    scene.offer(7, new)
    scene.writer.turn()
    scene.offer(8, old)
    scene.writer.close()
    assert scene.written == 7


def test_an_outage_loses_nothing_but_old_progress(scene: Scene) -> None:
    """The writer outlives it."""
    scene.store.backend.outage(True)
    scene.offer(1)
    scene.writer.turn()
    scene.store.backend.outage(False)
    scene.offer(2)
    scene.clock.advance(PROGRESS_EVERY_S)
    scene.writer.turn()
    assert scene.written == 2
