"""The pages of a node's workers: read while they live, buried when they are dead, each second of theirs booked once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.agent.health import pages as module
from elastic_trainer.agent.health.pages import HELD_BACK_S, Pages, TimeAccounting
from elastic_trainer.ipc.page import PHASES, Heartbeat, PageWriter, Reading, start_of
from elastic_trainer.model import Phase
from tests.support.memory_store import ManualClock
from tests.support.waiting import LIMIT_S
from tests.unit.agent.readings import reading

Process = subprocess.Popen[bytes]


@pytest.fixture
def start() -> Iterator[Callable[[], Process]]:
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
    pages = Pages(clock, tmp_path)
    yield pages
    pages.close()


def directory_of(pages: Pages) -> Path:
    assert pages.directory is not None
    return pages.directory


def page_of(pages: Pages, process: Process, slot: int = 0, **pulse: object) -> PageWriter:
    writer = PageWriter.create(directory_of(pages) / f"{slot}-{process.pid}.page")
    now = pages._clock.monotonic()
    writer.beat(Heartbeat(**{"phase": Phase.TRAINING, "phase_at": now, "rank": slot} | pulse))  # type: ignore[arg-type]
    writer.write_notes(notes_of(process, slot, now))
    return writer


def notes_of(process: Process, slot: int, born_at: float) -> dict[str, object]:
    return {"pid": process.pid, "start": start_of(process.pid), "local_rank": slot, "born_at": born_at}


def test_step_and_rank_of_a_worker_are_known_of_the_last_one_that_died_too(
    pages: Pages, start: Callable[[], Process]
) -> None:
    living, dead, new = start(), start(), start()
    page_of(pages, living, 0, round=2, step=7, rank=4)
    page_of(pages, dead, 1, round=2, step=6, rank=5)
    page_of(pages, new, 2, round=2)
    kill(dead)
    for _ in range(2):
        assert pages.ranks() == {living.pid: 4, dead.pid: 5, new.pid: 2}
    assert [pages.position_of(each.pid) for each in (living, dead, new)] == [(2, 7), (2, 6), None]
    assert [each.pid for each in pages.living()] == [living.pid, new.pid]
    next_one = start()
    page_of(pages, next_one, 1, round=3, step=8)
    kill(next_one)
    assert [pages.position_of(each.pid) for each in (next_one, dead)] == [(3, 8), None]


def test_living_workers_are_read_by_local_rank(pages: Pages, start: Callable[[], Process]) -> None:
    """A page that is just being made, and a file that is none, are passed over."""
    page_of(pages, start(), 1)
    page_of(pages, start(), 0)
    PageWriter.create(directory_of(pages) / "2-1.page")
    (directory_of(pages) / "3-1.page").write_bytes(b"")
    assert [reading.local_rank for reading in pages.living()] == [0, 1]


def test_what_a_dead_worker_counted_stays(pages: Pages, clock: ManualClock, start: Callable[[], Process]) -> None:
    """Its files go; its samples, its losses and how far it came are kept, and the next one's are added."""
    process = start()
    writer = page_of(pages, process, samples=8, step=5, nonfinite=2)
    writer.path.with_suffix(".stacks").touch()  # type: ignore[union-attr]
    (reading,) = pages.living()
    assert pages.nonfinite_losses(reading) == 2
    kill(process)
    clock.advance(3.0)
    assert pages.living() == []
    assert [path.name for path in directory_of(pages).iterdir()] == ["lock"]
    assert (pages.counters()["samples"], pages.reached) == (8.0, 5)
    page_of(pages, start(), samples=1, step=3, nonfinite=1)
    (reading,) = pages.living()
    assert (pages.counters()["samples"], pages.nonfinite_losses(reading), pages.reached) == (9.0, 3, 5)


