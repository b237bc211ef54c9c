"""Workers that answer nothing are ended; all others are left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from elastic_trainer.agent.workers.kill import Verdicts
from elastic_trainer.agent.workers.roster import Worker
from elastic_trainer.agent.workers.watchdog import LATE, Watchdog, process_state
from elastic_trainer.ipc.channel import ChannelClosedError, Connection
from elastic_trainer.ipc.messages import Message, Ping
from tests.support.crew import LIMIT_S, eventually
from tests.support.memory_store import ManualClock

LIMIT = 8.0


class Line:
    """A connection on which messages are noted."""

    def __init__(self, *, closed: bool = False) -> None:
        self.sent: list[Message] = []
        self._closed = closed

    def send(self, message: Message) -> None:
        if self._closed:
            raise ChannelClosedError("closed")
        self.sent.append(message)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Something that stays."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def worker_of(pid: int, **options: Any) -> Worker:
    return Worker(cast("Connection", Line(**options)), pid, 0, life=1)


def turns(watchdog: Watchdog, clock: ManualClock, count: int, *answering: Worker) -> None:
    """So many turns, each in time; ``answering`` workers answer each question."""
    for _ in range(count):
        clock.advance(watchdog.every_s)
        watchdog.look()
        for worker in answering:
            worker.heard_at = clock.monotonic()


def test_who_answers_nothing_for_too_long_is_killed(process: Any) -> None:
    """Not before the limit, however often it was asked; who answers is only asked."""
    clock, silent = ManualClock(), worker_of(process.pid)
    talking = worker_of(0)
    watchdog = Watchdog(LIMIT, lambda: [silent, talking], Verdicts(), clock)
    turns(watchdog, clock, 8, talking)
    assert process.poll() is None
    turns(watchdog, clock, 3, talking)
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    assert all(isinstance(message, Ping) for message in cast("Any", talking.connection).sent)


def test_time_in_which_the_agent_stood_still_counts_for_nobody(process: Any) -> None:
    """A whole node that was frozen and thawed: its workers get all their time again."""
    clock, worker = ManualClock(), worker_of(process.pid)
    watchdog = Watchdog(LIMIT, lambda: [worker], Verdicts(), clock)
    turns(watchdog, clock, 5)
    clock.advance(10 * LIMIT)
    watchdog.look()
    turns(watchdog, clock, 7)
    assert process.poll() is None
    assert LATE * watchdog.every_s < LIMIT


def test_a_worker_that_is_gone_or_hangs_up_is_no_error() -> None:
    """Others tell of its end."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(LIMIT_S)
    clock, worker = ManualClock(), worker_of(gone.pid, closed=True)
    turns(Watchdog(LIMIT, lambda: [worker], Verdicts(), clock), clock, 12)
    assert process_state(gone.pid) == "unknown"


def test_a_worker_in_a_debugger_is_not_killed(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody is looking at it."""
    monkeypatch.setattr("elastic_trainer.agent.workers.watchdog.process_state", lambda pid: "traced")
    clock, worker = ManualClock(), worker_of(process.pid)
    turns(Watchdog(LIMIT, lambda: [worker], Verdicts(), clock), clock, 30)
    assert process.poll() is None


def test_the_state_of_a_process_is_told_in_words(process: Any) -> None:
    """As the kernel knows it."""
    eventually(lambda: process_state(process.pid) == "sleeping", "the process to wait")
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: process_state(process.pid) == "stopped", "the process to stop")


def test_a_limit_of_zero_watches_nobody() -> None:
    """No thread is started."""
    watchdog = Watchdog(0.0, list, Verdicts())
    watchdog.start()
    assert watchdog._thread is None
    watchdog.close()
