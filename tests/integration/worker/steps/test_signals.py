"""Signals end a process in time, with the right code, whatever its main thread does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, signal, sys, threading
from elastic_trainer.clock import pause
from elastic_trainer.telemetry import logs
from elastic_trainer.worker.steps.signals import Signals

logs.configure()
kind, patience_s = sys.argv[1], float(sys.argv[2])
signal.signal(signal.SIGHUP, signal.SIG_IGN if kind == "nohup" else signal.SIG_DFL)
signals = Signals(lambda: patience_s, lambda: "a peer left" if kind == "broken" else None)
signals.open()
print("ready", flush=True)
if kind == "deadlocked":
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # for ever, in C: no Python handler can run
while signals.requested is None or kind in ("waiting", "broken"):
    pause(0.01)
signals.note_stop()
pause(float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
signals.close()
print("closed", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, threading.active_count(), flush=True)
sys.exit(signals.exit_code)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise AssertionError(end(process))
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


CLOSED = "closed True 1\n"
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    ("words", "numbers", "code", "out", "said"),
    [
        ("cooperative 30", [TERM], 143, CLOSED, "SIGTERM"),
        ("cooperative 30", [INT], 130, CLOSED, "SIGINT"),
        ("cooperative 30", [HUP], 143, CLOSED, "SIGHUP"),
        ("nohup 30", [HUP, TERM], 143, CLOSED, "SIGTERM"),
        ("cooperative 0.3 1.5", [TERM], 143, CLOSED, "SIGTERM"),  # a checkpoint may take longer than the patience
        ("waiting 0.5", [TERM], 143, "", "the ranks did not agree to stop in time"),
        ("deadlocked 0.5", [TERM], 143, "", "the ranks did not agree to stop in time"),
        ("broken 3600", [TERM], 143, "", "the round is broken: a peer left"),  # they never can
    ],
)
def test_a_signal_is_a_wish_that_the_main_thread_acts_on_or_the_process_leaves(
    words: str, numbers: list[signal.Signals], code: int, out: str, said: str
) -> None:
    """By its own way, with everything that was taken over given back; when its patience ends, also if its main thread
    is blocked in C, where no Python handler would run. A terminal that closes ends nothing that nohup has started."""
    process = start(*words.split())
    for number in numbers:
        process.send_signal(number)
    ended, printed, err = end(process)
    assert (ended, printed) == (code, out)
    assert said in err
    assert "SIGHUP" not in err or HUP is numbers[-1]


def test_a_second_interrupt_ends_the_process_at_once() -> None:
    process = start("waiting", "3600")
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    try:
        assert "stop.requested" in process.stderr.readline()
    finally:
        process.send_signal(signal.SIGINT)
        code, _, err = end(process)
    assert code == 130
    assert "interrupted twice" in err


def test_a_session_outside_the_main_thread_leaves_signals_alone() -> None:
    code = (
        "import threading; from elastic_trainer.worker.steps.signals import Signals\n"
        "s = Signals(lambda: 1.0, lambda: None)\n"
        "t = threading.Thread(target=lambda: (s.open(), s.close())); t.start(); t.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "signals.left_alone" in done.stdout + done.stderr) == (0, True)


SAVING = """
import faulthandler, os, signal, sys
from elastic_trainer.clock import pause
from elastic_trainer.worker.steps.signals import SAVE, Signals

own = []
if sys.argv[1] == "script":
    signal.signal(SAVE, lambda *_: own.append(1))
elif sys.argv[1] == "faulthandler":
    faulthandler.register(SAVE, open(os.devnull, "w"))
signals = Signals(lambda: 1.0, lambda: None)
signals.open()
if sys.argv[1] == "later":
    signal.signal(SAVE, lambda *_: own.append(1))
os.kill(os.getpid(), SAVE)
for _ in range(30 if sys.argv[1] != "nobody" else 3000):
    if signals.save_requested:
        break
    pause(0.01)
print(signals.save_requested, len(own), signals.requested)
signals.close()
print(signal.getsignal(SAVE) is signal.SIG_DFL)
"""


@pytest.mark.parametrize(
    ("whose", "said"),
    [
        ("nobody", "True 0 None\nTrue\n"),
        ("script", "False 1 None\nFalse\n"),
        ("faulthandler", "False 0 None\nTrue\n"),
        ("later", "False 1 None\nFalse\n"),
    ],
)
def test_sigusr1_asks_for_a_save_unless_the_script_wants_it(whose: str, said: str) -> None:
    """Taken before the session was opened, by Python or by C, or while it is open."""
    done = subprocess.run([sys.executable, "-c", SAVING, whose], capture_output=True, text=True, timeout=60, check=True)
    assert "".join(done.stdout.splitlines(keepends=True)[-2:]) == said
