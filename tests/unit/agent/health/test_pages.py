"""The pages of a node's workers: read while they live, buried when they are dead, and never forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_trainer.agent.health import pages as module
from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.ipc.page import PAGE_BYTES, Heartbeat, PageWriter, start_of
from elastic_trainer.model import Phase
from tests.support.memory_store import ManualClock
from tests.support.waiting import LIMIT_S

Process = subprocess.Popen[bytes]


@pytest.fixture
def start() -> Iterator[Callable[[], Process]]:
    """StartupWatch processes that stay until they are killed."""
    started: list[Process] = []

    def one() -> Process:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def kill(process: Process) -> None:
    process.kill()
    process.wait(LIMIT_S)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pages(clock: ManualClock, tmp_path: Path) -> Iterator[Pages]:
    """Those of a node, in a place of the test's own."""
    pages = Pages(clock, tmp_path)
    yield pages
    pages.close()


def directory_of(pages: Pages) -> Path:
    assert pages.directory is not None
    return pages.directory


def page_of(pages: Pages, process: Process, slot: int = 0, **pulse: object) -> PageWriter:
    """The page that the worker ``process`` might write."""
    writer = PageWriter.create(directory_of(pages) / f"{slot}-{process.pid}.page")
    now = pages._clock.monotonic()
    writer.beat(Heartbeat(**{"phase": Phase.TRAINING, "phase_at": now, "rank": slot} | pulse))  # type: ignore[arg-type]
    writer.note(notes_of(process, slot, now))
    return writer


def notes_of(process: Process, slot: int, born_at: float) -> dict[str, object]:
    return {"pid": process.pid, "start": start_of(process.pid), "local_rank": slot, "born_at": born_at}


def test_the_step_of_a_worker_is_known_of_the_last_one_that_died_too(
    pages: Pages, start: Callable[[], Process]
) -> None:
    """One that has none, since it has not come to a state, reports nothing."""
    living, dead, new = start(), start(), start()
    page_of(pages, living, 0, round=2, step=7)
    page_of(pages, dead, 1, round=2, step=6)
    page_of(pages, new, 2, round=2)
    kill(dead)
    assert [pages.committed(each.pid) for each in (living, dead, new)] == [(2, 7), (2, 6), None]
    assert [each.pid for each in pages.look()] == [living.pid, new.pid]
    next_one = start()
    page_of(pages, next_one, 1, round=3, step=8)
    kill(next_one)
    assert [pages.committed(each.pid) for each in (next_one, dead)] == [(3, 8), None]


def test_the_rank_of_a_worker_that_nobody_has_missed_yet_is_known(pages: Pages, start: Callable[[], Process]) -> None:
    """The call that asks for it finds the death."""
    living, dead = start(), start()
    page_of(pages, living, 0, rank=4)
    page_of(pages, dead, 1, rank=5)
    kill(dead)
    assert pages.ranks() == {living.pid: 4, dead.pid: 5}
    assert pages.ranks() == {living.pid: 4, dead.pid: 5}


def test_living_workers_are_read_by_local_rank(pages: Pages, start: Callable[[], Process]) -> None:
    """A page that is just being made, and a file that is none, are passed over."""
    page_of(pages, start(), 1)
    page_of(pages, start(), 0)
    PageWriter.create(directory_of(pages) / "2-1.page")
    (directory_of(pages) / "3-1.page").write_bytes(b"")
    assert [reading.local_rank for reading in pages.look()] == [0, 1]


def test_a_file_that_grows_into_a_page_is_read(pages: Pages, start: Callable[[], Process]) -> None:
    """Between its making and its size it cannot be opened; that is not remembered."""
    process = start()
    path = directory_of(pages) / f"0-{process.pid}.page"
    path.touch()
    assert pages.look() == []
    path.unlink()
    page_of(pages, process)
    assert [reading.pid for reading in pages.look()] == [process.pid]
    assert path.stat().st_size == PAGE_BYTES


