"""The supervisor kills workers of a round that is over, after their grace, and no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from elastic_trainer.agent.workers import watchdog as module
from elastic_trainer.agent.workers.periodic import IDLE_S
from elastic_trainer.agent.workers.watchdog import AGAIN_S, Supervisor, kill_workers, worker_pids
from tests.support.memory_store import ManualClock
from tests.support.waiting import LIMIT_S

Spawn = Callable[..., subprocess.Popen[bytes]]
RUN = f"supervised-{os.getpid()}"
WITH_A_CHILD = """
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

    def start(run: str | None = RUN, code: str = "print(flush=True); input()") -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": run} if run else dict(os.environ)
        command = [sys.executable, "-S", "-c", code]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=environment, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_workers_are_found_by_parent_and_run_and_killed(spawn: Spawn) -> None:
    """Children of this process with exactly this run's id; no other child, nor a worker's own (a data loader's process
    inherits the variables)."""
    mine, strangers = [spawn(), spawn(code=WITH_A_CHILD)], [spawn("another-run"), spawn(f"{RUN}-2"), spawn(None)]
    first_line(strangers[-1])
    first_line(mine[0])
    grandchild = int(first_line(mine[1]))
    assert worker_pids(RUN) == sorted(process.pid for process in mine)
    kill_workers(RUN, "its round is over")
    assert [process.wait(LIMIT_S) for process in mine] == [-signal.SIGKILL] * 2
    assert [process.poll() for process in strangers] == [None] * 3
    os.kill(grandchild, signal.SIGKILL)


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(module, "kill_workers", lambda run, reason: found.append(run))
    return found


def test_workers_get_their_grace_and_are_killed_until_none_is_left(kills: list[str]) -> None:
    """torchrun may be forking while the round ends: the supervisor looks again."""
    clock = ManualClock()
    supervisor = Supervisor(RUN, 5.0, clock)
    supervisor.round_begun(3)
    assert supervisor.turn() == IDLE_S
    supervisor.round_over(3)
    assert supervisor.turn() == 5.0
    clock.advance(4.9)
    assert (supervisor.turn() < 0.2, kills) == (True, [])
    clock.advance(0.2)
    assert [supervisor.turn(), supervisor.turn()] == [AGAIN_S, AGAIN_S]
    assert kills == [RUN, RUN]


@pytest.mark.parametrize("begun", [0, 4])
def test_workers_of_another_round_are_spared(kills: list[str], begun: int) -> None:
    """News of an earlier round's end says nothing about workers of this one, however late it comes: a late joiner hears
    of rounds that were over before it came, and what torchrun starts within the grace is not of the old round."""
    clock = ManualClock()
    supervisor = Supervisor(RUN, 5.0, clock)
    if begun:
        supervisor.round_begun(3)
    supervisor.round_over(3)
    supervisor.turn()
    if begun:
        supervisor.round_begun(begun)
    clock.advance(60.0)
    assert (supervisor.turn(), kills) == (IDLE_S, [])