def test_a_worker_that_dies_while_it_writes_keeps_what_it_had_written(
    pages: Pages, start: Callable[[], Process]
) -> None:
    process = start()
    writer = page_of(pages, process, samples=8)
    pages.living()
    writer.memory[200] ^= 1
    assert [reading.pulse.samples for reading in pages.living()] == [8]
    kill(process)
    assert pages.living() == []
    assert pages.counters()["samples"] == 8.0


def test_closing_keeps_the_last_counts_and_removes_the_directory(
    clock: ManualClock, tmp_path: Path, start: Callable[[], Process]
) -> None:
    pages = Pages(clock, tmp_path)
    pages.employ(2)
    page_of(pages, start(), samples=8)
    clock.advance(5.0)
    pages.living()
    for _ in range(2):
        pages.close()
    assert list(tmp_path.iterdir()) == []
    assert pages.living() == []
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
    assert (pages.directory, pages.living()) == (None, [])
    pages.count_event("workers_killed")
    assert pages.counters()["workers_killed"] == 1.0
    pages.close()
    pages.close()


def test_pages_are_where_temporary_files_are_if_there_is_no_shared_memory(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pages = Pages(clock)
    assert pages.directory is not None
    assert pages.directory.parent == tmp_path
    pages.close()
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_the_last_session_alone_is_that_of_the_training(pages: Pages) -> None:
    first = PageWriter.create(directory_of(pages) / "0-1-1.page")
    notes = {"pid": os.getpid(), "start": start_of("self"), "passed": True}
    first.write_notes(notes)
    first.beat(Heartbeat())
    assert pages.passed()
    first.write_notes(notes | {"closed": True})
    assert not pages.passed()


BEGAN = 1000.0


def told(accounts: TimeAccounting, living: list[Reading], now: float) -> dict[str, float]:
    """The seconds that are not 0, by phase."""
    accounts.book(living, now)
    total = accounts.total(living, now)
    return {
        name.removeprefix("seconds."): value for name, value in total.items() if name.startswith("seconds.") and value
    }


def test_the_time_before_a_worker_is_that_of_its_agent() -> None:
    """What the agent did between, phase by phase, up to the beginning of the worker's process."""
    accounts = TimeAccounting(BEGAN)
    accounts.employ(1)
    accounts.mode(Phase.RENDEZVOUS, BEGAN + 5.0)
    accounts.mode(Phase.STARTING, BEGAN + 7.0)
    assert told(accounts, [], BEGAN + 10.0) == {}
    worker = reading(Phase.STARTING, born_at=BEGAN + 8.0, phase_at=BEGAN + 8.0)
    assert told(accounts, [worker], BEGAN + 10.0) == {"waiting": 5.0, "rendezvous": 2.0, "starting": 3.0}


def test_a_worker_that_dies_leaves_its_counts_and_a_gap() -> None:
    accounts = TimeAccounting(BEGAN)
    accounts.employ(1)
    accounts.mode(Phase.STARTING, BEGAN)
    first = reading(
        pid=1,
        born_at=BEGAN,
        phase_at=BEGAN + 10.0,
        seconds={Phase.TRAINING: 10.0},
        samples=40,
        steps=10,
        nonfinite=2,
        notes={"counts": {"save.ok": 1}},
    )
    told(accounts, [first], BEGAN + 11.0)
    accounts.bury(first, BEGAN + 12.0)
    accounts.mode(Phase.RENDEZVOUS, BEGAN + 12.0)
    second = reading(Phase.STARTING, pid=2, born_at=BEGAN + 15.0, phase_at=BEGAN + 15.0, samples=4, steps=1)
    assert told(accounts, [second], BEGAN + 16.0) == {
        "training": 10.0,
        "repeated": 2.0,
        "rendezvous": 3.0,
        "starting": 1.0,
    }
    total = accounts.total([second], BEGAN + 16.0)
    assert [total[name] for name in ("samples", "steps", "nonfinite_steps", "save.ok")] == [44, 11, 2, 1]


def test_a_slot_that_stays_empty_is_that_of_a_script_that_reports_nothing() -> None:
    """A minute later its time counts as training, once its agent has started it; before that, as what the agent did."""
    accounts = TimeAccounting(BEGAN)
    accounts.employ(1)
    accounts.mode(Phase.STARTING, BEGAN + 30.0)
    assert told(accounts, [], BEGAN + HELD_BACK_S) == {}
    assert told(accounts, [], BEGAN + HELD_BACK_S + 40.0) == {"waiting": 30.0, "training": 10.0}
    accounts.close(BEGAN + HELD_BACK_S + 50.0)
    assert sum(told(accounts, [], BEGAN + 500.0).values()) >= HELD_BACK_S + 50.0


def test_a_page_that_is_a_moment_behind_takes_nothing_back() -> None:
    accounts = TimeAccounting(BEGAN)
    healing = reading(Phase.HEALING, born_at=BEGAN, phase_at=BEGAN)
    assert told(accounts, [healing], BEGAN + 5.0) == {"healing": 5.0}
    training = reading(born_at=BEGAN, phase_at=BEGAN + 4.5, seconds={Phase.HEALING: 4.5})
    assert told(accounts, [training], BEGAN + 6.0) == {"healing": 5.0}


@dataclass
class Worker:
    """One that comes, changes its phase, and dies, with no second untold."""

    pid: int
    slot: int
    born_at: float
    phase: Phase = Phase.STARTING
    phase_at: float = 0.0
    spent: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def __post_init__(self) -> None:
        self.phase_at = self.born_at

    def enter(self, phase: Phase, now: float) -> None:
        self.spent[self.phase] += now - self.phase_at
        self.phase, self.phase_at = phase, now

    def read(self) -> Reading:
        return reading(
            self.phase,
            pid=self.pid,
            slot=self.slot,
            born_at=self.born_at,
            phase_at=self.phase_at,
            seconds=self.spent,
            steps=int(self.phase_at),
        )


EVENTS = st.tuples(
    st.sampled_from(["start", "start", "die", "enter", "look", "mode", "employ"]),
    st.integers(0, 2),
    st.sampled_from(PHASES),
    st.sampled_from([0.0, 0.5, 3.0, 20.0, 100.0]),
    st.sampled_from([0.0, 0.25, 5.0, 90.0]),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=40))
