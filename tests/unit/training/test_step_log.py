"""What a run leaves for people to look at: ``steps.jsonl``, the curves read from it, and who writes it when."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import LoggingConfig
from elastic_trainer.jobs.curves import curves_of, read_curves
from elastic_trainer.jobs.files import STEPS_FILE
from elastic_trainer.jobs.reporting import ProgressMoment, Reporter, StepLog
from elastic_trainer.jobs.task import Exhibits
from elastic_trainer.telemetry import logs


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
