"""A signal that comes while an earlier one is being handled changes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from elastic_trainer.agent.rendezvous.launcher import unless_leaving
from elastic_trainer.errors import EXIT_LEFT

RAISED: list[int] = []
SWALLOWS = """
import os, signal, threading, time
from elastic_trainer.agent.rendezvous import launcher

class Swallowing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)

launcher.listen_for_sigterm()
threading.Timer(4.0, print, ["all threads have ended"]).start()
Swallowing()
time.sleep(60)
"""
HANGS = """
import atexit, os, signal, threading
from elastic_trainer.agent.rendezvous import launcher

launcher._LIMIT_S = 1.5
if %s:
    atexit.register(threading.Event().wait)
launcher.listen_for_sigterm()
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


HANGUP = """
import os, signal, sys
from torch.distributed.elastic.multiprocessing import SignalException, api
from elastic_trainer.agent.rendezvous import launcher

signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
launcher.listen_for_sigterm()

class Started(api.PContext):
    def __init__(self): self._tail_logs = []
    def _start(self): pass
    _poll = pids = _close = None

if sys.argv[2] == "workers":
    Started.__abstractmethods__ = frozenset()
    Started().start()
try:
    os.kill(os.getpid(), signal.SIGHUP)
except SignalException as error:
    print(error.sigval.name)
else:
    print(signal.getsignal(signal.SIGHUP).name)
"""


@pytest.mark.parametrize(
    ("start", "when", "said", "code"),
    [
        ("nohup", "early", "SIG_IGN\n", 0),
        ("nohup", "workers", "SIG_IGN\n", 0),
        ("terminal", "early", "", EXIT_LEFT),
        ("terminal", "workers", "SIGHUP\n", 0),
    ],
)
def test_a_hangup_asks_to_leave_unless_it_was_ignored_at_the_start(start: str, when: str, said: str, code: int) -> None:
    """torchrun installs its handlers as it starts the first workers, which inherit what is ignored."""
    command = [sys.executable, "-c", HANGUP, start, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == (said, code), done.stderr
    assert ("SIGHUP came before the workers were started" in done.stderr) == (code == EXIT_LEFT)


@pytest.mark.parametrize("at_exit", [True, False])
def test_a_process_whose_end_hangs_ends_all_the_same(at_exit: bool) -> None:
    """In what cleans up while the exception goes through it, or in what Python calls at its exit."""
    script = HANGS % (at_exit, "pass" if at_exit else "threading.Event().wait()")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=100)
    assert done.returncode == EXIT_LEFT, done.stderr
