"""Checkpoints of scripts without a Session: saved whole or not at all, and the newest whole one is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import save_file

from elastic_trainer.errors import ConfigError
from elastic_trainer.resume import in_order, is_whole, latest, saving


def saved(path: Path, value: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"x": torch.full((100,), value)}, path)
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_the_newest_has_the_greatest_number(tmp_path: Path) -> None:
    """By number, not by text; files without one only count where there are no others. It is said if it was not written
    last."""
    assert latest(tmp_path) is latest(tmp_path / "nowhere") is None
    for name in ("last.pt", "step-9.pt", "step-10.pt"):
        saved(tmp_path / name)
    assert latest(tmp_path, "*.pt") == tmp_path / "step-10.pt"
    assert latest(tmp_path, "l*.pt") == tmp_path / "last.pt"
    os.utime(tmp_path / "step-10.pt", (0, 0))
    with structlog.testing.capture_logs() as logs:
        assert latest(tmp_path) == tmp_path / "step-10.pt"
    assert [(each["event"], each["reason"]) for each in logs] == [
        ("checkpoint.guessed", "step-10.pt has the greatest step; step-9.pt was written after it")
    ]


@pytest.mark.parametrize(
    ("older", "newest", "doubt"),
    [
        (["epoch=3-val_loss=12.50.ckpt"], "epoch=4-val_loss=9.75.ckpt", ""),
        (["epoch_1_loss_0.9120"], "epoch_3_loss_0.7001", ""),
        (["epoch=1-step=20-v1.ckpt", "epoch=2-step=5.ckpt"], "epoch=2-step=10.ckpt", ""),
        (["checkpoint-9", "checkpoint-10"], "checkpoint-100", ""),
        (["global_step9"], "global_step10", ""),
        (["9.pt"], "10.pt", ""),
        (["best_0.99.pt", "last.pt"], "ckpt_5.pt", ""),
        (["best_0.99.pt"], "last.pt", "was written last"),
        (["acc_91.pt"], "acc_90.pt", "was written last"),
        (["2024-12-31_23.pt"], "2025-01-01_01.pt", "was written last"),
        (["epoch-9.pt"], "step-100.pt", "was written last"),
    ],
)
def test_numbers_count_by_their_words_and_else_the_time_does(older: list[str], newest: str, doubt: str) -> None:
    """The value of a metric is no step, and a choice by time is said."""
    names, said = in_order({name: time for time, name in enumerate([*older, newest])})
    assert names[0] == newest
    assert (doubt in said) if doubt else not said


@pytest.mark.parametrize("name", ["step-2.pt", "step-2.safetensors"])
def test_files_that_were_cut_are_passed_over(tmp_path: Path, name: str) -> None:
    before = saved(tmp_path / "step-1.pt")
    after = tmp_path / name
    if after.suffix == ".pt":
        saved(after)
    else:
        save_file({"x": torch.ones(100), "y": torch.ones(3)}, after)
    assert latest(tmp_path) == after
    whole = after.read_bytes()
    for end in range(0, len(whole), 7):
        after.write_bytes(whole[:end])
        assert latest(tmp_path) == before, end


def test_directories_are_whole_with_their_files_and_their_marker(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        folder = tmp_path / f"checkpoint-{number}"
        saved(folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text("{}")
    assert latest(tmp_path, "checkpoint-*") == tmp_path / "checkpoint-3"
    cut(tmp_path / "checkpoint-3" / "optimizer.pt")
    assert latest(tmp_path, "checkpoint-*") == tmp_path / "checkpoint-2"
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    assert latest(tmp_path, "checkpoint-*", marker="trainer_state.json") == tmp_path / "checkpoint-1"
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{")
    assert latest(tmp_path, "checkpoint-*", marker="trainer_state.json") is None
    (tmp_path / "empty").mkdir()
    assert not is_whole(tmp_path / "empty")


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """And no temporary file; while it is written, it is not found. Directories are replaced as a whole, and what a
    killed save left does not matter."""

    def save_in_vain() -> None:
        with saving(target) as temporary:
            saved(temporary, 2.0)
            assert latest(target.parent) == target
            raise RuntimeError("full")

    target = saved(tmp_path / "ckpt.pt", 1.0)
    with pytest.raises(RuntimeError, match="full"):
        save_in_vain()
    assert float(torch.load(target)["x"][0]) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"]
    with saving(target) as temporary:
        saved(temporary, 3.0)
    assert float(torch.load(target)["x"][0]) == 3.0
    for value in (1.0, 2.0):
        with saving(tmp_path / "folder") as temporary:
            temporary.mkdir()
            saved(temporary / f"{value}.pt")
        (tmp_path / ".saving-folder").mkdir()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["2.0.pt"]


def test_several_ranks_need_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="before init_process_group"):
        latest(tmp_path)
