"""The stacks of a worker that hangs, asked for by its agent, and of one that crashes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.ipc.page import crash_of, stacks_of
from tests.support.waiting import LIMIT_S, eventually

WORKER = """
import os, sys, time
from pathlib import Path
from elastic_trainer.settings import worker_environment
from elastic_trainer.worker.report import HeartbeatReporter
tracker = HeartbeatReporter.open(worker_environment(dict(os.environ, ELASTIC_TRAINER_PAGES=sys.argv[1])))
def stuck_in_this_very_function():
    print("ready", flush=True)
    sys.stdin.read()
stuck_in_this_very_function()
"""


CRASH = """
import ctypes, faulthandler, os, sys, threading, time
from elastic_trainer.settings import worker_environment
from elastic_trainer.worker.report import HeartbeatReporter
way = sys.argv[2]
if way == "own":
    faulthandler.enable()
libc, handler = ctypes.CDLL(None), ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: os._exit(3))
if way == "earlier":
    libc.signal(11, handler)
tracker = HeartbeatReporter.open(worker_environment(dict(os.environ, ELASTIC_TRAINER_PAGES=sys.argv[1])))
def crash_in_this_very_function():
    if way == "child":
        tracker.disown()
    elif way == "later":
        libc.signal(11, handler)
    if way in ("closed", "later", "again"):
        tracker.close()
    if way == "again":
        HeartbeatReporter.open(worker_environment(dict(os.environ, ELASTIC_TRAINER_PAGES=sys.argv[1])))
    if way == "threads":
        def deep(depth):
            if depth:
                deep(depth - 1)
            else:
                time.sleep(60)
        for _ in range(8):
            threading.Thread(target=deep, args=(90,), daemon=True).start()
        time.sleep(1)
    ctypes.string_at(0)
if way == "child":
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        sys.exit()
crash_in_this_very_function()
"""


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (page,) = tmp_path.glob("*.page")
        yield process, page
        process.kill()


def test_a_stuck_worker_writes_its_stacks_and_keeps_running(stuck: tuple[subprocess.Popen[bytes], Path]) -> None:
    """Each time that it is asked, only what is new."""
    process, page = stuck
    for _ in range(2):
        stacks = stacks_of(process.pid, page)
        assert stacks.count("stuck_in_this_very_function") == 1
    assert process.poll() is None


def test_a_stopped_worker_has_no_stacks_and_gets_no_signal(
    stuck: tuple[subprocess.Popen[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not answer; asked nevertheless, it would answer when it goes on."""
    monkeypatch.setenv("PATH", "")
    process, page = stuck
    process.send_signal(signal.SIGSTOP)
    status = Path(f"/proc/{process.pid}/status")
    eventually(lambda: "T (stopped)" in status.read_text(), "the worker stands")
    assert stacks_of(process.pid, page).startswith("none")
    (pending,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("ShdPnd")]
    assert int(pending, 16) == 0


def test_a_process_that_handles_no_such_signal_is_not_ended_by_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session is closed: the signal would kill it."""
    monkeypatch.setenv("PATH", "")
    (tmp_path / "0-1.stacks").touch()
    command = [sys.executable, "-c", "print('ready', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert stacks_of(process.pid, tmp_path / "0-1.page").startswith("none")
        assert process.poll() is None
        process.kill()
    assert stacks_of(process.pid, tmp_path / "0-1.page").startswith("none")


@pytest.mark.parametrize("way", ["plain", "threads", "own", "earlier", "later", "child", "closed", "again"])
def test_a_crash_says_where_it_was_unless_the_script_has_taken_that_over(tmp_path: Path, way: str) -> None:
    """A child's is not its parent's. Who handles such signals itself goes on to do so, such as a JVM in the process."""
    command = [sys.executable, "-c", CRASH, str(tmp_path), way]
    ended = subprocess.run(command, stderr=subprocess.PIPE, timeout=LIMIT_S, check=False)
    assert ended.returncode == {"child": 0, "earlier": 3, "later": 3}.get(way, -signal.SIGSEGV)
    page = max(tmp_path.glob("*.page"))
    told = way in ("plain", "threads", "closed", "again")
    assert ("in crash_in_this_very_function" in crash_of(page)) == told
    assert (b"in crash_in_this_very_function" in ended.stderr) == (way == "own")