def test_sums_never_become_smaller_and_hold_each_second_once(
    events: list[tuple[str, int, Phase, float, float]],
) -> None:
    """Whatever comes, dies and is reported late: at the end the sum is the time of all slots, to the second."""
    accounts, now, workers, pids = TimeAccounting(BEGAN), BEGAN, dict[int, Worker](), 0
    ended = dict.fromkeys(range(3), BEGAN)
    shown: dict[str, float] = {}
    accounts.employ(3)

    def check() -> None:
        nonlocal shown
        living = [worker.read() for worker in workers.values()]
        accounts.book(living, now)
        total = accounts.total(living, now)
        assert all(total[name] >= value - 1e-9 for name, value in shown.items())
        shown = total

    for what, slot, phase, pause_s, age_s in events:
        now += pause_s
        worker = workers.get(slot)
        if what == "start" and worker is None:
            pids += 1
            born_at = max(ended[slot], now - age_s)
            workers[slot] = Worker(pids, slot, born_at)
        elif what == "die" and worker is not None:
            check()
            accounts.bury(workers.pop(slot).read(), now)
            ended[slot] = now
        elif what == "enter" and worker is not None:
            worker.enter(phase, now)
        elif what == "mode":
            accounts.mode(phase, now)
        elif what == "employ":
            accounts.employ(3)
        check()
    for worker in workers.values():
        accounts.bury(worker.read(), now)
    accounts.close(now)
    assert sum(value for name, value in accounts.counters.items() if name.startswith("seconds.")) == pytest.approx(
        3 * (now - BEGAN)
    )
    workers.clear()
    check()
