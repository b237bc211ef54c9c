"""How strong the simulator is: faults are planted in the conductor and what it owns, and its schedules find each."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SEEDS = [seed for seed in range(2000) if random.Random(seed).random() < 0.6]
"""Of the schedules of the ordinary run, those in place: the others have no conductor."""
PLAY = f"""
from tests.simulation.world import play
for seed in {SEEDS}:
    play(seed)
"""
MINE = "(mine.life, mine.create_revision) != (self._life.number, self._create_revision())"
FAULTS = [
    ("conductor", MINE, "mine.create_revision != self._create_revision()"),
    ("conductor", MINE, "mine.life != self._life.number"),
    ("conductor", "rank=mine.first_rank + local_rank", "rank=mine.first_rank"),
    ("conductor", "self.see(self._document)", "pass"),
    ("conductor", "if worker.unread:", "if False:"),
    ("conductor", "self._later(back_off_s, lambda: self._offer(life))", "pass"),
    ("conductor", 'self.passed |= message.status == "done"', "pass"),
    ("conductor", "self._send(worker, Exit(code=code, reason=document.reason))", "pass"),
    ("conductor", "Life(life.number + 1,", "Life(life.number,"),
    ("conductor", "self._release.expect(self._life, worker, number)", "pass"),
    ("conductor", "if busy or stood_still", "if stood_still"),
    ("conductor", "or stood_still or", "or"),
    ("conductor", "if self._checks:", "if False:"),
    ("conductor", "if self._record is None:", "if False:"),
    ("watchdog", "elif now - worker.heard_at > self._limit_s:", "elif False:"),
]
"""A module of ``agent/workers``, a text of it, and what is planted in its place."""


@pytest.mark.parametrize(
    ("module", "text", "replacement"), FAULTS, ids=[f"{each[0]}-{number}" for number, each in enumerate(FAULTS)]
)
def test_the_simulator_finds_a_planted_fault(module: str, text: str, replacement: str, tmp_path: Path) -> None:
    """Within the schedules of the ordinary run, as a broken invariant."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "elastic_trainer", tmp_path / "elastic_trainer", ignore=ignored)
    path = tmp_path / "elastic_trainer" / "agent" / "workers" / f"{module}.py"
    whole = path.read_text(encoding="utf-8")
    assert whole.count(text) == 1
    path.write_text(whole.replace(text, replacement), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PLAY]
    played = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "invariants.Violation" in played.stderr, played.stderr[-2000:]
