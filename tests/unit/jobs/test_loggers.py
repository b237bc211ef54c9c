"""Loggers: registered, kept apart from training, one run for all lives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from structlog.testing import capture_logs

from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs import loggers
from elastic_trainer.jobs.config import LoggingConfig
from elastic_trainer.jobs.loggers import Background, Loggers, Opening, TrackedRun, check_loggers, register_logger
from elastic_trainer.jobs.reporting import ProgressMoment, Reporter
from elastic_trainer.jobs.task import Exhibits


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
    moment = ProgressMoment(step=10, steps=20, epoch=1, world_size=2, round=3)
    reporter.lead(True, moment, "begins")
    reporter.looked(moment, 0.5, None)
    reporter.evaluated(moment, {"accuracy": 0.75}, Exhibits(texts={"sample": "To be"}))
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
    assert [first.advance("train", step) for step in (10, 20)] == [True, True]
    again = TrackedRun(tmp_path, "tracker")
    assert again.id == "r1"
    assert [again.advance("train", step) for step in (10, 20, 30)] == [False, False, True]
    assert again.advance("test", 20)


def test_mistakes_are_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no logger 'wandbb' .*use one of mlflow, tensorboard, wandb"):
        check_loggers(["wandbb"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tensorboard is not installed .*elastic-trainer\[tensorboard\]"):
        check_loggers(["tensorboard"])
