"""The metrics of a run and the file that shows them tell the same story after any fall-back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.checkpoint.retention import BestMode
from elastic_trainer.errors import EXIT_CANNOT_WRITE, StorageError
from elastic_trainer.jobs.files import HISTORY_FILE, History, lines_to_keep


def _history(*accuracies: float) -> History:
    history = History()
    for number, accuracy in enumerate(accuracies, start=1):
        history.observe(1.0 / number, 10)
        history.add(step=10 * number, epoch=number, samples=0, lr=0.1, metrics={"accuracy": accuracy})
    return history


def _lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / HISTORY_FILE).read_text().splitlines()]


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
        "settle": history.settle,
        "state_dict": history.state_dict,
        "add": lambda: history.add(1, 0, 10, 0.1, {}),
        "await_loss": lambda: history.await_loss(lambda: None),
    }
    acts[how]()
    kept = history.records[0].train_loss if how == "add" else history.state_dict()["loss_sum"]
    assert kept == (2.0 if how == "add" else 20.0)
    assert history.state_dict()["loss_sum"] == (0.0 if how == "add" else 20.0)


def test_what_is_awaited_of_a_state_that_is_given_up_is_not_counted() -> None:
    """The step that it was about may not be part of the state that comes."""
    history, peer = History(), History()
    peer.observe(1.0, 5)
    history.await_loss(lambda: history.observe(2.0, 10))
    history.load_state_dict(peer.state_dict())
    assert history.state_dict() == peer.state_dict()


def test_state_survives_json_exactly() -> None:
    """What a checkpoint keeps rebuilds the same history, the sums under way included."""
    history = _history(0.1, 0.2)
    history.observe(1 / 3, 7)
    copy = History()
    copy.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert copy.records == history.records
    assert copy.add(30, 3, 0, 0.1, {}) == history.add(30, 3, 0, 0.1, {})


def test_the_best_that_is_kept_is_none_that_the_storage_refused() -> None:
    """What comes later is measured by what there is, also after the state has travelled."""
    history = _history(0.1, 0.9, 0.5)
    steps = [record.step for record in history.records]
    history.settled(steps[0], saved=True)
    history.settled(steps[1], saved=False)
    assert history.saved_step == steps[1]
    copy = History()
    copy.load_state_dict(json.loads(json.dumps(history.state_dict())))
    kept, best = copy.best("accuracy", BestMode.MAX, kept=True), copy.best("accuracy", BestMode.MAX)
    assert (kept and kept.step, best and best.step) == (steps[2], steps[1])


def test_the_best_is_the_earliest_of_equals_and_never_nan() -> None:
    history = _history(0.5, 0.9, 0.9, float("nan"), 0.1)
    best, worst = history.best("accuracy", BestMode.MAX), history.best("accuracy", BestMode.MIN)
    assert best is not None
    assert best.step == 20
    assert worst is not None
    assert worst.step == 50
    assert history.best("loss", BestMode.MAX) is None


def test_each_record_becomes_one_line_with_notes(tmp_path: Path) -> None:
    """New records are appended; lines that are there already stay byte for byte."""
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


def test_lines_of_steps_that_were_rolled_back_go(tmp_path: Path) -> None:
    """A run that resumes before its last evaluations replaces their lines and keeps the older ones."""
    _history(0.1, 0.2, 0.3).write(tmp_path, {"attempt": 1})
    resumed = _history(0.1)
    resumed.add(20, 2, 0, 0.1, {"accuracy": 0.25})
    resumed.write(tmp_path, {"attempt": 2})
    assert [(line["step"], line["metrics"]["accuracy"], line["attempt"]) for line in _lines(tmp_path)] == [
        (10, 0.1, 1),
        (20, 0.25, 2),
    ]


@pytest.mark.parametrize("damage", ["", '{"step": 1', "null\n", "[]\n", "\xff\n", '{"step": 10}\n'])
def test_a_torn_or_foreign_file_is_rebuilt_from_the_state(tmp_path: Path, damage: str) -> None:
    """Whatever is in the file, after a write it says what the state says."""
    (tmp_path / HISTORY_FILE).write_text(damage, encoding="latin-1")
    history = _history(0.1, 0.2)
    history.write(tmp_path, {})
    assert [line["step"] for line in _lines(tmp_path)] == [10, 20]


def test_a_line_without_its_end_is_not_kept(tmp_path: Path) -> None:
    """A line that was cut off after its last character would swallow the next one."""
    history = _history(0.1)
    history.write(tmp_path, {})
    line = (tmp_path / HISTORY_FILE).read_text()
    assert lines_to_keep([line], history.records) == [line]
    assert lines_to_keep([line.rstrip("\n")], history.records) == []


def test_values_that_json_cannot_say_are_null_and_still_recognised(tmp_path: Path) -> None:
    """The file stays readable for every JSON parser, and its lines are kept when the same state writes again."""
    history = _history(float("nan"), float("inf"))
    history.write(tmp_path, {"attempt": 1})
    history.write(tmp_path, {"attempt": 2})
    text = (tmp_path / HISTORY_FILE).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert [(line["metrics"], line["attempt"]) for line in _lines(tmp_path)] == [({"accuracy": None}, 1)] * 2


def test_a_directory_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).mkdir()
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written") as caught:
        _history(0.1).write(tmp_path, {})
    assert caught.value.exit_code == EXIT_CANNOT_WRITE
