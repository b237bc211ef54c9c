"""``python -m elastic_trainer.training``: what its processes say when something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_CONFIG
from elastic_trainer.jobs.main import main


def as_rank(monkeypatch: pytest.MonkeyPatch, directory: Path | None, rank: int) -> None:
    """As torchrun, or another launcher (no directory), starts it."""
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 3), ("LOCAL_WORLD_SIZE", 3)):
        monkeypatch.setenv(name, str(value))
    if directory is not None:
        (directory / str(rank)).mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(directory / str(rank) / "error.json"))


def test_the_first_rank_to_find_a_mistake_prints_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for the first of the node, which torchrun may have ended by then; another mistake is told as well,
    and all are told again when all are started again."""
    mistakes: tuple[list[str], ...] = ([], ["no-such-task"])
    told = []
    for attempt, rank, mistake in ((0, 2, 0), (0, 0, 0), (0, 1, 1), (1, 1, 0)):
        as_rank(monkeypatch, tmp_path / f"attempt_{attempt}", rank)
        assert main(mistakes[mistake]) == EXIT_CONFIG
        told.append(capsys.readouterr().err.count("error: "))
    assert told == [1, 0, 1, 1]


def test_without_torchrun_the_first_of_the_node_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other launchers start each rank by itself; alone, a process is the first."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    told = []
    for rank in (1, 0):
        as_rank(monkeypatch, None, rank)
        assert main([]) == EXIT_CONFIG
        told.append(capsys.readouterr().err.count("error: no job was given"))
    assert told == [0, 1]
