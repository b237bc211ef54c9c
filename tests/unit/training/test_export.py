"""The trained model as a file of its own."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

from elastic_trainer.telemetry import logs
from elastic_trainer.training.export import export


def tied() -> nn.Module:
    """Two layers that share a weight, and a buffer."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm1d(4), last)


def test_a_model_comes_back_with_its_buffers_and_tied_parameters(tmp_path: Path) -> None:
    """Bit by bit, with what is known about it beside it; nothing else is left in the directory."""
    model, twin = tied(), tied()
    path = tmp_path / "final.safetensors"
    assert export(model, path, {"step": 7, "accuracy": 0.5})
    load_model(twin, path)
    for (name, mine), (_, theirs) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(mine, theirs), name
    with safe_open(path, "pt") as file:
        assert file.metadata()["step"] == "7"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_said_and_the_old_one_stays(tmp_path: Path) -> None:
    """The checkpoints hold the same, so this ends no training."""
    path = tmp_path / "final.safetensors"
    path.mkdir()
    (path / "x").touch()
    stream = io.StringIO()
    logs.configure(stream, json=True)
    assert not export(tied(), path, {})
    logs.configure()
    assert "model.not_exported" in stream.getvalue()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