def test_what_a_dead_worker_counted_stays(pages: Pages, clock: ManualClock, start: Callable[[], Process]) -> None:
    """Its files go; its samples, its losses and how far it came are kept, and the next one's are added."""
    process = start()
    writer = page_of(pages, process, samples=8, step=5, nonfinite=2)
    writer.path.with_suffix(".stacks").touch()  # type: ignore[union-attr]
    (reading,) = pages.look()
    assert pages.nonfinite(reading) == 2
    kill(process)
    clock.advance(3.0)
    assert pages.look() == []
    assert [path.name for path in directory_of(pages).iterdir()] == ["lock"]
    assert (pages.counters()["samples"], pages.reached) == (8.0, 5)
    page_of(pages, start(), samples=1, step=3, nonfinite=1)
    (reading,) = pages.look()
    assert (pages.counters()["samples"], pages.nonfinite(reading), pages.reached) == (9.0, 3, 5)


def test_a_worker_that_dies_while_it_writes_keeps_what_it_had_written(
    pages: Pages, start: Callable[[], Process]
) -> None:
    """The record at hand is torn for good: the one before counts."""
    process = start()
    writer = page_of(pages, process, samples=8)
    pages.look()
    writer.memory[200] ^= 1
    assert [reading.pulse.samples for reading in pages.look()] == [8]
    kill(process)
    assert pages.look() == []
    assert pages.counters()["samples"] == 8.0


def test_closing_keeps_the_last_counts_and_removes_the_directory(
    clock: ManualClock, tmp_path: Path, start: Callable[[], Process]
) -> None:
    """Workers that live still, too; closing twice is once."""
    pages = Pages(clock, tmp_path)
    pages.employ(2)
    page_of(pages, start(), samples=8)
    clock.advance(5.0)
    pages.look()
    for _ in range(2):
        pages.close()
    assert list(tmp_path.iterdir()) == []
    assert pages.look() == []
    counters = pages.counters()
    assert (counters["samples"], counters["seconds.repeated"], counters["seconds.waiting"]) == (8.0, 5.0, 5.0)


AGENT = """
import sys
from pathlib import Path
from elastic_trainer.agent.health.pages import Pages
pages = Pages(root=Path(sys.argv[1]))
(pages.directory / "0-1.page").touch()
print(pages.directory, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_agent_left_behind_is_removed_by_the_next(tmp_path: Path) -> None:
    """Not while it lives: two agents on one machine leave each other alone."""
    command = [sys.executable, "-c", AGENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        directory = Path(agent.stdout.readline().decode().strip())
        mine = Pages(root=tmp_path)
        assert set(tmp_path.iterdir()) == {directory, mine.directory}
        kill(agent)
        second = Pages(root=tmp_path)
        assert set(tmp_path.iterdir()) == {second.directory, mine.directory}
    for pages in (mine, second):
        pages.close()


def test_a_node_without_a_place_for_pages_goes_on_without_them(clock: ManualClock, tmp_path: Path) -> None:
    """Metrics never end a training: it is logged once, and nothing is known of the workers."""
    pages = Pages(clock, tmp_path / "missing")
    assert (pages.directory, pages.look()) == (None, [])
    pages.count("workers_killed")
    assert pages.counters()["workers_killed"] == 1.0
    pages.close()
    pages.close()


def test_pages_are_where_temporary_files_are_if_there_is_no_shared_memory(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without /dev/shm, or where nothing can be made there."""
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pages = Pages(clock)
    assert pages.directory is not None
    assert pages.directory.parent == tmp_path
    pages.close()
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_the_last_session_alone_is_that_of_the_training(pages: Pages) -> None:
    """A script may open another one after it."""
    first = PageWriter.create(directory_of(pages) / "0-1-1.page")
    notes = {"pid": os.getpid(), "start": start_of("self"), "passed": True}
    first.note(notes)
    first.beat(Heartbeat())
    assert pages.passed()
    first.note(notes | {"closed": True})
    assert not pages.passed()
