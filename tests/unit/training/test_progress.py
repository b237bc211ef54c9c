"""What one sees of a run: rates, lines at a bounded rate, a bar."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator

import pytest

from elastic_trainer.telemetry import logs
from elastic_trainer.training.config import LoggingConfig
from elastic_trainer.training.progress import Lines, ProgressMoment, Silent, StepRate, Terminal, progress


class _Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.now += timeout_s
        return event.is_set()


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.configure(stream, json=True)
    yield stream
    logs.configure()


def _moment(step: int) -> ProgressMoment:
    return ProgressMoment(step=step, steps=100, epoch=1, world_size=3, round=4)


def test_a_rate_follows_a_change_within_its_window() -> None:
    """After half the ranks are gone the rate of the past does not linger."""
    clock = _Clock()
    rate = StepRate(clock, window_s=10.0)
    assert rate.read() == (0.0, 0.0)
    for samples in [64] * 20 + [32] * 20:
        rate.count(samples)
        clock.now += 1.0
        last = rate.read()
    assert last == pytest.approx((32.0, 1.0), rel=0.1)


def test_lines_come_at_most_every_so_often(log: io.StringIO) -> None:
    """Ten seconds of steps every 0.1 s give five lines at a period of 2 s, each complete."""
    clock = _Clock()
    lines = Lines(2.0, clock)
    for step in range(1, 101):
        clock.now += 0.1
        lines.count(32)
        if lines.due():
            lines.report(_moment(step), loss=0.5)
    written = [json.loads(line) for line in log.getvalue().splitlines()]
    assert 4 <= len(written) <= 5
    last = written[-1]
    assert last["event"] == "training.progressed"
    assert (last["world_size"], last["round"], last["loss"]) == (3, 4, 0.5)
    assert last["samples_per_s"] == pytest.approx(320.0, rel=0.1)
    assert last["eta_s"] == pytest.approx((100 - last["step"]) * 0.1, rel=0.15, abs=0.2)


def test_no_line_tells_a_speed_that_is_not_known_yet(log: io.StringIO) -> None:
    """The first step may take longer than the period, and its samples are not counted over no time at all."""
    clock = _Clock()
    lines = Lines(2.0, clock)
    for step in range(1, 31):
        clock.now += 5.0 if step == 1 else 0.1
        lines.count(32)
        if lines.due():
            lines.report(_moment(step), loss=0.5)
    (line,) = [json.loads(line) for line in log.getvalue().splitlines()]
    assert line["samples_per_s"] == pytest.approx(320.0)


def test_an_evaluation_is_always_told(log: io.StringIO) -> None:
    """Evaluations are rare and do not wait for their turn."""
    Lines(1e9, _Clock()).evaluated(_moment(7), {"accuracy": 0.123456789})
    line = json.loads(log.getvalue())
    assert (line["event"], line["step"], line["metrics"]) == ("training.evaluated", 7, {"accuracy": 0.123457})


def test_only_the_leader_shows_anything_and_only_a_terminal_gets_a_bar() -> None:
    """The choice follows from the rank, the stream and the configuration."""
    auto = LoggingConfig()
    assert isinstance(progress(auto, leader=False), Silent)
    assert isinstance(progress(LoggingConfig(progress="none"), leader=True), Silent)
    assert isinstance(progress(auto, leader=True, stream=io.StringIO()), Lines)


def test_a_bar_shows_where_the_run_stands_and_gives_standard_error_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step, loss, world and metrics are on the bar; afterwards standard error is what it was."""
    monkeypatch.setenv("COLUMNS", "200")
    stream, before = io.StringIO(), sys.stderr
    bar = progress(LoggingConfig(progress="bar"), leader=True, stream=stream)
    assert isinstance(bar, Terminal)
    bar.count(32)
    assert bar.due()
    bar.evaluated(_moment(40), {"accuracy": 0.875})
    bar.report(_moment(41), loss=0.25)
    bar.close()
    assert sys.stderr is before
    shown = stream.getvalue()
    for part in ("41/100", "loss 0.2500", "3 ranks, round 4", "accuracy 0.8750"):
        assert part in shown
