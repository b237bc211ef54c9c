"""The agent's threads, without threads: their turns, one after the other."""

from __future__ import annotations

import os
import threading

import pytest
from structlog.testing import capture_logs

from elastic_trainer.agent.workers.periodic import PeriodicThread
from elastic_trainer.agent.workers.watchdog import await_session, doing
from elastic_trainer.errors import EXIT_FAILURE, SessionTimeoutError
from tests.unit.agent.stage import Jumping


def test_a_turn_that_fails_is_logged_and_followed_by_the_next() -> None:
    """A dead thread would be silence. A turn says when the next one comes, unless somebody wakes it."""
    clock = Jumping()
    times: list[float] = []

    def turn() -> float:
        times.append(clock.monotonic() - 1000.0)
        if len(times) == 1:
            raise ValueError("a bug")
        if len(times) == 3:
            thread.wake()
        if len(times) == 4:
            thread.close()
        return 8.0

    thread = PeriodicThread("test", turn, clock)
    with capture_logs() as logs:
        thread._run()
    assert times == [0.0, 0.5, 8.5, 8.5]
    assert [(each["event"], each["thread"]) for each in logs] == [("thread.failed", "test")]


@pytest.mark.parametrize("comes", [False, True])
def test_a_script_that_prepares_for_long_is_left_alone_until_the_limit(comes: bool) -> None:
    """It may download its data, or compile; the log says so sooner, with what it does. It may be a download that hangs,
    so the node ends with an exit code that lets another try follow."""
    met, clock, errors = threading.Event(), Jumping(), list[SessionTimeoutError]()

    def workers() -> list[int]:
        if comes and clock.monotonic() > 2000.0:
            met.set()
        return [os.getpid()]

    with capture_logs() as logs:
        await_session(met, lambda: True, workers, 3600.0, errors.append, clock)
    assert [each["seconds"] for each in logs][:5] == [60, 120, 240, 480, 960]
    assert logs[0]["workers"].startswith(f"worker {os.getpid()} is running, after ")
    if comes:
        assert errors == []
        return
    (error,) = errors
    assert error.exit_code == EXIT_FAILURE
    assert str(error).startswith("no worker has opened an elastic_trainer.Session within 3600 s")
    assert "raise --rdzv-conf session_timeout" in str(error)
    assert doing([]) == "none lives"


def test_a_life_that_is_over_is_not_waited_for() -> None:
    errors = list[SessionTimeoutError]()
    await_session(threading.Event(), lambda: False, list, 3600.0, errors.append, Jumping())
    assert errors == []
