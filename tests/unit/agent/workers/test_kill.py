"""Workers that are ended by force, and why."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.agent.workers.watchdog import HungWorkers, kill_now
from tests.support.waiting import LIMIT_S


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def watched(directory: Path) -> tuple[HungWorkers, list[int], list[int]]:
    """Hung workers, with a 1 for each that was counted, and the process ids whose pages were asked for."""
    counted, asked = list[int](), list[int]()

    def page_of(pid: int) -> Path:
        asked.append(pid)
        return directory / "0-1.page"

    return HungWorkers(lambda: counted.append(1), page_of), counted, asked


def test_a_hung_worker_is_ended_and_counted_once(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Both watchdogs may find it; whoever reports the others learns why, for each worker."""
    hung, counted, asked = watched(tmp_path)
    hung.kill(process.pid, "it stood still", local_rank=0)
    hung.kill(process.pid, "it said nothing", local_rank=0)
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    assert (counted, asked) == ([1], [process.pid])
    assert hung.take(process.pid) == "it stood still"
    assert hung.take(1) is None


def test_a_reason_is_taken_once(process: subprocess.Popen[bytes]) -> None:
    hung = HungWorkers()
    assert hung.take_any() is None
    hung.kill(process.pid, "it stood still", local_rank=0)
    assert hung.take_any() == "it stood still"
    assert hung.take_any() is None


def test_who_is_gone_is_not_counted(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Somebody was faster. Neither are its stacks logged, nor is a reason kept for the next process of that id."""
    hung, counted, asked = watched(tmp_path)
    process.kill()
    process.wait(LIMIT_S)
    assert not kill_now(process.pid, "again")
    hung.kill(process.pid, "it stood still", local_rank=0)
    assert (counted, asked, hung.take(process.pid)) == ([], [], None)
