"""A request for a save, as the worker of rank 0 sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.errors import StorageError
from elastic_trainer.ipc.page import SAVE_SUFFIX, PageReader, PageWriter
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.saver import OnDemand


class Side:
    """The agent's side: writes requests, reads answers."""

    def __init__(self, directory: Path, *, saves: bool = True) -> None:
        page = directory / "0-1.page"
        self.worker = OnDemand(HeartbeatReporter(PageWriter.create(page)), saves=saves)
        self.worker._tracker.beat()
        self._reader, self._file = PageReader(page), page.with_suffix(SAVE_SUFFIX)

    def asks(self, name: str) -> None:
        self._file.write_text(name)

    @property
    def answer(self) -> Any:
        reading = self._reader.read()
        return None if reading is None else reading.notes.get("on_demand")


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path)


def test_a_request_is_answered_when_its_checkpoint_is_durable(side: Side) -> None:
    """Once: the file stays, and asks for no second one."""
    assert not side.worker.wanted(1)
    side.asks("a")
    assert side.worker.wanted(2)
    side.worker.covered(2)
    assert not side.worker.wanted(3)
    side.worker.settled(1, "step-1", None)  # the one before, which was being written
    assert [side.answer] == [None]
    side.worker.settled(2, "step-2", None)
    assert side.answer == {"id": "a", "name": "step-2"}
    assert not side.worker.wanted(4)
    side.asks("b")
    assert side.worker.wanted(4)


def test_a_state_that_is_durable_already_is_the_answer(side: Side) -> None:
    """Amid an evaluation, say: no step was made since."""
    side.worker.settled(7, "step-7", None)
    side.asks("a")
    assert not side.worker.wanted(7)
    assert side.answer == {"id": "a", "name": "step-7"}


def test_a_save_that_fails_is_the_answer_with_its_exit_code(side: Side) -> None:
    """Whether it fails at once or while it is written; and so is the lack of a directory."""
    side.asks("a")
    assert side.worker.wanted(2)
    side.worker.covered(2)
    side.worker.settled(2, "", StorageError("disk full"))
    assert side.answer == {"id": "a", "name": "", "problem": "disk full", "code": 73}
    side.asks("b")
    assert side.worker.wanted(3)
    side.worker.covered(3)
    side.worker.settled(3, "step-3", OSError("gone"))
    assert side.answer == {"id": "b", "name": "", "problem": "gone", "code": 1}


def test_without_a_checkpoint_directory_nothing_is_saved(tmp_path: Path) -> None:
    side = Side(tmp_path, saves=False)
    side.asks("a")
    assert not side.worker.wanted(2)
    assert (side.answer["id"], side.answer["code"]) == ("a", 78)
    assert side.answer["problem"].startswith("the job has no checkpoint directory")


def test_a_save_that_makes_room_for_a_newer_one_leaves_the_request_to_that(side: Side) -> None:
    side.asks("a")
    assert side.worker.wanted(2)
    side.worker.covered(2)
    side.worker.given_up(2)
    side.worker.covered(3)
    side.worker.settled(3, "step-3", None)
    assert side.answer == {"id": "a", "name": "step-3"}
