"""Workers that do not leave a round that is over are ended; all others are left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from elastic_trainer.agent.release import FIRST_STEP_S, Release
from elastic_trainer.agent.roster import Life, Worker
from elastic_trainer.ipc.channel import Connection
from elastic_trainer.ipc.messages import Ready
from elastic_trainer.membership.documents import Identity
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


def worker_of(pid: int, number: int = 3, step_time_s: float = 0.0) -> Worker:
    """A worker that is in round ``number``."""
    ready = Ready(number=number, state=None, planned=False, step_time_s=step_time_s)
    return Worker(cast("Connection", None), pid, 0, life=1, ready=ready, inside=number, told_over=number)


def life_of(worker: Worker, steps: int = 5) -> Life:
    life = Life(1, 1, {0: worker})
    life.note(Identity(round=1, step=0, epoch=0, samples=0))
    life.note(Identity(round=1, step=steps, epoch=0, samples=0))
    return life


def test_a_worker_that_stays_in_a_round_is_killed(process: Any, lock: threading.RLock) -> None:
    """It was told that the round is over, and never said that it is free."""
    worker = worker_of(process.pid)
    Release(0.05, lock).expect(life_of(worker), worker, 3)
    assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_a_worker_that_is_free_is_left_alone(process: Any, lock: threading.RLock) -> None:
    """Whether the timer was stopped, or ran out just as the worker said so."""
    release, worker = Release(0.05, lock), worker_of(process.pid)
    release.expect(life_of(worker), worker, 3)
    release.freed(worker)
    late = worker_of(process.pid)
    late.ready = Ready(number=4, state=None, planned=False)
    other = Release(0.05, lock)
    other.expect(life_of(late), late, 3)
    eventually(lambda: not timers(), "the timers to end")
    assert process.poll() is None


def test_nobody_is_killed_by_an_agent_that_has_closed(process: Any, lock: threading.RLock) -> None:
    """Its timers are gone."""
    release, worker = Release(0.05, lock), worker_of(process.pid)
    release.expect(life_of(worker), worker, 3)
    release.close()
    eventually(lambda: not timers(), "the timers to end")
    assert process.poll() is None


def test_slow_steps_and_the_first_one_get_more_time(lock: threading.RLock) -> None:
    """Two steps, and a compilation before the first."""
    release = Release(30.0, lock)
    assert release.limit_s(life_of(worker_of(1)), worker_of(1)) == 30.0
    assert release.limit_s(life_of(worker_of(1)), worker_of(1, step_time_s=40.0)) == 80.0
    assert release.limit_s(life_of(worker_of(1), steps=0), worker_of(1)) == FIRST_STEP_S
