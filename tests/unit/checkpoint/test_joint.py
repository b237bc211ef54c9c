"""When the places of a sharded state wait for each other, on a clock that passes by itself."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import structlog
import torch

from elastic_trainer.checkpoint import CheckpointManager, SaveInfo
from elastic_trainer.checkpoint.commit import FIND_S, write_file, write_share
from elastic_trainer.checkpoint.layout import OFFER_FILE, temporary_name, this_process
from elastic_trainer.checkpoint.manifest import Image, Manifest, from_bytes, seal
from elastic_trainer.checkpoint.storage import PosixStorage
from tests.support.memory_backend import ManualClock


class Place:
    """Place 1 of two, which holds all that it is asked about."""

    index, count = 1, 2

    def writes(self, tensor: torch.Tensor) -> bool:
        return True


class Helper(ManualClock):
    """Place 1, which is to help to save step 2; a wait lets its time pass."""

    def __init__(self, directory: Path) -> None:
        super().__init__(0.0)
        self._manager, self.storage, self.stop = CheckpointManager(directory), PosixStorage(directory), Event()
        self.stops_s = self.offered_s = float("inf")
        self.earlier = ""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.advance(timeout_s)
        if self.monotonic() >= self.stops_s:
            self.stop.set()
        if self.monotonic() >= self.offered_s:
            self.offered_s = float("inf")
            self.storage.remove(self.earlier)
            self.offer(2)
        return event.is_set()

    def _prepared(self, step: int) -> tuple[Image, Manifest]:
        info = SaveInfo(step, round=1)
        return self._manager.encode({"w": torch.ones(3)}, info, places=Place()), self._manager.draft(info)

    def offer(self, step: int, *, alive: bool = True) -> str:
        """Place 0 begins to save ``step``."""
        writer = this_process() if alive else replace(this_process(), start=1)
        name, manifest = temporary_name(writer), self._prepared(step)[1]
        self.storage.create(name, manifest.name)
        write_file(self.storage, name, from_bytes(OFFER_FILE, seal(manifest)))
        return name

    def helps(self) -> tuple[tuple[str, ...], list[str]]:
        """The files that it writes, and what it warns of."""
        with structlog.testing.capture_logs() as logs:
            wrote = write_share(self.storage, *self._prepared(2), 0, self.stop, self)
        return wrote, [each["event"] for each in logs if each["log_level"] == "warning"]


@pytest.fixture
def helper(tmp_path: Path) -> Helper:
    return Helper(tmp_path)


def test_a_place_waits_for_its_turn_while_place_0_saves_an_earlier_state(helper: Helper) -> None:
    """However long that takes: else place 0 waits for it in vain later, and all the saves behind that fail too."""
    helper.earlier, helper.offered_s = helper.offer(1), 1000.0
    wrote, warned = helper.helps()
    assert (len(wrote), warned) == (1, [])


def test_the_wait_for_a_turn_ends_when_it_is_known_not_to_come(helper: Helper) -> None:
    helper.offer(1)
    helper.stops_s = 500.0
    assert helper.helps() == ((), [])
    assert 500.0 <= helper.monotonic() < 510.0


@pytest.mark.parametrize("left", [False, True])
def test_a_place_that_sees_place_0_save_nothing_gives_up(helper: Helper, *, left: bool) -> None:
    """Nothing at all, or only what a process that has died ``left``; and says so."""
    if left:
        helper.offer(1, alive=False)
    assert helper.helps() == ((), ["checkpoint.place_given_up"])
    assert FIND_S <= helper.monotonic() < FIND_S + 10.0
