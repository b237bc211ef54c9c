"""The trained model as a file of its own."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import nn

from elastic_trainer.jobs import trainer as exports
from elastic_trainer.jobs.files import write_atomically
from elastic_trainer.jobs.trainer import export, exported_step
from elastic_trainer.telemetry import logs


def tied() -> nn.Module:
    """Two layers that share a weight, and a buffer."""
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


def test_a_file_that_cannot_be_written_is_said_and_the_old_one_stays(tmp_path: Path) -> None:
    """The checkpoints hold the same, so this ends no training."""
    path = tmp_path / "final.safetensors"
    path.mkdir()
    (path / "x").touch()
    stream = io.StringIO()
    logs.configure(stream, json=True)
    assert not export(tied(), path, 7, {})
    logs.configure()
    assert "model.not_exported" in stream.getvalue()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


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


@pytest.mark.parametrize("model", [Noted(2, 2), Overlapping()])
def test_a_model_that_the_format_cannot_hold_is_said(model: nn.Module, tmp_path: Path) -> None:
    """Only rank 0 finds that out, at the end of a training that went well."""
    assert not export(model, tmp_path / "final.safetensors", 7, {})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors does not tell of it by an OSError."""

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(exports, "save_model", full)
    assert not export(tied(), tmp_path / "final.safetensors", 7, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("theirs", "kept"), [(9, 9), (7, 7), (5, 7)])
def test_a_model_that_comes_late_does_not_replace_a_newer_one(
    theirs: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may stand still for minutes in the middle of it, while another has become rank 0."""
    path = tmp_path / "best.safetensors"
    assert export(tied(), path, 3, {})

    def stand_still(*arguments: Any) -> None:
        save_model(*arguments)
        monkeypatch.setattr(exports, "save_model", save_model)
        assert export(tied(), path, theirs, {"by": "another"})

    monkeypatch.setattr(exports, "save_model", stand_still)
    assert export(tied(), path, 7, {"by": "me"}) == (theirs < 7)
    assert exported_step(path) == kept
    with safe_open(path, "pt") as file:
        assert file.metadata()["by"] == ("me" if theirs < 7 else "another")
    assert list(tmp_path.iterdir()) == [path]
