"""What one sees of a run: rates, lines at a bounded rate, a bar."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest

from elastic_trainer.jobs.config import LoggingConfig
from elastic_trainer.jobs.reporting import Lines, ProgressMoment, StepRate, Terminal, TrainingProgress, progress
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
