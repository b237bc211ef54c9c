"""The heartbeat: each second belongs to one phase, and no figure on the page decreases."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.ipc.page import PHASES, WORK, PageReader, PageWriter, Reading
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment, worker_environment
from elastic_trainer.worker.report import HeartbeatReporter, process_age_s
from tests.support.memory_store import ManualClock

CPU = torch.device("cpu")
AGE_S = 3.0


class Bench:
    """A worker's tracker on a clock that the test moves, and the agent's look at its page."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.writer = PageWriter.create(path)
        self.tracker = HeartbeatReporter(self.writer, self.clock, age_s=AGE_S)
        self.born_at = self.clock.monotonic() - AGE_S
        self.tracker.beat()
        self.tracker.set_notes(pid=1)
        self.reader = PageReader(path)
        self.shown: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)

    def close(self) -> None:
        self.reader.close()
        path = self.writer.path
        assert path is not None
        path.unlink()

    def read(self) -> Reading:
        found = self.reader.read()
        assert found is not None
        return found

    def after(self, seconds: float) -> Bench:
        self.clock.advance(seconds)
        return self

    def page(self) -> dict[Phase, float]:
        return {phase: each for phase, each in self.read().seconds(self.clock.monotonic()).items() if each}

    def check(self) -> None:
        """The two invariants, at this moment."""
        now, reading = self.clock.monotonic(), self.read()
        assert sum(reading.pulse.seconds) == pytest.approx(reading.pulse.phase_at - self.born_at)
        assert sum(reading.last_seconds(now).values()) == pytest.approx(now - self.born_at)
        seconds_now = reading.seconds(now)
        for phase, seconds in seconds_now.items():
            assert seconds >= self.shown[phase] - 1e-9, f"{phase} was {self.shown[phase]}, and is {seconds}"
        self.shown = seconds_now

    def step(self, number: int, seconds: float = 1.0, *, waited: float = 0.0) -> None:
        self.tracker.step_begins(number)
        self.clock.advance(seconds)
        if waited:
            self.tracker.begin_wait()
            self.clock.advance(waited)
            self.tracker.resumes()
        self.tracker.note_step(number, 4)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "0-1.page")
    yield bench
    bench.close()


def placed(bench: Bench, round_: int = 1) -> HeartbeatReporter:
    bench.tracker.set_rank(0, 2, round_, CPU)
    bench.tracker.enter_now(Phase.TRAINING)
    return bench.tracker


# ---- where time goes


def test_time_counts_for_the_phase_it_is_spent_in(bench: Bench) -> None:
    """From the start of the process; phases nest, and an exception ends one too."""
    bench.after(1.0).tracker.enter_now(Phase.RENDEZVOUS)
    with bench.after(2.0).tracker.during(Phase.HEALING):
        bench.after(4.0)
    bench.after(8.0).tracker.enter_now(Phase.TRAINING)
    assert bench.page() == {Phase.STARTING: AGE_S + 1.0, Phase.RENDEZVOUS: 10.0, Phase.HEALING: 4.0}
    with bench.tracker.during(Phase.EVALUATION):
        bench.after(1.0)
        with pytest.raises(ZeroDivisionError), bench.tracker.during(Phase.CHECKPOINT):
            bench.after(2.0).clock.advance(1 / 0)
        bench.after(3.0)
    assert bench.read().phase is Phase.TRAINING
    assert (bench.page()[Phase.EVALUATION], bench.page()[Phase.CHECKPOINT]) == (4.0, 2.0)


def test_steps_that_were_made_before_are_repeated_work(bench: Bench) -> None:
    """Up to the newest step that is known to have been committed, by anybody; a committed one is never new again."""
    tracker = placed(bench)
    tracker.reached = 2
    for number in (1, 2, 3, 4):
        bench.step(number)
    assert tracker.reached == 4
    placed(bench, 2)
    bench.step(4)
    bench.step(5)
    page = bench.page()
    assert (page[Phase.REPEATED], page[Phase.TRAINING]) == (3.0, 3.0)


