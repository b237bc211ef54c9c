"""Workers that do not leave a round that is over are killed; all others are left alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from elastic_trainer.agent.workers.conductor import ConductorPorts, Life, Release, Worker
from elastic_trainer.ipc.channel import Connection, Ready
from tests.unit.agent.stage import Alarms, Line, Stage

LIMIT_S = 8.0


@dataclass
class Scene:
    """One worker that is to leave round 3."""

    worker: Worker
    busy: Callable[[int], str] = lambda pid: ""
    queued: Callable[[int], Mapping[str, float]] = lambda pid: {}
    killed: list[int] = field(default_factory=list)
    alarms: Alarms = field(default_factory=Alarms)
    delays: list[str] = field(default_factory=list)
    """What the worker was busy with, each time that the others were informed of its delay."""

    def __post_init__(self) -> None:
        self.release = Release(LIMIT_S, self.ports, self._late, self.alarms.later, self.alarms.clock)
        self.release.expect(Life(1, 1, {0: self.worker}), self.worker, 3)

    @property
    def ports(self) -> ConductorPorts:
        return replace(
            Stage().ports,
            busy=lambda pid: self.busy(pid),
            kill=lambda pid, reason: self.killed.append(pid),
            queued_s=lambda pid: self.queued(pid),
        )

    def _late(self) -> None:
        self.delays.append(self.worker.busy)


def worker_of(number: int = 3, step_time_s: float = 0.0, inside: int = 3) -> Worker:
    ready = Ready(number=number, state=None, planned=False, step_time_s=step_time_s)
    return Worker(cast("Connection", Line()), 1, 0, life=1, ready=ready, inside=inside, sent_over=3)


def test_a_worker_that_stays_in_a_round_is_killed_once() -> None:
    """It has heard that the round is over, and never said that it is free. Until then the others know of its delay."""
    scene = Scene(worker_of())
    scene.alarms.run_for(LIMIT_S)
    assert scene.killed == []
    assert scene.delays
    scene.alarms.run_for(10 * LIMIT_S)
    assert scene.killed == [1]


def test_a_worker_that_gets_no_cpu_is_given_that_time_more() -> None:
    """On a machine that is busy with other things, for a third of the time: it cannot have left."""
    scene = Scene(worker_of())
    scene.queued = lambda pid: {"main": scene.alarms.clock.monotonic() / 3}
    scene.alarms.run_for(1.4 * LIMIT_S)
    assert scene.killed == []
    scene.alarms.run_for(0.2 * LIMIT_S)
    assert scene.killed == [1]


@pytest.mark.parametrize("why", ["it is free", "it says so late", "it is in the round behind it", "the agent closes"])
def test_all_others_are_left_alone(why: str) -> None:
    """Also where the timer runs out just as the worker says so, and where a planned change has taken it further."""
    scene = Scene(worker_of(inside=4 if why == "it is in the round behind it" else 3))
    if why == "it is free":
        scene.release.freed(scene.worker)
    elif why == "it says so late":
        scene.worker.ready = Ready(number=4, state=None, planned=False)
    elif why == "the agent closes":
        scene.release.close()
    scene.alarms.run_for(10 * LIMIT_S)
    assert scene.killed == []


def test_a_busy_worker_is_waited_for_and_the_time_counts_from_its_end() -> None:
    """Also one that gets busy after its round has ended; what it was busy with explains its delay until it is free."""
    scene = Scene(worker_of())
    scene.alarms.run_for(LIMIT_S / 2)
    scene.busy = lambda pid: "in checkpoint"
    scene.alarms.run_for(10 * LIMIT_S)
    scene.busy = lambda pid: ""
    scene.alarms.run_for(LIMIT_S)
    assert scene.killed == []
    assert (scene.delays[0], scene.delays[-1]) == ("", "in checkpoint")
    scene.alarms.run_for(1.0)
    assert scene.killed == [1]


def test_a_page_that_cannot_be_read_explains_nothing() -> None:
    """The others must not wait for ever because of it."""

    def busy(pid: int) -> str:
        raise ValueError(f"the page of {pid} is torn")

    scene = Scene(worker_of(), busy)
    scene.alarms.run_for(2 * LIMIT_S)
    assert scene.killed == [1]


def test_slow_steps_get_more_time() -> None:
    """Two of them."""
    scene = Scene(worker_of(step_time_s=40.0))
    scene.alarms.run_for(79.0)
    assert scene.killed == []
    scene.alarms.run_for(3.0)
    assert scene.killed == [1]
