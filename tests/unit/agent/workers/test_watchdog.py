"""Workers that answer nothing are killed; all others are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any, cast

import pytest

from elastic_trainer.agent.workers.conductor import Worker
from elastic_trainer.agent.workers.hang_rules import LATE
from elastic_trainer.agent.workers.watchdog import Watchdog, process_state
from elastic_trainer.ipc.channel import Connection, Ping
from tests.support.memory_store import ManualClock
from tests.unit.agent.stage import Line

LIMIT = 8.0


class NoKills:
    def __init__(self) -> None:
        self.ended: list[int] = []

    def kill(self, pid: int, reason: str, *, local_rank: int) -> None:
        self.ended.append(pid)


@pytest.fixture
def judge() -> NoKills:
    return NoKills()


def worker_of(pid: int, **options: Any) -> Worker:
    return Worker(cast("Connection", Line(pid, **options)), pid, 0, life=1)


def turns(watchdog: Watchdog, clock: ManualClock, count: int, *answering: Worker) -> None:
    """So many turns, each in time; ``answering`` workers answer each question."""
    for _ in range(count):
        clock.advance(watchdog.every_s)
        watchdog.turn()
        for worker in answering:
            worker.heard_at = clock.monotonic()


def test_who_answers_nothing_for_too_long_is_killed(judge: NoKills) -> None:
    """Not before the limit, however often it was asked; who answers is only asked."""
    clock, silent, talking = ManualClock(), worker_of(1), worker_of(2)
    watchdog = Watchdog(LIMIT, lambda: [silent, talking], judge.kill, clock)
    turns(watchdog, clock, 8, talking)
    assert judge.ended == []
    turns(watchdog, clock, 2, talking)
    assert set(judge.ended) == {1}
    assert all(isinstance(message, Ping) for message in cast("Any", talking.connection).sent)


def test_time_in_which_the_agent_stood_still_counts_for_nobody(judge: NoKills) -> None:
    """A whole node that was frozen and thawed: its workers get all their time again."""
    clock, worker = ManualClock(), worker_of(1)
    watchdog = Watchdog(LIMIT, lambda: [worker], judge.kill, clock)
    turns(watchdog, clock, 5)
    clock.advance(10 * LIMIT)
    watchdog.turn()
    turns(watchdog, clock, 7)
    assert judge.ended == []
    assert LATE * watchdog.every_s < LIMIT


@pytest.mark.parametrize("state", ["running", "traced"])
def test_a_worker_that_hangs_up_is_no_error_and_one_in_a_debugger_is_not_killed(
    judge: NoKills, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_trainer.agent.workers.watchdog.process_state", lambda pid: state)
    clock, worker = ManualClock(), worker_of(1, closed=True)
    turns(Watchdog(LIMIT, lambda: [worker], judge.kill, clock), clock, 30)
    assert set(judge.ended) == ({1} if state == "running" else set())


def test_the_state_of_a_process_is_the_kernels_word() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(process.pid) == "stopped"
        process.kill()
    assert process_state(process.pid) == "unknown"
    assert process_state(os.getpid()) == "running"