def test_a_step_that_was_given_up_is_lost_work(bench: Bench) -> None:
    """All of it but the wait for samples."""
    tracker = placed(bench)
    bench.step(1, 1.0)
    before = tracker.draws()
    bench.after(0.25)
    tracker.enter(before)
    tracker.step_begins(2)
    bench.after(2.0)
    tracker.begin_wait()
    bench.after(4.0)
    tracker.gave_up()
    tracker.enter_now(Phase.RENDEZVOUS)
    page = bench.page()
    assert page == {Phase.STARTING: AGE_S, Phase.TRAINING: 1.0, Phase.DATA: 0.25, Phase.REPEATED: 6.0}
    assert not bench.read().waits


def test_waiting_while_rank_0_saves_is_the_save(bench: Bench) -> None:
    """The ranks that do not save wait in their next step, which is no slower for that."""
    tracker = placed(bench)
    bench.step(1)
    bench.step(2)
    tracker.peer_saves()
    tracker.step_begins(3)
    bench.after(1.0)
    tracker.begin_wait()
    assert bench.read().phase is Phase.CHECKPOINT
    bench.after(30.0)
    tracker.resumes()
    assert bench.read().phase is Phase.TRAINING
    tracker.note_step(3, 1)
    assert bench.page() == {Phase.STARTING: AGE_S, Phase.TRAINING: 3.0, Phase.CHECKPOINT: 30.0}
    pulse = bench.read().pulse
    assert (pulse.step_s, pulse.compute_s) == (1.0, 1.0)
    bench.step(4, waited=2.0)
    assert bench.page()[Phase.CHECKPOINT] == 30.0


def test_a_wait_in_a_wait_is_one(bench: Bench) -> None:
    """Afterwards the worker does what it did before, and waits no more."""
    tracker = placed(bench)
    tracker.peer_saves()
    tracker.step_begins(1)
    tracker.begin_wait()
    tracker.begin_wait()
    bench.after(1.0)
    tracker.resumes()
    tracker.resumes()
    assert (bench.read().phase, bench.read().waits) == (Phase.TRAINING, False)


# ---- how long steps take


def test_a_step_is_timed_with_and_without_the_wait_for_others(bench: Bench) -> None:
    """Not the first of a round, which may compile; then a tenth of each new one moves the figure."""
    placed(bench)
    bench.step(1, 100.0)
    assert (bench.read().pulse.step_s, bench.read().pulse.fresh) == (0.0, 1)
    bench.step(2, 1.0, waited=3.0)
    assert (bench.read().pulse.step_s, bench.read().pulse.compute_s) == (4.0, 1.0)
    bench.step(3, 2.0, waited=12.0)
    assert bench.read().pulse.step_s == pytest.approx(5.0)
    assert bench.read().pulse.compute_s == pytest.approx(1.1)
    placed(bench, 2)
    bench.step(4, 50.0)
    assert bench.read().pulse.step_s == pytest.approx(5.0)


def test_a_commit_counts_steps_and_samples(bench: Bench) -> None:
    """Steps and samples of this process, steps of this round, and when the first of them was."""
    placed(bench, 7).holds(10)
    assert (bench.read().pulse.step, bench.read().pulse.steps, bench.read().pulse.fresh) == (10, 0, 0)
    for number in (11, 12):
        bench.step(number)
    pulse = bench.read().pulse
    assert (pulse.step, pulse.steps, pulse.fresh, pulse.samples, pulse.round) == (12, 2, 2, 8, 7)
    assert pulse.first_at == bench.clock.monotonic() - 1.0
    assert pulse.moved_at == pulse.stepped_wall == bench.clock.monotonic()
    placed(bench.after(5.0), 8)
    pulse = bench.read().pulse
    assert (pulse.fresh, pulse.steps, pulse.first_at) == (0, 2, 0.0)
    assert bench.read().still_s(bench.clock.monotonic()) == 0.0


