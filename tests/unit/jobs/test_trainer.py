"""The training loop's decisions, precision, the identity of a run, exported models."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from structlog.testing import capture_logs
from torch import nn

from elastic_trainer.errors import EXIT_CONFIG, ConfigError
from elastic_trainer.jobs import trainer
from elastic_trainer.jobs.config import Precision, load_job
from elastic_trainer.jobs.files import History, write_atomically
from elastic_trainer.jobs.task import RunLength
from elastic_trainer.jobs.trainer import Run, TaskIdentity, arithmetic, changed, export, exported_step
from elastic_trainer.model import Cursor

LENGTH = RunLength(samples=100, steps_per_epoch=4, epochs=2, steps=8)


def _run(*, step: int = 4, cursor: Cursor | None = None) -> Any:
    """A run without processes: where it stands and what it remembers."""
    run: Any = Run.__new__(Run)
    run.config = load_job("mnist", ["logging.loss_every=10"])
    run.history = History()
    run.session = SimpleNamespace(round=3, step_number=step, cursor=cursor or Cursor(0, 100))
    run.job = SimpleNamespace(length=LENGTH, mesh={})
    return run


def _peer(run: Any) -> Any:
    """A rank that joined just now: its state is that of ``run``, as it travels between ranks."""
    joined = _run(step=run.session.step_number, cursor=run.session.cursor)
    joined.history.load_state_dict(json.loads(json.dumps(run.history.state_dict())))
    return joined


@pytest.mark.parametrize("known", [0.5, None])
def test_a_loss_is_counted_a_step_later_unless_the_ranks_have_changed_since(known: float | None) -> None:
    """Then it is this rank's own at best, and the history may be a peer's, which has counted that step."""
    run, told = _run(), list[tuple[int, float]]()
    run._loss = 0.9
    run.reporter = SimpleNamespace(looked=lambda moment, loss, lr: told.append((moment, loss)))
    run.history.await_loss(partial(run._looked, lambda: known, 10, 0.1, 32))
    assert run.history.add(11, 0, 0, 0.1, {}).train_loss == known
    assert told == ([] if known is None else [(10, 0.5)])
    assert run._loss == (known or 0.9)


def test_a_rank_that_joins_before_a_save_takes_part_in_it() -> None:
    """Whether a save is due follows from the shared state: survivor and newcomer agree before it and after it."""
    survivor = _run()
    assert not survivor._save_due()
    survivor.history.add(4, 1, 0, 0.1, {"accuracy": 0.9})
    assert survivor._save_due()
    assert _peer(survivor)._save_due()
    survivor.history.saved_step = 4
    assert not survivor._save_due()
    assert not _peer(survivor)._save_due()
    survivor.history.add(5, 1, 20, 0.1, {"accuracy": 0.8})
    survivor.session.step_number, survivor.session.cursor = 5, Cursor(1, 20)
    assert not survivor._save_due()  # neither the best nor the last
    survivor.history.add(8, 2, 0, 0.1, {"accuracy": 0.7})
    survivor.session.step_number, survivor.session.cursor = 8, Cursor(1, 100)
    assert survivor._save_due()


def test_a_model_that_rank_0_did_not_come_to_write_is_written_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed between the checkpoint, which all have agreed on, and the file of the model."""
    exported = list[tuple[str, int]]()

    def export(_: object, path: Path, step: int, notes: object) -> None:
        exported.append((path.name, step))
        path.touch()

    monkeypatch.setattr(trainer, "export", export)
    monkeypatch.setattr(trainer, "exported_step", lambda path: 8 if path.exists() else None)
    killed = _run(step=8, cursor=Cursor(1, 100))
    killed.history.add(8, 2, 0, 0.1, {"accuracy": 0.9})
    killed.history.saved_step = 8
    survivor = _peer(killed)
    survivor.session.is_rank0, survivor.session.phase = True, lambda _: nullcontext()
    survivor.session.module, survivor.job.directory = None, tmp_path
    survivor._settle()
    survivor._settle()
    assert exported == [("best_model.safetensors", 8), ("final_state.safetensors", 8)]


