"""A signal that comes while an earlier one is being handled changes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from elastic_trainer.agent.rendezvous.sigterm import unless_leaving
from elastic_trainer.errors import EXIT_LEFT

RAISED: list[int] = []
SWALLOWS = """
import os, signal, threading, time
from elastic_trainer.agent.rendezvous import sigterm

class Swallowing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)

sigterm.listen()
threading.Timer(4.0, print, ["all threads have ended"]).start()
Swallowing()
time.sleep(60)
"""
HANGS = """
import atexit, os, signal, threading
from elastic_trainer.agent.rendezvous import sigterm

sigterm._LIMIT_S = 1.5
if %s:
    atexit.register(threading.Event().wait)
sigterm.listen()
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    %s
"""


@unless_leaving
def handler(number: int, frame: FrameType | None) -> None:
    RAISED.append(number)
    raise SignalException("", signal.Signals(number))


@pytest.fixture(autouse=True)
def nothing_raised() -> None:
    RAISED.clear()


@pytest.mark.parametrize("first", [SignalException("", signal.SIGTERM), SystemExit(EXIT_LEFT)])
def test_a_second_signal_does_not_disturb_the_end_of_the_workers(first: BaseException) -> None:
    """Neither directly, nor in the handling of another error meanwhile."""
    try:
        raise first
    except (SignalException, SystemExit):
        handler(signal.SIGTERM, None)
        try:
            raise TimeoutError
        except TimeoutError:
            handler(signal.SIGINT, None)
    assert RAISED == []


def test_a_signal_raises_again_when_its_exception_was_swallowed() -> None:
    for _ in range(2):
        with pytest.raises(SignalException):
            handler(signal.SIGTERM, None)
    assert RAISED == [signal.SIGTERM] * 2


@pytest.mark.parametrize("other", [SystemExit(1), TimeoutError()])
def test_a_signal_raises_while_another_error_is_handled(other: BaseException) -> None:
    try:
        raise other
    except (SystemExit, TimeoutError):
        with pytest.raises(SignalException):
            handler(signal.SIGTERM, None)


def test_a_signal_whose_exception_was_swallowed_ends_the_process_all_the_same() -> None:
    """A destructor swallows it; the end of Python, which takes its time, is not disturbed by the ones that follow."""
    process = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True, timeout=100, check=False)
    assert "Exception ignored in" in process.stderr
    assert process.returncode == EXIT_LEFT
    assert process.stderr.count("Traceback") == 1
    assert process.stdout == "all threads have ended\n"


@pytest.mark.parametrize("at_exit", [True, False])
def test_a_process_whose_end_hangs_ends_all_the_same(at_exit: bool) -> None:
    """In what cleans up while the exception goes through it, or in what Python calls at its exit."""
    script = HANGS % (at_exit, "pass" if at_exit else "threading.Event().wait()")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=100)
    assert done.returncode == EXIT_LEFT, done.stderr
