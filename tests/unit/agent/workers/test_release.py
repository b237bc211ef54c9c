"""Workers that do not leave a round that is over are killed; all others are left alone."""

from __future__ import annotations

import pytest

from elastic_trainer.agent.workers.conductor_shell import guarded
from elastic_trainer.ipc.channel import Ready
from elastic_trainer.membership.documents import RoundState
from tests.unit.agent.stage import PID, Stage

LIMIT_S = 8.0


def stage_of(step_time_s: float = 0.0) -> Stage:
    stage = Stage(sever_s=LIMIT_S)
    worker = stage.working(3)
    worker.say(Ready(number=3, step_time_s=step_time_s))
    stage.see(3, RoundState.BROKEN)
    return stage


@pytest.mark.parametrize(("step_time_s", "limit_s"), [(0.0, LIMIT_S), (40.0, 80.0)])
def test_a_worker_that_stays_in_a_round_is_killed_once(step_time_s: float, limit_s: float) -> None:
    """After two of its steps at least. Until then the others know of its delay."""
    stage = stage_of(step_time_s)
    told = len(stage.notebook.records)
    stage.run_for(limit_s)
    assert stage.killed == []
    assert len(stage.notebook.records) > told
    stage.run_for(10 * limit_s)
    assert stage.killed == [PID]


def test_a_worker_that_gets_no_cpu_is_given_that_time_more() -> None:
    """On a machine that is busy with other things, for a third of the time: it cannot have left."""
    stage = stage_of()
    for _ in range(14):
        stage.queued_s += LIMIT_S / 30
        stage.run_for(LIMIT_S / 10)
    assert stage.killed == []
    stage.run_for(0.2 * LIMIT_S)
    assert stage.killed == [PID]


def test_a_busy_worker_is_waited_for_and_the_time_counts_from_its_end() -> None:
    """Also one that gets busy after its round has ended; what it was busy with explains its delay until it is free."""
    stage = stage_of()
    stage.run_for(LIMIT_S / 2)
    stage.busy = "in checkpoint"
    stage.run_for(10 * LIMIT_S)
    stage.busy = ""
    stage.run_for(LIMIT_S - 0.5)
    assert (stage.killed, stage.record().busy) == ([], "in checkpoint")
    stage.run_for(1.0)
    assert stage.killed == [PID]


def test_a_page_that_cannot_be_read_explains_nothing() -> None:

    def torn(pid: int) -> str:
        raise ValueError(f"the page of {pid} is torn")

    assert guarded(torn, "")(1) == ""
