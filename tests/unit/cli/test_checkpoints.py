"""``elastic-trainer checkpoints``: the list, its JSON form, and damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_trainer.checkpoint import CheckpointManager, SaveInfo
from elastic_trainer.cli.main import main


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two checkpoints."""
    manager = CheckpointManager(tmp_path / "checkpoints")
    for step in (10, 20):
        info = SaveInfo(
            step=step, round=1, epoch=step // 10, samples=step * 4, world_size=2, metrics={"accuracy": step / 100},
            best=True, fields={},
        )  # fmt: skip
        manager.save({"value": step, "raw": bytes(range(256)) * 8}, info)
    return tmp_path / "checkpoints"


def damage(directory: Path) -> Path:
    """Flip one bit in the data of the newest checkpoint."""
    newest = sorted(directory.glob("step-*"))[-1]
    path = max(
        (file for file in newest.iterdir() if file.name != "manifest.json"), key=lambda file: file.stat().st_size
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    return newest


def test_checkpoints_are_listed_newest_first(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With step, metrics, size and status; without --verify nothing is claimed about the bytes."""
    assert main(["checkpoints", str(directory)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "step-0" in line]
    assert ["step-000000020" in rows[0], "step-000000010" in rows[1]] == [True, True]
    assert "accuracy 0.2 (best)" in rows[0]
    assert "(best)" not in rows[1]
    assert "unverified" in rows[0]


def test_verify_reads_every_byte(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit is exit code 1 and the name of the damaged checkpoint; the others are verified."""
    assert main(["checkpoints", str(directory), "--verify", "--json"]) == 0
    assert {each["status"] for each in json.loads(capsys.readouterr().out)["checkpoints"]} == {"verified"}
    newest = damage(directory)
    assert main(["checkpoints", str(directory), "--verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["status"] for each in found] == ["damaged", "verified"]
    assert found[0]["name"] == newest.name
    assert found[0]["problem"]
    assert (found[1]["step"], found[1]["metrics"]) == (10, {"accuracy": 0.1})


def test_damage_is_shown_in_the_table(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = damage(directory)
    assert main(["checkpoints", str(directory), "--verify"]) == 1
    output = capsys.readouterr().out
    assert "damaged" in output
    assert f"{newest.name}: " in output


def test_an_empty_directory_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that has not saved yet."""
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"
