"""Ranks that cut the data differently, under plain torchrun: refused before the first step, or soon after a change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker.launch import run, standalone

PATH = {"PYTHONPATH": str(Path(__file__).parents[4])}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 4}, "'seed' is 4 on rank 1 and 3 on rank 0"),
        ({"length": 900}, "'length' is 900 on rank 1"),
        ({"micro_batch_size": 8}, "'micro_batch' is 8 on rank 1"),
    ],
)
def test_ranks_that_differ_at_the_start_make_no_step(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Also where they would wait for each other for ever: the model's BatchNorm sums over micro-batches, of which one
    rank has fewer. How often a rank calls ``batches()`` does not matter."""
    command = standalone(2, "cut.py", 1, json.dumps(changes))
    run(command, tmp_path / "log", {"ELASTIC_TRAINER_LEDGER_DIR": str(tmp_path / "ledger")} | PATH, expected=1)
    assert said in (tmp_path / "log").read_text()
    ledgers = [path.read_text() for path in (tmp_path / "ledger").iterdir()]
    assert len(ledgers) == 2
    assert not any('"event": "step"' in text for text in ledgers)


def test_a_plan_that_one_rank_alone_changes_ends_the_training(tmp_path: Path) -> None:
    """In the second epoch; each epoch has a plan of its own, which is fine while it is the same on all ranks. So is the
    first one, though a rank calls ``batches()`` more often."""
    command = standalone(2, "cut.py", 1, json.dumps({"global_batch_size": 8}), 1)
    run(command, tmp_path / "log", {"ELASTIC_TRAINER_LEDGER_DIR": str(tmp_path / "ledger")} | PATH, expected=1)
    for path in (tmp_path / "ledger").iterdir():
        assert path.read_text().count('"event": "step"') >= 960 // 16
    assert "'global_batch' is 8 on rank 1 and 16 on rank 0" in (tmp_path / "log").read_text()
