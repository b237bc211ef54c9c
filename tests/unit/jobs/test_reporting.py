"""What one sees of a run, and what it leaves to look at: its files, lines, a bar, curves, loggers."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from structlog.testing import capture_logs

from elastic_trainer.checkpoint.retention import BestMode
from elastic_trainer.errors import EXIT_CANNOT_WRITE, ConfigError, StorageError
from elastic_trainer.jobs import loggers
from elastic_trainer.jobs.config import LoggingConfig
from elastic_trainer.jobs.curves import curves_of, read_curves
from elastic_trainer.jobs.files import HISTORY_FILE, STEPS_FILE, History
from elastic_trainer.jobs.loggers import Background, Loggers, Opening, TrackedRun, check_loggers, register_logger
from elastic_trainer.jobs.reporting import (
    Lines,
    ProgressMoment,
    Reporter,
    StepLog,
    StepRate,
    Terminal,
    TrainingProgress,
    progress,
)
from elastic_trainer.jobs.task import Exhibits
from elastic_trainer.telemetry import logs
from tests.support.memory_store import ManualClock


def _history(*accuracies: float) -> History:
    history = History()
    for number, accuracy in enumerate(accuracies, start=1):
        history.observe(1.0 / number, 10)
        history.add(step=10 * number, epoch=number, samples=0, lr=0.1, metrics={"accuracy": accuracy})
    return history


def _lines(directory: Path, name: str = HISTORY_FILE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def test_the_training_loss_is_a_mean_over_samples_since_the_last_record() -> None:
    history = History()
    history.observe(1.0, 30)
    history.observe(4.0, 10)
    first = history.add(2, 1, 0, 0.1, {"accuracy": 0.5})
    second = history.add(2, 1, 0, 0.1, {"accuracy": 0.5})
    assert first.train_loss == 1.75
    assert second.train_loss is None


@pytest.mark.parametrize("how", ["settle", "state_dict", "add", "await_loss"])
def test_what_is_awaited_is_counted_once_and_before_it_would_be_missed(how: str) -> None:
    history = History()
    history.await_loss(lambda: history.observe(2.0, 10))
    acts: dict[str, Callable[[], object]] = {
        "settle": history.add_awaited,
        "state_dict": history.state_dict,
        "add": lambda: history.add(1, 0, 10, 0.1, {}),
        "await_loss": lambda: history.await_loss(lambda: None),
    }
    acts[how]()
    assert [each.train_loss for each in history.records] == [2.0] * (how == "add")
    assert history.state_dict()["loss_sum"] == (0.0 if how == "add" else 20.0)
    peer = History()
    peer.observe(1.0, 5)
    history.await_loss(lambda: history.observe(2.0, 10))
    history.load_state_dict(peer.state_dict())  # the step that it was about may not be part of the state that comes
    assert history.state_dict() == peer.state_dict()


def _travelled(history: History) -> History:
    """As a checkpoint keeps it."""
    copy = History()
    copy.load_state_dict(json.loads(json.dumps(history.state_dict())))
    return copy


def test_the_best_is_the_earliest_of_equals_never_nan_and_where_wanted_none_that_the_storage_refused() -> None:
    """Also after the state has travelled, whose sums under way are exact."""
    history = _history(0.5, 0.9, 0.9, float("nan"), 0.1)
    history.saved_or_refused(10, saved=True)
    history.saved_or_refused(20, saved=False)
    history.observe(1 / 3, 7)
    for each in (history, _travelled(history)):
        found = [each.best(*what) for what in (("accuracy", BestMode.MAX), ("accuracy", BestMode.MIN))]
        found.append(each.best("accuracy", BestMode.MAX, kept=True))
        assert [best and best.step for best in found] == [20, 50, 30]
        assert each.best("loss", BestMode.MAX) is None
        assert (each.saved_step, each.add(60, 6, 0, 0.1, {}).train_loss) == (20, 1 / 3 * 7 / 7)


def test_each_record_becomes_one_line_with_notes(tmp_path: Path) -> None:
    """New records are appended; lines that are there already stay byte for byte. A run that resumes before its last
    evaluation replaces its line."""
    history = _history(0.1)
    history.write(tmp_path, {"world_size": 3})
    before = (tmp_path / HISTORY_FILE).read_bytes()
    history.add(20, 2, 0, 0.05, {"accuracy": 0.2})
    history.write(tmp_path, {"world_size": 2})
    history.write(tmp_path, {"world_size": 9})
    assert (tmp_path / HISTORY_FILE).read_bytes().startswith(before)
    assert [(line["step"], line["metrics"]["accuracy"], line["world_size"]) for line in _lines(tmp_path)] == [
        (10, 0.1, 3),
        (20, 0.2, 2),
    ]
    resumed = _history(0.1, 0.25)
    resumed.write(tmp_path, {"world_size": 4})
    assert (tmp_path / HISTORY_FILE).read_bytes().startswith(before)
    assert [(line["step"], line["world_size"]) for line in _lines(tmp_path)] == [(10, 3), (20, 4)]


@pytest.mark.parametrize("damage", ["", '{"step": 1', "null\n", "[]\n", "\xff\n", '{"step": 10}\n'])
def test_a_torn_or_foreign_file_is_rebuilt_from_the_state(tmp_path: Path, damage: str) -> None:
    """Whatever is in the file, after a write it says what the state says; a line cut off after its last character
    would swallow the next one."""
    path, history = tmp_path / HISTORY_FILE, _history(0.1, 0.2)
    path.write_text(damage, encoding="latin-1")
    for _ in range(2):
        history.write(tmp_path, {})
        assert [line["step"] for line in _lines(tmp_path)] == [10, 20]
        path.write_text(path.read_text().splitlines()[0])


def test_values_that_json_cannot_say_are_null_and_still_recognised(tmp_path: Path) -> None:
    """The file stays readable for every JSON parser, and its lines are kept when the same state writes again."""
    history = _history(float("nan"), float("inf"))
    history.write(tmp_path, {"attempt": 1})
    history.write(tmp_path, {"attempt": 2})
    text = (tmp_path / HISTORY_FILE).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert [(line["metrics"], line["attempt"]) for line in _lines(tmp_path)] == [({"accuracy": None}, 1)] * 2
    (tmp_path / HISTORY_FILE).unlink()
    (tmp_path / HISTORY_FILE).mkdir()
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written") as caught:
        history.write(tmp_path, {})
    assert caught.value.exit_code == EXIT_CANNOT_WRITE


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.configure(stream, json=True)
    yield stream
    logs.configure()


def moment(step: int, world: int = 2, round: int = 1) -> ProgressMoment:
    return ProgressMoment(step=step, steps=100, epoch=step // 10, world_size=world, round=round)


def test_a_rate_follows_a_change_within_its_window() -> None:
    clock = ManualClock()
    rate = StepRate(clock)
    assert rate.read() == (0.0, 0.0)
    for samples in [64] * 20 + [32] * 20:
        rate.count(samples)
        clock.advance(1.0)
        last = rate.read()
    assert last == pytest.approx((32.0, 1.0), rel=0.1)


def _shown(log: io.StringIO, steps: int, first_s: float) -> list[dict[str, Any]]:
    """The lines of a run whose steps take 0.1 s, but for the first."""
    clock = ManualClock()
    lines, rate = Lines(2.0, clock), StepRate(clock)
    for step in range(1, 1 + steps):
        clock.advance(first_s if step == 1 else 0.1)
        rate.count(32)
        if lines.due():
            lines.report(moment(step, 3, 4), 0.5, rate.read())
    return [json.loads(line) for line in log.getvalue().splitlines()]


def test_lines_come_at_most_once_a_period(log: io.StringIO) -> None:
    """Ten seconds give five lines at a period of 2 s, each complete."""
    told = _shown(log, 100, 0.1)
    assert 4 <= len(told) <= 5
    last = told[-1]
    assert last["event"] == "training.progressed"
    assert (last["world_size"], last["round"], last["loss"]) == (3, 4, 0.5)
    assert last["samples_per_s"] == pytest.approx(320.0, rel=0.1)
    assert last["eta_s"] == pytest.approx((100 - last["step"]) * 0.1, rel=0.15, abs=0.2)


def test_no_line_shows_a_speed_that_is_not_known_yet(log: io.StringIO) -> None:
    """The first step may take longer than the period, and its samples are not counted over no time at all."""
    (line,) = _shown(log, 30, 5.0)
    assert line["samples_per_s"] == pytest.approx(320.0)
    Lines(1e9, ManualClock()).show_evaluation(moment(7), {"accuracy": 0.123456789})  # always
    line = json.loads(log.getvalue().splitlines()[-1])
    assert (line["event"], line["step"], line["metrics"]) == ("training.evaluated", 7, {"accuracy": 0.123457})


def test_a_bar_shows_where_the_run_stands_and_gives_standard_error_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns nothing is cut, and nothing is shown before there is a loss. By itself only a terminal gets one."""
    assert type(progress(LoggingConfig(progress="none"))) is TrainingProgress
    assert isinstance(progress(LoggingConfig(), io.StringIO()), Lines)
    monkeypatch.setenv("COLUMNS", "80")
    stream, before = io.StringIO(), sys.stderr
    progress(LoggingConfig(progress="bar"), stream).close()  # it had nothing to show
    assert (stream.getvalue(), sys.stderr is before) == ("", True)
    bar = progress(LoggingConfig(progress="bar"), stream)
    assert isinstance(bar, Terminal)
    assert bar.due()
    bar.show_evaluation(moment(40), {"accuracy": 0.875, "loss": 0.3})
    assert stream.getvalue() == ""
    bar.report(moment(41, 3, 4), 0.25, (123_456.0, 10.0))
    bar.close()
    assert sys.stderr is before
    shown = stream.getvalue()
    for part in ("epoch", "41/100", "ETA", "loss 0.2500", "123,456 samples/s", "3 ranks, round 4", "accuracy 0.8750"):
        assert part in shown
    assert "…" not in shown


