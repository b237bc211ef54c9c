"""What a worker sends its agent while it trains, and how often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.clock import SystemClock
from elastic_trainer.ipc.channel import Message, Progress
from elastic_trainer.model import Cursor
from elastic_trainer.worker.recovery import REPORT_EVERY_S, AgentLink, ChannelLink
from elastic_trainer.worker.state.training_state import Position


class Unstarted(ChannelLink):
    """A link without its thread, in round 7. ``sent`` is what the agent would read."""

    def __init__(self, sent: list[Message]) -> None:
        connection: Any = SimpleNamespace(send=sent.append)
        AgentLink.__init__(self)
        self._connection, self._round = connection, 7


def test_progress_is_reported_a_few_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the steps are; the first report of a life comes at once."""
    now, sent = 100.0, list[Message]()
    monkeypatch.setattr(SystemClock, "monotonic", lambda _: now)
    link = Unstarted(sent)
    for step in range(1, 102):
        link.report(Position(step=step, cursor=Cursor(2, step * 8)), 0.01)
        now += 0.01
    assert [each.step for each in sent if isinstance(each, Progress)] == [1, 21, 41, 61, 81, 101]
    assert sent[0] == Progress(round=7, step=1, epoch=2, samples=8, step_time_s=0.01)
    assert REPORT_EVERY_S == 0.2