def test_behind_the_last_step_all_meet_once_and_whoever_is_rank_0_then_makes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may die in its last writes while the others wait for it. A rank that gets the state of one which has met
    the others already does not wait: they would not come again."""
    exported, met = list[str](), list[str]()
    monkeypatch.setattr(trainer, "export", lambda _, path, *__: exported.append(path.name))
    run = _run(step=8, cursor=Cursor(1, 100))
    run.history.add(8, 2, 0, 0.1, {"accuracy": 0.9})
    run.history.saved_step = 8

    def barrier() -> None:
        met.append("survivor")
        run.session.is_rank0 = True

    run.session = SimpleNamespace(**vars(run.session), is_rank0=False, phase=lambda _: nullcontext(), barrier=barrier)
    run.session.module, run.session.world_size, run.job.directory = None, 1, tmp_path
    run._conclude()
    assert exported == ["best_model.safetensors", "final_state.safetensors"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    joined = _peer(run)
    joined.session = SimpleNamespace(**vars(joined.session), is_rank0=False, barrier=lambda: met.append("newcomer"))
    joined._conclude()
    assert met == ["survivor"]


@pytest.mark.parametrize(
    ("precision", "device", "dtype"),
    [
        ("fp32", "cpu", torch.float32),
        ("bf16", "cpu", torch.bfloat16),
        pytest.param("fp16", "cuda", torch.float16, marks=pytest.mark.gpu),
    ],
)
def test_each_precision_computes_in_its_type_and_fp16_scales(precision: str, device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    how = arithmetic(Precision(precision), torch.device(device))
    with how.autocast():
        assert torch.mm(*[torch.ones(2, 2, device=device)] * 2).dtype is dtype
    scaler = how.scaler()
    assert (scaler is not None and scaler.is_enabled()) == (precision == "fp16")


@pytest.mark.parametrize(
    ("was", "now", "sentence"),
    [
        (["a", "b"], ["a", "b"], None),
        (["a", "b"], ["a", "c", "d"], "'classes' changed since the run began: 'c', 'd' added, 'b' removed"),
        (["a", "b"], ["a"], "'classes' changed since the run began: 'b' removed"),
        (["a", "b"], ["b", "a"], "in another order or number"),
        (list("abcdefg"), [], "'a', 'b', 'c', 'd', 'e' and 2 more removed"),
        ("x", "y", "'classes' is 'y' here and was 'x' when the run began"),
        (3, ["a"], "'classes' is ['a'] here and was 3"),
    ],
)
def test_a_change_is_said_in_one_sentence(was: Any, now: Any, sentence: str | None) -> None:
    said = changed("classes", was, now)
    assert said is None if sentence is None else said is not None and sentence in said


def test_a_state_with_other_facts_is_refused_and_equal_ones_are_not() -> None:
    """As a mistake of the user's, with what to do; tuples are the lists that JSON makes of them."""
    saved = TaskIdentity({"classes": ("cat", "dog"), "size": 3}).state_dict()
    TaskIdentity({"classes": ["cat", "dog"], "size": 3}).load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"'cow' added.*checkpoint\.directory") as caught:
        TaskIdentity({"classes": ["cat", "cow", "dog"], "size": 3}).check_state(saved)
    assert caught.value.exit_code == EXIT_CONFIG
    with pytest.raises(ConfigError, match="'size' is 4 here and was 3"):
        TaskIdentity({"classes": ["cat", "dog"], "size": 4}).load_state_dict(saved)

    # A newer version of a task may name more, or less, than the one that saved.
    TaskIdentity({"classes": ["a"], "new": 1}).check_state(TaskIdentity({"classes": ["a"], "old": 2}).state_dict())
    with pytest.raises(ConfigError, match="JSON cannot say"):
        TaskIdentity({"classes": {1, 2}})


def tied() -> nn.Module:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm1d(4), last)


def test_a_model_comes_back_with_its_buffers_and_tied_parameters(tmp_path: Path) -> None:
    model, twin = tied(), tied()
    path = tmp_path / "final.safetensors"
    assert export(model, path, 7, {"accuracy": 0.5})
    load_model(twin, path)
    for (name, mine), (_, theirs) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(mine, theirs), name
    with safe_open(path, "pt") as file:
        assert file.metadata()["accuracy"] == "0.5"
    assert exported_step(path) == 7
    assert exported_step(tmp_path / "other.safetensors") is None
    assert list(tmp_path.iterdir()) == [path]


def test_the_umask_decides_who_may_read_what_is_written(tmp_path: Path) -> None:
    """Models, and the small files of a run."""
    before = os.umask(0o027)
    try:
        assert export(nn.Linear(1, 1), tmp_path / "model", 1, {})
        write_atomically(tmp_path / "text", "x")
    finally:
        os.umask(before)
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o640}


class Noted(nn.Linear):
    """Keeps more than tensors with its state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}


class Overlapping(nn.Module):
    """Two buffers with a part of their memory in common."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(10)
        self.register_buffer("head", memory[:6])
        self.register_buffer("tail", memory[4:])


def test_a_model_that_the_format_or_the_disk_cannot_hold_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 finds that out, at the end of a training that went well, whose checkpoints hold the same. The file
    that was there stays."""

    def full(*_: object) -> None:  # not an OSError
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def refused(model: nn.Module, path: Path) -> None:
        before = list(tmp_path.iterdir())
        with capture_logs() as said:
            assert not export(model, path, 7, {})
        assert [each["event"] for each in said] == ["model.not_exported"]
        assert list(tmp_path.iterdir()) == before

    refused(Noted(2, 2), tmp_path / "final.safetensors")
    refused(Overlapping(), tmp_path / "final.safetensors")
    (tmp_path / "in the way").mkdir()
    refused(tied(), tmp_path / "in the way")
    monkeypatch.setattr(trainer, "save_model", full)
    refused(tied(), tmp_path / "final.safetensors")


@pytest.mark.parametrize(("theirs", "kept"), [(9, 9), (7, 7), (5, 7)])
def test_a_model_that_comes_late_does_not_replace_a_newer_one(
    theirs: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may stand still for minutes in the middle of it, while another has become rank 0."""
    path = tmp_path / "best.safetensors"
    assert export(tied(), path, 3, {})

    def stand_still(*arguments: Any) -> None:
        save_model(*arguments)
        monkeypatch.setattr(trainer, "save_model", save_model)
        assert export(tied(), path, theirs, {"by": "another"})

    monkeypatch.setattr(trainer, "save_model", stand_still)
    assert export(tied(), path, 7, {"by": "me"}) == (theirs < 7)
    assert exported_step(path) == kept
    with safe_open(path, "pt") as file:
        assert file.metadata()["by"] == ("me" if theirs < 7 else "another")
    assert list(tmp_path.iterdir()) == [path]