def test_losses_evaluations_and_changes_are_lines_of_json(tmp_path: Path) -> None:
    """Each with where the run was; what JSON cannot say is null."""
    log = StepLog(tmp_path)
    log.round(moment(0), "2 nodes are present")
    log.loss(moment(10), 0.5, 1e-3, 123.456)
    log.loss(moment(20), float("nan"), 1e-3, 120.0)
    log.write_evaluation(moment(20), {"accuracy": 0.9, "loss": float("inf")})
    first, loss, lost, evaluation = _lines(tmp_path, STEPS_FILE)
    assert [first[key] for key in ("kind", "step", "reason", "world_size")] == ["round", 0, "2 nodes are present", 2]
    assert [loss[key] for key in ("kind", "step", "epoch", "loss", "samples_per_s")] == ["loss", 10, 1, 0.5, 123.5]
    assert lost["loss"] is None
    assert evaluation["metrics"] == {"accuracy": 0.9, "loss": None}
    assert all(isinstance(each["wall"], float) for each in _lines(tmp_path, STEPS_FILE))


def test_a_line_that_was_torn_is_ended_and_passed_over(tmp_path: Path) -> None:
    """A process killed in mid-write spoils no line but its own."""
    (tmp_path / STEPS_FILE).write_text('{"kind": "loss", "step": 10, "loss": 0.5}\n{"kind": "loss", "st')
    StepLog(tmp_path).loss(moment(20), 0.25, 1e-3, 1.0)
    assert read_curves(tmp_path).losses == {10: 0.5, 20: 0.25}


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path, log: io.StringIO) -> None:
    steps = StepLog(tmp_path)
    (tmp_path / STEPS_FILE).mkdir()
    steps.loss(moment(1), 1.0, 1.0, 1.0)
    steps.loss(moment(2), 1.0, 1.0, 1.0)
    assert log.getvalue().count("steps.not_written") == 1
    assert "directory" in log.getvalue()


