"""What a worker tells its agent of a round, and how ranks that are one completed call apart are brought level."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_trainer.clock import SystemClock
from elastic_trainer.ipc.channel import Message, Progress
from elastic_trainer.model import Cursor
from elastic_trainer.worker.comm.control import JSON, Control, bytes_of
from elastic_trainer.worker.recovery import REPORT_EVERY_S, AgentLink, CallReplay, ChannelLink
from elastic_trainer.worker.state.training_state import Position
from tests.unit.worker.ranks import run_ranks


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


def test_a_rank_that_is_one_call_behind_gets_the_result_of_the_others() -> None:
    """Rank 1 lost its peers before the call ended for it; ranks 0 and 2 had gone on."""

    def body(control: Control) -> tuple[bool, object, int]:
        calls = CallReplay()
        calls.count = 4
        if control.rank != 1:
            calls.completed({"accuracy": 0.5 + control.rank}, JSON)
        calls.inside = control.rank == 1
        calls.meet(control, [5, 4, 5])
        given = calls.answer(JSON) if calls.has_answer else None
        return control.rank == 1, given, calls.count

    for behind, given, count in run_ranks(3, body):
        assert count == 5
        assert given == ({"accuracy": 0.5} if behind else None)


def test_a_tensor_result_is_written_into_the_tensor_of_the_rank_behind() -> None:
    """What ``all_reduce`` gave elsewhere arrives bit by bit."""
    for value in (torch.tensor([[1.5, -2.0]], dtype=torch.float64), torch.tensor(3), torch.zeros(0)):
        mine = torch.zeros_like(value)
        assert bytes_of(mine).decode(bytes_of(value).encode(value)) is mine
        assert torch.equal(mine, value)
