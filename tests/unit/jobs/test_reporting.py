"""What one sees of a run, and what it leaves to look at: lines, a bar, ``steps.jsonl`` and its curves."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import LoggingConfig
from elastic_trainer.jobs.curves import curves_of, read_curves
from elastic_trainer.jobs.files import STEPS_FILE
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


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.configure(stream, json=True)
    yield stream
    logs.configure()


def _moment(step: int) -> ProgressMoment:
    return ProgressMoment(step=step, steps=100, epoch=1, world_size=3, round=4)


def test_a_rate_follows_a_change_within_its_window() -> None:
    clock = ManualClock()
    rate = StepRate(clock)
    assert rate.read() == (0.0, 0.0)
    for samples in [64] * 20 + [32] * 20:
        rate.count(samples)
        clock.advance(1.0)
        last = rate.read()
    assert last == pytest.approx((32.0, 1.0), rel=0.1)


def test_lines_come_at_most_once_a_period(log: io.StringIO) -> None:
    """Ten seconds of steps every 0.1 s give five lines at a period of 2 s, each complete."""
    clock = ManualClock()
    lines, rate = Lines(2.0, clock), StepRate(clock)
    for step in range(1, 101):
        clock.advance(0.1)
        rate.count(32)
        if lines.due():
            lines.report(_moment(step), 0.5, rate.read())
    written = [json.loads(line) for line in log.getvalue().splitlines()]
    assert 4 <= len(written) <= 5
    last = written[-1]
    assert last["event"] == "training.progressed"
    assert (last["world_size"], last["round"], last["loss"]) == (3, 4, 0.5)
    assert last["samples_per_s"] == pytest.approx(320.0, rel=0.1)
    assert last["eta_s"] == pytest.approx((100 - last["step"]) * 0.1, rel=0.15, abs=0.2)


def test_no_line_shows_a_speed_that_is_not_known_yet(log: io.StringIO) -> None:
    """The first step may take longer than the period, and its samples are not counted over no time at all."""
    clock = ManualClock()
    lines, rate = Lines(2.0, clock), StepRate(clock)
    for step in range(1, 31):
        clock.advance(5.0 if step == 1 else 0.1)
        rate.count(32)
        if lines.due():
            lines.report(_moment(step), 0.5, rate.read())
    (line,) = [json.loads(line) for line in log.getvalue().splitlines()]
    assert line["samples_per_s"] == pytest.approx(320.0)


def test_an_evaluation_is_always_logged(log: io.StringIO) -> None:
    Lines(1e9, ManualClock()).evaluated(_moment(7), {"accuracy": 0.123456789})
    line = json.loads(log.getvalue())
    assert (line["event"], line["step"], line["metrics"]) == ("training.evaluated", 7, {"accuracy": 0.123457})


def test_only_a_terminal_gets_a_bar() -> None:
    assert type(progress(LoggingConfig(progress="none"))) is TrainingProgress
    assert isinstance(progress(LoggingConfig(), io.StringIO()), Lines)


def test_a_bar_shows_where_the_run_stands_and_gives_standard_error_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns nothing is cut, and nothing is shown before there is a loss."""
    monkeypatch.setenv("COLUMNS", "80")
    stream, before = io.StringIO(), sys.stderr
    bar = progress(LoggingConfig(progress="bar"), stream)
    assert isinstance(bar, Terminal)
    assert bar.due()
    bar.evaluated(_moment(40), {"accuracy": 0.875, "loss": 0.3})
    assert stream.getvalue() == ""
    bar.report(_moment(41), 0.25, (123_456.0, 10.0))
    bar.close()
    assert sys.stderr is before
    shown = stream.getvalue()
    for part in ("epoch", "41/100", "ETA", "loss 0.2500", "123,456 samples/s", "3 ranks, round 4", "accuracy 0.8750"):
        assert part in shown
    assert "…" not in shown


def test_a_bar_that_had_nothing_to_show_leaves_no_trace() -> None:
    stream, before = io.StringIO(), sys.stderr
    bar = progress(LoggingConfig(progress="bar"), stream)
    bar.close()
    assert stream.getvalue() == ""
    assert sys.stderr is before


def moment(step: int, world: int = 2, round: int = 1) -> ProgressMoment:
    return ProgressMoment(step=step, steps=100, epoch=step // 10, world_size=world, round=round)


def written(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / STEPS_FILE).read_text().splitlines()]