def lines(*records: dict[str, Any]) -> list[str]:
    return [json.dumps(record) for record in records]


def loss(step: int, value: float | None) -> dict[str, Any]:
    return {"kind": "loss", "step": step, "loss": value}


def change(step: int, round: int, world: int, reason: str) -> dict[str, Any]:
    return {"kind": "round", "step": step, "round": round, "world_size": world, "reason": reason}


def test_steps_that_are_done_again_count_once() -> None:
    """A run that fell back to step 10 shows what it did the second time, and keeps the first aside."""
    told: list[dict[str, Any]] = [loss(10, 3.0), loss(20, 2.0), loss(30, 1.9)]
    told += [change(11, 2, 1, "node b was lost"), loss(20, 2.5)]
    told += [{"kind": "evaluation", "step": step, "metrics": {"accuracy": step / 100}} for step in (21, 22, 21)]
    curves = curves_of(lines(*told))
    assert curves.evaluations == {"accuracy": {21: 0.21}}  # that of step 22 was of a state that is gone
    assert curves.losses == {10: 3.0, 20: 2.5}
    assert curves.repeated == [[(20, 2.0), (30, 1.9)]]


def test_rows_of_a_rank_0_that_was_replaced_are_passed_over() -> None:
    """It was cut off, or stood still: its row comes behind those of the others, who went on from the same step. A run
    that begins anew, with small rounds, is none of that; nor are rows whose own change could not be written."""
    late = loss(20, 1.5) | {"round": 1}
    told = [change(0, 1, 3, ""), loss(10, 3.0), change(20, 2, 2, "node a was lost"), loss(30, 1.9) | {"round": 2}]
    after = [late, loss(40, 1.8) | {"round": 2}, loss(50, 1.7) | {"round": 3}]
    curves = curves_of(lines(*told, *after))
    assert curves.losses == {10: 3.0, 30: 1.9, 40: 1.8, 50: 1.7}
    assert curves.repeated == []
    curves = curves_of(lines(*told, change(30, 1, 2, "2 nodes are present"), loss(40, 1.6) | {"round": 1}))
    assert curves.losses == {10: 3.0, 30: 1.9, 40: 1.6}


