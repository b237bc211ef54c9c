"""The record writer: the newest record, in order, over outages of the store."""

from __future__ import annotations

from typing import cast

import pytest

from elastic_trainer.agent.workers.conductor_shell import AGAIN_S, RecordWriter
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError, StoreUnavailableError
from elastic_trainer.membership.documents import NodeRecord
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.writes import RoundFailure
from tests.support.memory_store import ManualClock
from tests.unit.agent.stage import BASE

FAILURE = RoundFailure(4, "silent")


class Desk:
    """A member as its record writer sees it: what was written, and an error that writes end in."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.error: ElasticTrainerError | None = None
        self.written: list[NodeRecord] = []
        self.broken: list[tuple[RoundFailure, NodeRecord | None]] = []
        self.writer = RecordWriter(cast("Member", self), self.clock)

    def announce(self, record: NodeRecord, deadline: Deadline) -> None:
        if self.error is not None:
            raise self.error
        self.written.append(record)

    def break_round(self, failure: RoundFailure, deadline: Deadline, record: NodeRecord | None) -> None:
        if self.error is not None:
            raise self.error
        if not deadline.expired:
            self.broken.append((failure, record))

    def published(self) -> NodeRecord | None:
        return self.written[-1] if self.written else None


@pytest.fixture
def desk() -> Desk:
    return Desk()


def numbered(number: int) -> NodeRecord:
    return BASE.model_copy(update={"step_time_s": float(number)})


def test_the_newest_record_is_written_and_an_equal_one_is_not_written_again(desk: Desk) -> None:
    for number in (1, 2, 2):
        desk.writer.announce(numbered(number))
    desk.writer.turn()
    desk.writer.announce(numbered(2))
    desk.writer.turn()
    assert desk.written == [numbered(2)]


def test_an_outage_is_waited_out(desk: Desk) -> None:
    """What failed is tried again soon, but for a record that a newer one replaces."""
    desk.error = StoreUnavailableError("away")
    desk.writer.announce(numbered(1))
    assert desk.writer.turn() == AGAIN_S
    desk.writer.break_round(FAILURE, numbered(2))
    assert desk.writer.turn() == AGAIN_S
    desk.writer.announce(numbered(3))
    desk.error = None
    assert desk.writer.turn() > AGAIN_S
    assert (desk.broken, desk.written) == ([(FAILURE, numbered(3))], [numbered(3)])


def test_a_record_that_is_refused_is_not_tried_again(desk: Desk) -> None:
    desk.error = ConfigError("another live node of this run has the id 'a'")
    desk.writer.announce(numbered(1))
    assert desk.writer.turn() > AGAIN_S
    desk.error = None
    desk.writer.turn()
    assert desk.written == []


def test_a_turn_that_crashes_loses_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.writer.announce(numbered(1))
    monkeypatch.setattr(desk, "announce", None)
    with pytest.raises(TypeError):
        desk.writer.turn()
    monkeypatch.undo()
    desk.writer.turn()
    assert desk.written == [numbered(1)]


def test_a_suspicion_that_cannot_be_written_in_time_is_dropped(desk: Desk) -> None:
    """Whoever was suspected may have come back while the store was away. The record is written all the same."""
    desk.error = StoreUnavailableError("away")
    desk.writer.break_round(FAILURE, numbered(1), within_s=1.0)
    desk.writer.turn()
    desk.clock.advance(1.5)
    desk.error = None
    desk.writer.turn()
    assert (desk.broken, desk.written) == ([], [numbered(1)])