# ---- losses, checkpoints, counts


def test_the_mean_loss_takes_precedence_over_the_own(bench: Bench) -> None:
    """One rank's stands for it only until it is known; what is not finite, or not known, is no loss."""
    tracker = bench.tracker
    tracker.knows_loss(2.0, own=True)
    assert tracker.pulse.loss == 2.0
    tracker.knows_loss(1.5)
    tracker.knows_loss(9.0, own=True)
    for nothing in (None, math.nan, math.inf):
        tracker.knows_loss(nothing)
    assert tracker.pulse.loss == 1.5


def test_saves_and_loads_are_counted_with_how_long_they_took(bench: Bench) -> None:
    """In buckets that are not cumulative; one that failed has no duration."""
    tracker = bench.tracker
    for duration_s in (0.02, 0.03, 1000.0):
        tracker.note_save(7, 123, duration_s)
    tracker.operated("save", 5.0, ok=False, error="OSError: full")
    tracker.operated("load", 2.0, ok=True)
    notes = bench.read().notes
    assert (notes["saves_failing"], notes["save_error"]) == (1, "OSError: full")
    assert notes["saved"] == {"step": 7, "wall": bench.clock.wall(), "bytes": 123, "duration_s": 1000.0}
    counts = dict(notes["counts"])
    assert counts.pop("save_s.sum") == pytest.approx(1000.05)
    assert counts == {
        "save.ok": 3,
        "save.failed": 1,
        "load.ok": 1,
        "save_s.le.0.03": 2,
        "save_s.le.inf": 1,
        "save_s.count": 3,
        "load_s.le.3": 1,
        "load_s.sum": 2.0,
        "load_s.count": 1,
    }


# ---- any order of calls

OUTER = [phase for phase in PHASES if phase not in WORK]
CALLS = st.tuples(
    st.sampled_from(
        [
            *("step", "give_up", "draw", "wait", "broken_wait", "peer_saves", "count_nonfinite", "moved", "rank"),
            *("change", "during", "fail", "end"),
        ]
    ),
    st.integers(0, 5),
    st.sampled_from(PHASES),
    st.sampled_from(OUTER),
    st.sampled_from([0.0, 0.001, 0.25, 1.0, 7.0]),
)


class Life:
    """Drives a tracker as a worker might, with bodies of phases open as long as the calls say."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.tracker, self.bodies = bench, bench.tracker, list[ExitStack]()
        self.number = 0

    def call(self, what: str, number: int, phase: Phase, outer: Phase, pause_s: float) -> None:
        tracker = self.tracker

        def passes() -> None:
            self.bench.after(pause_s).check()

        match what:
            case "step" | "give_up":
                self.number = max(1, self.number + 1 - number)
                tracker.step_begins(self.number)
                passes()
                if what == "step":
                    tracker.note_step(self.number, 1)
                else:
                    tracker.gave_up()
            case "draw":
                before = tracker.draws()
                passes()
                tracker.enter(before)
            case "wait" | "broken_wait":
                tracker.begin_wait()
                passes()
                tracker.resumes() if what == "wait" else tracker.gave_up()
            case "rank":
                tracker.set_rank(0, 2, number, CPU)
            case "change":
                tracker.enter_now(phase)
            case "during" | "fail":
                body = ExitStack()
                body.enter_context(tracker.during(outer))
                self.bodies.append(body)
                if what == "fail":
                    passes()
                    self.end(RuntimeError("in the body"))
            case "end":
                self.end(None)
            case _:
                getattr(tracker, what)()
        passes()

    def end(self, error: Exception | None) -> None:
        body = self.bodies.pop() if self.bodies else ExitStack()
        if error is None:
            body.close()
            return
        with pytest.raises(RuntimeError), body:
            raise error


def test_each_second_belongs_to_one_phase_and_nothing_shown_becomes_smaller(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whatever the order of calls, and whenever the page is read: what Prometheus counters need."""
    directory = tmp_path_factory.mktemp("pages")

    @settings(max_examples=400)
    @given(st.lists(CALLS, max_size=40))
    def live(calls: list[tuple[str, int, Phase, Phase, float]]) -> None:
        bench = Bench(directory / "0-1.page")
        try:
            life = Life(bench)
            bench.check()
            for each in calls:
                life.call(*each)
            while life.bodies:
                life.end(None)
                bench.check()
            bench.tracker.close()
            bench.after(1.0).check()
        finally:
            bench.close()

    live()