def test_losses_evaluations_and_changes_are_lines_of_json(tmp_path: Path) -> None:
    """Each with where the run was; what JSON cannot say is null."""
    log = StepLog(tmp_path)
    log.round(moment(0), "2 nodes are present")
    log.loss(moment(10), 0.5, 1e-3, 123.456)
    log.loss(moment(20), float("nan"), 1e-3, 120.0)
    log.evaluated(moment(20), {"accuracy": 0.9, "loss": float("inf")})
    first, loss, lost, evaluation = written(tmp_path)
    assert [first[key] for key in ("kind", "step", "reason", "world_size")] == ["round", 0, "2 nodes are present", 2]
    assert (loss["kind"], loss["step"], loss["epoch"], loss["loss"], loss["samples_per_s"]) == (
        "loss",
        10,
        1,
        0.5,
        123.5,
    )
    assert lost["loss"] is None
    assert evaluation["metrics"] == {"accuracy": 0.9, "loss": None}
    assert all(isinstance(each["wall"], float) for each in written(tmp_path))


def test_a_line_that_was_torn_is_ended_and_passed_over(tmp_path: Path) -> None:
    """A process killed in mid-write spoils no line but its own."""
    (tmp_path / STEPS_FILE).write_text('{"kind": "loss", "step": 10, "loss": 0.5}\n{"kind": "loss", "st')
    StepLog(tmp_path).loss(moment(20), 0.25, 1e-3, 1.0)
    assert read_curves(tmp_path).losses == {10: 0.5, 20: 0.25}


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.configure(stream, json=True)
    yield stream
    logs.configure()


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path, said: io.StringIO) -> None:
    log = StepLog(tmp_path)
    (tmp_path / STEPS_FILE).mkdir()
    log.loss(moment(1), 1.0, 1.0, 1.0)
    log.loss(moment(2), 1.0, 1.0, 1.0)
    assert said.getvalue().count("steps.not_written") == 1
    assert "directory" in said.getvalue()


def lines(*records: dict[str, Any]) -> list[str]:
    return [json.dumps(record) for record in records]


def loss(step: int, value: float | None) -> dict[str, Any]:
    return {"kind": "loss", "step": step, "loss": value}


def change(step: int, round: int, world: int, reason: str) -> dict[str, Any]:
    return {"kind": "round", "step": step, "round": round, "world_size": world, "reason": reason}


def test_steps_that_are_done_again_count_once() -> None:
    """A run that fell back to step 10 shows what it did the second time, and keeps the first aside."""
    told = [loss(10, 3.0), loss(20, 2.0), loss(30, 1.9), change(11, 2, 1, "node b was lost"), loss(20, 2.5)]
    curves = curves_of(lines(*told))
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


def test_an_evaluation_behind_a_fall_back_is_forgotten() -> None:
    """It was of a state that is gone."""
    told = [{"kind": "evaluation", "step": step, "metrics": {"accuracy": step / 100}} for step in (10, 20, 15)]
    assert curves_of(lines(*told)).evaluations == {"accuracy": {10: 0.1, 15: 0.15}}


def test_the_number_of_ranks_is_in_the_order_of_the_steps() -> None:
    """Also by a run that fell back behind a change of its ranks: that change is a thing of the past, but a change."""
    told = [change(0, 1, 3, ""), loss(40, 1.0), change(41, 2, 2, "node b was lost"), change(30, 1, 1, "1 node is here")]
    curves = curves_of(lines(*told, loss(40, 1.1), change(45, 2, 2, "node b joins")))
    assert list(curves.worlds.items()) == [(0, 3), (30, 1), (45, 2)]
    assert [each.step for each in curves.changes] == [0, 41, 30, 45]
    assert curves.repeated == [[(40, 1.0)]]


def test_changes_are_beginnings_plans_or_faults() -> None:
    """The beginning is none; joins and departures were planned, the rest are faults."""
    curves = curves_of(
        lines(
            change(0, 1, 2, "2 nodes are present"),
            change(5, 2, 3, "node c joins"),
            change(9, 3, 2, "node b was lost"),
            change(12, 4, 1, "node a leaves"),
        )
    )
    assert [(each.begins, each.planned) for each in curves.changes] == [
        (True, True),
        (False, True),
        (False, False),
        (False, True),
    ]
    assert curves.changes[2].label == "round 3: node b was lost (3 to 2 ranks)"
    assert curves.worlds == {0: 2, 5: 3, 9: 2, 12: 1}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        '{"kind": "loss"}',
        '{"kind": "round", "step": 1, "world_size": 2, "round": null}',
        '{"step": "7", "kind": "loss"}',
        "[" * 9999,
    ],
)
def test_what_is_no_line_is_passed_over(line: str) -> None:
    assert curves_of([line, *lines(loss(1, 2.0), loss(2, None))]).losses == {1: 2.0}


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
    assert [(each["kind"], each["step"]) for each in written(tmp_path)] == [
        ("round", 11),
        ("loss", 20),
        ("round", 21),
        ("evaluation", 21),
    ]
    assert not reporter.wants_exhibits
