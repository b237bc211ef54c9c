"""How many files a reader crosses for one behaviour, counted in real runs: no change makes a walk longer.

A limit is lowered by whoever shortens the walk.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.drills.inplace.leading import ROOT, SCRIPTS, leading
from tests.integration.worker.launch import environment, tail

FILES = {"step": 14, "save": 22, "resume": 27, "recovery": 29}
"""At most. The recovery's vary by a few: which of two threads notices first."""
RETURNS = {"step": 33}
"""How often a thread comes back to a file that it has left, at most."""


def within(behaviour: str, result: Path) -> None:
    found: dict[str, Any] = json.loads(result.read_text())
    assert len(found["files"]) <= FILES[behaviour], found["files"]
    assert 0 < found["returns"] <= RETURNS.get(behaviour, sys.maxsize)


def walk(behaviour: str, result: Path, *directory: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "walk.py"), behaviour, str(result), *map(str, directory)]
    done = subprocess.run(command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    within(behaviour, result)


def test_a_step(tmp_path: Path) -> None:
    walk("step", tmp_path / "step")


def test_a_save_and_the_resume_behind_it(tmp_path: Path) -> None:
    walk("save", tmp_path / "save", tmp_path / "checkpoints")
    walk("resume", tmp_path / "resume", tmp_path / "checkpoints")


@pytest.mark.timeout(120)
def test_a_recovery_in_a_survivor(tmp_path: Path) -> None:
    with leading(tmp_path) as lead:
        first, second = (lead.start(name, "walk.py", "recovery", tmp_path / "recovery") for name in "ab")
        lead.form([first, second])
        lead.wait(lambda: second.process.poll() is not None, "the death of rank 1")
        lead.end("rank 1 died")
        lead.form([first])
        lead.await_done([first])
        assert (tmp_path / "recovery").exists(), tail(first.log)
    within("recovery", tmp_path / "recovery")