# ---- a process of its own


def environment(directory: Path | None, **more: str) -> WorkerEnvironment:
    """That of a worker in slot 3."""
    values = {"LOCAL_RANK": "3", "RANK": "7", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "r"}
    values |= {"MASTER_ADDR": "h", "MASTER_PORT": "1", "ELASTIC_TRAINER_NODE": "n1", **more}
    if directory is not None:
        values["ELASTIC_TRAINER_PAGES"] = str(directory)
    return worker_environment(values)


def test_the_page_identifies_its_worker(tmp_path: Path) -> None:
    """From the first look at its page on: process, place, and how old it is."""
    tracker = HeartbeatReporter.open(environment(tmp_path, ELASTIC_TRAINER_REACHED="41"))
    try:
        (path,) = tmp_path.glob("*.page")
        assert path.stem.rpartition("-")[0] == f"3-{os.getpid()}"
        reading = PageReader(path).read()
        assert reading is not None
        assert reading.is_alive
        assert (reading.pid, reading.local_rank, reading.pulse.rank) == (os.getpid(), 3, 7)
        assert reading.born_at == pytest.approx(reading.pulse.phase_at, abs=1.0)
        assert reading.notes["node"] == "n1"
        assert tracker.reached == 41
        assert 0.0 < process_age_s() < 24 * 3600.0
        assert process_age_s(tmp_path / "missing") == 0.0
    finally:
        tracker.close()


@pytest.mark.parametrize("place", ["nowhere", None])
def test_a_worker_runs_without_a_page(tmp_path: Path, place: str | None) -> None:
    tracker = HeartbeatReporter.open(environment(tmp_path / place if place else None))
    tracker.set_rank(1, 2, 3, CPU)
    tracker.step_begins(1)
    tracker.note_step(1, 2)
    tracker.close()
    assert tracker.pulse.steps == 1
    assert not list(tmp_path.rglob("*.page"))


def test_a_process_may_open_one_session_after_the_other(tmp_path: Path) -> None:
    """Each has a page; the agent buries the first when the second begins, and no second counts twice."""
    environment = WorkerEnvironment(pages=tmp_path)
    first = HeartbeatReporter.open(environment)
    first.note_step(1, 8)
    first.close()
    second = HeartbeatReporter.open(environment)
    second.note_step(2, 8)
    readings = [reader.read() for reader in map(PageReader, sorted(tmp_path.glob("*.page"), key=_number))]
    second.close()
    assert [each is not None and each.is_alive for each in readings] == [False, True]
    assert readings[0] is not None
    assert readings[1] is not None
    assert readings[1].born_at >= first.closed_at - 0.01
    assert sum(readings[1].pulse.seconds) < sum(readings[0].pulse.seconds) + 60.0
    assert [each.pulse.samples for each in readings if each is not None] == [8, 8]


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def test_the_threads_of_the_process_are_sampled(bench: Bench) -> None:
    bench.clock.advance(2.0)
    bench.tracker.note_step(1, 4)
    assert bench.read().pulse.threads >= 1
    bench.tracker.pulse.threads = -1
    bench.tracker.note_step(2, 4)
    assert bench.read().pulse.threads == -1
