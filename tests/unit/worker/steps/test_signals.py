"""How long a process that was asked to stop waits for the others."""

from __future__ import annotations

import signal

import pytest

from elastic_trainer.worker.steps.signals import SAVE_PATIENCES, Signals
from tests.support.memory_store import ManualClock


class Left(Exception):
    """The process would have ended here."""


class Watched(Signals):
    def __init__(self) -> None:
        self.time, self.saves, self.problem = ManualClock(), False, ""
        super().__init__(lambda: 10.0, lambda: self.problem or None, lambda: self.saves, clock=self.time)
        self._note(signal.SIGTERM)

    def look(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            self.time.advance(0.5)
            if self._deadline is not None:
                self._enforce(self._deadline)

    def _leave(self, reason: str) -> None:
        raise Left(reason)


def test_a_save_under_way_is_not_cut_off_and_the_patience_begins_behind_it() -> None:
    """A checkpoint that takes longer than the ranks may take to agree is no reason to end in the middle of it."""
    watched = Watched()
    watched.look(9.0)
    watched.saves = True
    watched.look(60.0)
    watched.saves = False
    watched.look(9.0)
    with pytest.raises(Left, match="did not agree"):
        watched.look(2.0)


def test_a_save_is_not_waited_for_when_the_round_is_broken_nor_for_ever() -> None:
    """Its disk may hang."""
    watched = Watched()
    watched.saves = True
    watched.look(10.0 * SAVE_PATIENCES)
    with pytest.raises(Left, match="did not agree"):
        watched.look(11.0)
    watched = Watched()
    watched.saves, watched.problem = True, "a peer left"
    with pytest.raises(Left, match="broken: a peer left"):
        watched.look(1.0)


def test_ranks_that_agree_while_one_saves_are_left_alone() -> None:
    """The deadline that was looked at is not set again."""
    watched = Watched()
    watched.saves = True
    deadline = watched._deadline
    assert deadline is not None
    watched.note_stop()
    watched._enforce(deadline)
    assert watched._deadline is None
    watched.look(1000.0)