def test_the_number_of_ranks_is_in_the_order_of_the_steps() -> None:
    """Also by a run that fell back behind a change of its ranks: that change is a thing of the past, but a change."""
    told = [change(0, 1, 3, ""), loss(40, 1.0), change(41, 2, 2, "node b was lost"), change(30, 1, 1, "1 node is here")]
    curves = curves_of(lines(*told, loss(40, 1.1), change(45, 2, 2, "node b joins")))
    assert list(curves.worlds.items()) == [(0, 3), (30, 1), (45, 2)]
    assert [each.step for each in curves.changes] == [0, 41, 30, 45]
    assert curves.repeated == [[(40, 1.0)]]


def test_changes_are_beginnings_plans_or_faults() -> None:
    """The beginning is none; joins and departures were planned, the rest are faults."""
    told = ((0, 2, "2 nodes are present"), (5, 3, "node c joins"), (9, 2, "node b was lost"), (12, 1, "node a leaves"))
    curves = curves_of(lines(*(change(step, n, world, why) for n, (step, world, why) in enumerate(told, 1))))
    assert [each.begins for each in curves.changes] == [True, False, False, False]
    assert [each.planned for each in curves.changes] == [True, True, False, True]
    assert curves.changes[2].label == "round 3: node b was lost (3 to 2 ranks)"
    assert curves.worlds == {0: 2, 5: 3, 9: 2, 12: 1}


def test_what_is_no_line_is_passed_over() -> None:
    odd = [loss(1, 9.0) | {"step": "7"}, {"kind": "loss"}, {"kind": "round", "step": 1, "world_size": 2, "round": None}]
    for line in ("", "{", "[]", "null", *lines(*odd), "[" * 9999):
        assert curves_of([line, *lines(loss(1, 2.0), loss(2, None))]).losses == {1: 2.0}, line


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no steps\.jsonl"):
        read_curves(tmp_path)
    (tmp_path / STEPS_FILE).touch()
    with pytest.raises(ConfigError, match="nothing to draw yet"):
        read_curves(tmp_path)


def test_only_rank_0_reports_and_each_round_once(tmp_path: Path) -> None:
    """Rank 0 may come here and go; a round in which it comes is told with its reason."""
    reporter = Reporter(LoggingConfig(progress="none"), tmp_path)
    reporter.lead(False, moment(0), "begins")
    reporter.looked(moment(10), 3.0, 0.1)
    assert not (tmp_path / STEPS_FILE).exists()
    reporter.lead(True, moment(11, 1, 2), "node a was lost")
    reporter.looked(moment(20, 1, 2), 2.0, 0.1)
    reporter.lead(True, moment(21, 2, 3), "node c joins")
    reporter.evaluated(moment(21, 2, 3), {"accuracy": 0.5}, Exhibits())
    reporter.lead(False, moment(30, 3, 4), "node d joins")
    reporter.looked(moment(30, 3, 4), 1.0, 0.1)
    assert not reporter.wants_exhibits
    assert [(each["kind"], each["step"]) for each in _lines(tmp_path, STEPS_FILE)] == [
        ("round", 11),
        ("loss", 20),
        ("round", 21),
        ("evaluation", 21),
    ]


