"""Workers that do not leave a round that is over are ended; all others are left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, cast

import pytest

from elastic_trainer.agent.workers.release import Release
from elastic_trainer.agent.workers.roster import Life, Worker
from elastic_trainer.clock import SYSTEM
from elastic_trainer.ipc.channel import Connection
from elastic_trainer.ipc.messages import Ready
from tests.support.crew import LIMIT_S, eventually


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Something that stays."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def lock() -> threading.RLock:
    return threading.RLock()


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def release_of(lock: threading.RLock, limit_s: float = 0.05, busy: Iterable[str] = ()) -> Release:
    """One that finds workers busy with these things, look by look, and then with nothing."""
    found = iter(busy)
    return Release(limit_s, lock, lambda pid: next(found, ""))


def worker_of(pid: int, number: int = 3, step_time_s: float = 0.0) -> Worker:
    """A worker that is in round ``number``."""
    ready = Ready(number=number, state=None, planned=False, step_time_s=step_time_s)
    return Worker(cast("Connection", None), pid, 0, life=1, ready=ready, inside=number, told_over=number)


def life_of(worker: Worker) -> Life:
    return Life(1, 1, {0: worker})


def test_a_worker_that_stays_in_a_round_is_killed(process: Any, lock: threading.RLock) -> None:
    """It was told that the round is over, and never said that it is free."""
    worker = worker_of(process.pid)
    release_of(lock).expect(life_of(worker), worker, 3)
    assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_a_worker_that_is_free_is_left_alone(process: Any, lock: threading.RLock) -> None:
    """Whether the timer was stopped, or ran out just as the worker said so."""
    release, worker = release_of(lock), worker_of(process.pid)
    release.expect(life_of(worker), worker, 3)
    release.freed(worker)
    late = worker_of(process.pid)
    late.ready = Ready(number=4, state=None, planned=False)
    release_of(lock).expect(life_of(late), late, 3)
    eventually(lambda: not timers(), "the timers to end")
    assert process.poll() is None


def test_a_newcomer_of_the_round_behind_it_is_left_alone(process: Any, lock: threading.RLock) -> None:
    """A planned change took it into round 4 while round 3 went on without it: the end of that is nothing to it."""
    newcomer = worker_of(process.pid)
    newcomer.inside = 4
    release_of(lock).expect(life_of(newcomer), newcomer, 3)
    eventually(lambda: not timers(), "the timers to end")
    assert process.poll() is None


def test_nobody_is_killed_by_an_agent_that_has_closed(process: Any, lock: threading.RLock) -> None:
    """Its timers are gone."""
    release, worker = release_of(lock), worker_of(process.pid)
    release.expect(life_of(worker), worker, 3)
    release.close()
    eventually(lambda: not timers(), "the timers to end")
    assert process.poll() is None


def test_a_busy_worker_is_waited_for_and_the_time_counts_from_its_end(process: Any, lock: threading.RLock) -> None:
    """Also one that gets busy after its round has ended; what it was busy with explains its delay until it is free."""
    worker, seen = worker_of(process.pid), list[tuple[str, float]]()
    doing = iter(["", *["in checkpoint"] * 40])
    ended = list[float]()

    def busy(pid: int) -> str:
        found = next(doing, "")
        if not found and seen[-1:] and seen[-1][0]:
            ended.append(SYSTEM.monotonic())
        return found

    def late(worker: Worker) -> None:
        seen.append((worker.busy, SYSTEM.monotonic()))

    Release(0.08, lock, busy, late).expect(life_of(worker), worker, 3)
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    told = [busy for busy, _ in seen]
    assert told == ["", *["in checkpoint"] * (len(told) - 1)]
    assert len(told) > 40
    assert seen[-1][1] > ended[0]  # it was still waited for when it was not busy any more


def test_a_page_that_cannot_be_read_explains_nothing(process: Any, lock: threading.RLock) -> None:
    """The others must not wait for ever because of it."""

    def busy(pid: int) -> str:
        raise ValueError(f"the page of {pid} is torn")

    worker = worker_of(process.pid)
    Release(0.05, lock, busy).expect(life_of(worker), worker, 3)
    assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_slow_steps_get_more_time(lock: threading.RLock) -> None:
    """Two of them."""
    release = release_of(lock, 30.0)
    assert release.limit_s(worker_of(1)) == 30.0
    assert release.limit_s(worker_of(1, step_time_s=40.0)) == 80.0
