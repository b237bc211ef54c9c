"""The supervisor ends workers of a round that is over, after their grace, and no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_trainer.agent.workers.supervisor import Supervisor, worker_pids
from elastic_trainer.clock import SYSTEM, pause
from tests.support.crew import LIMIT_S, eventually

Spawn = Callable[..., subprocess.Popen[bytes]]
RUN = f"supervised-{os.getpid()}"
WAIT_FOR_EVER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"

HAVE_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
child.communicate(b"\\n")
"""


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a worker of a run, as torchrun does: a child of this process with the run's id in its environment."""
    started: list[subprocess.Popen[bytes]] = []

    def start(run: str | None = RUN) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": run} if run else dict(os.environ)
        command = [sys.executable, "-S", "-c", WAIT_FOR_EVER]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """One with a short grace."""
    running = Supervisor(RUN, 0.2)
    yield running
    running.close()


def test_workers_are_found_by_parent_and_run(spawn: Spawn) -> None:
    """Children of this process with exactly this run's id; no other child."""
    mine = [spawn(), spawn()]
    spawn("another-run")
    spawn(f"{RUN}-2")
    spawn(None)
    assert worker_pids(RUN) == sorted(process.pid for process in mine)


def test_children_of_workers_are_not_workers(spawn: Spawn) -> None:
    """A data loader's process inherits the variables; it is its parent's affair."""
    worker = spawn()
    parent = subprocess.Popen(
        [sys.executable, "-S", "-c", HAVE_A_CHILD],
        env={**os.environ, "TORCHELASTIC_RUN_ID": RUN},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    grandchild = int(parent.stdout.readline())
    assert worker_pids(RUN) == sorted([worker.pid, parent.pid])
    assert grandchild not in worker_pids(RUN)
    parent.communicate(b"\n")


def test_nothing_is_found_where_proc_does_not_tell(tmp_path: Path) -> None:
    """A missing or unreadable /proc means no worker, never an error."""
    assert worker_pids(RUN, tmp_path) == []
    task = tmp_path / "self" / "task" / "1"
    task.mkdir(parents=True)
    (task / "children").write_text("12345 67890 ")
    assert worker_pids(RUN, tmp_path) == []


def test_workers_of_a_round_that_is_over_are_killed_after_the_grace(spawn: Spawn, supervisor: Supervisor) -> None:
    """They ignore SIGTERM: SIGKILL ends them, not before their grace has passed; a stranger lives on."""
    workers, stranger = [spawn(), spawn()], spawn("another-run")
    supervisor.round_begun(3)
    over_at = SYSTEM.monotonic()
    supervisor.round_over(3)
    assert [process.wait(LIMIT_S) for process in workers] == [-signal.SIGKILL] * 2
    assert SYSTEM.monotonic() - over_at >= 0.2
    assert stranger.poll() is None


def test_workers_of_a_later_round_are_spared(spawn: Spawn, supervisor: Supervisor) -> None:
    """News of an earlier round's end says nothing about workers of this one, however late it comes."""
    supervisor.round_begun(4)
    worker = spawn()
    supervisor.round_over(3)
    pause(0.5)
    assert worker.poll() is None
    supervisor.round_over(4)
    assert worker.wait(LIMIT_S) == -signal.SIGKILL


def test_a_round_that_begins_within_the_grace_saves_the_new_workers(spawn: Spawn) -> None:
    """The old workers ended by themselves; what torchrun starts next is not theirs."""
    supervisor = Supervisor(RUN, 0.5)
    supervisor.round_begun(1)
    supervisor.round_over(1)
    supervisor.round_begun(2)
    worker = spawn()
    pause(0.8)
    assert worker.poll() is None
    supervisor.close()


def test_before_the_first_round_nobody_is_killed(spawn: Spawn, supervisor: Supervisor) -> None:
    """A late joiner hears of rounds that were over before it came."""
    worker = spawn()
    supervisor.round_over(9)
    pause(0.5)
    assert worker.poll() is None


def test_a_worker_that_comes_up_late_is_caught(spawn: Spawn, supervisor: Supervisor) -> None:
    """torchrun may be forking while the round ends: the supervisor looks again."""
    supervisor.round_begun(1)
    supervisor.round_over(1)
    pause(0.3)
    worker = spawn()
    assert worker.wait(LIMIT_S) == -signal.SIGKILL


def test_a_closed_supervisor_kills_nobody(spawn: Spawn) -> None:
    """After the handler's end its threads do nothing any more."""
    supervisor = Supervisor(RUN, 0.05)
    supervisor.round_begun(1)
    supervisor.close()
    worker = spawn()
    supervisor.round_over(1)
    pause(0.3)
    assert worker.poll() is None
    eventually(lambda: not supervisor._thread.is_alive(), "the supervisor's thread lives on")