class Recorder:
    """Keeps what it gets, once ``gate`` lets it; fails where that is None."""

    def __init__(self, gate: Event | None) -> None:
        self.gate, self.got = gate, list[tuple[Any, ...]]()

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        if self.gate is None:
            raise ConnectionError("no route to the tracker")
        assert self.gate.wait(60)
        self.got.append((group, dict(values), step))

    def exhibits(self, exhibits: Exhibits, step: int) -> None:
        self.got.append(("exhibits", step))

    def close(self, finished: bool) -> None:
        self.got.append(("closed", finished))


def opened() -> Event:
    gate = Event()
    gate.set()
    return gate


@pytest.fixture(autouse=True)
def own_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "_KINDS", dict(loggers._KINDS))


def test_a_registered_logger_gets_what_is_reported(tmp_path: Path) -> None:
    """In order, from the thread of its own, with the job's configuration when it is opened."""
    seen, recorder = list[Opening](), Recorder(opened())

    def make(opening: Opening) -> Recorder:
        seen.append(opening)
        return recorder

    register_logger("mine", make)
    reporter = Reporter(LoggingConfig(progress="none", loggers=("mine",)), tmp_path, {"seed": 1})
    at = moment(10, 2, 3)
    reporter.lead(True, at, "begins")
    reporter.looked(at, 0.5, None)
    reporter.evaluated(at, {"accuracy": 0.75}, Exhibits(texts={"sample": "To be"}))
    reporter.close(finished=True)
    assert seen == [Opening(tmp_path, 10, {"seed": 1})]
    assert recorder.got == [
        ("train", {"loss": 0.5, "world size": 2.0, "round": 3.0}, 10),
        ("test", {"accuracy": 0.75}, 10),
        ("exhibits", 10),
        ("closed", True),
    ]


@pytest.mark.parametrize("background", [True, False])
def test_a_logger_that_fails_is_given_up_with_one_warning(background: bool, tmp_path: Path) -> None:
    """While it is used, or while it is opened; the others go on."""
    whole = Recorder(opened())
    register_logger("failing", lambda opening: Recorder(None), background=background)
    register_logger("whole", lambda opening: whole, background=False)

    with capture_logs() as told:
        group = Loggers(["failing", "whole"], Opening(tmp_path, 0))
        for step in (1, 2):
            group.scalars("train", {"loss": 0.5}, step)
        group.close(True)
    assert [(line["event"], line["logger"], line["error"]) for line in told] == [
        ("logger.given_up", "failing", "no route to the tracker")
    ]
    assert [each[-1] for each in whole.got] == [1, 2, True]


def test_a_tracker_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points are dropped when too many wait, the end has a time limit, and the next logger waits for the last one."""
    monkeypatch.setattr(loggers, "_WAITING", 2)
    gate = Event()
    hanging, next_one = Recorder(gate), Recorder(opened())
    with capture_logs() as told:
        logger = Background("slow", lambda opening: hanging, Opening(tmp_path, 0), close_s=0.05)
        for step in range(9):
            logger.scalars("train", {"loss": 0.5}, step)
        logger.close(True)
        after = Background("slow", lambda opening: next_one, Opening(tmp_path, 9))
        after.scalars("train", {"loss": 0.5}, 9)
        assert next_one.got == []
        gate.set()
        after.close(True)
    assert [line["event"] for line in told] == ["logger.behind", "logger.unfinished"]
    steps = [each[2] for each in hanging.got if each[0] == "train"]
    assert steps[:2] == [0, 1]
    assert steps == sorted(steps)
    assert len(steps) <= 3
    assert [each[-1] for each in next_one.got] == [9, True]


def test_steps_of_a_tracked_run_only_rise(tmp_path: Path) -> None:
    """Also those of a life that fell back to a checkpoint, or of another rank 0."""
    first = TrackedRun(tmp_path, "tracker")
    assert first.id is None
    first.begin("r1")
    assert [first.is_new("train", step) for step in (10, 20)] == [True, True]
    again = TrackedRun(tmp_path, "tracker")
    assert again.id == "r1"
    assert [again.is_new("train", step) for step in (10, 20, 30)] == [False, False, True]
    assert again.is_new("test", 20)


def test_mistakes_are_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no logger 'wandbb' .*use one of mlflow, tensorboard, wandb"):
        check_loggers(["wandbb"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tensorboard is not installed .*elastic-trainer\[tensorboard\]"):
        check_loggers(["tensorboard"])
