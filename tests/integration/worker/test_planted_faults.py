"""How strong the simulator is: faults are planted in recovery and what the agent knows of it, and it finds each.

Among them are faults that this project has had.
"""

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
"""Of the schedules of the ordinary run, those in place."""
PLAY = f"""
from tests.simulation.world import play
for seed in {SEEDS}:
    play(seed)
"""
FAULTS = {
    "a rank that is alone looks for no end": ("or self._alone:", "or False:"),
    "a newcomer meets those behind a step": (
        "self._regroup(joinable=not was_committed)",
        "self._regroup(joinable=True)",
    ),
    "a rank that was left behind goes on": ("if step.committed and self._script_position != after_step:", "if False:"),
    "what a peer has counted is not counted": ("step.committed = not attempted_since", "step.committed = False"),
    "a phase of the script ends with its round": ("before if before in _LASTING else Phase.TRAINING", "Phase.TRAINING"),
    "two lives have one generation": (
        "least = max(group.formation.round, position.generation + 1)",
        "least = position.generation",
    ),
    "a change that was agreed on outlives its round": (
        "        self._change_due = False\n        self._state.release()",
        "        self._state.release()",
    ),
    "a second death during healing": (
        "            if not is_collective_failure(error):\n                raise\n            logger()",
        "            if formed is not None:\n                raise\n            logger()",
    ),
    "a loss that meets the end of the round inside a step": (
        "if super().absorb(step, error, inside=inside):",
        "if False:",
    ),
    "a node that was cut off in the middle of an evaluation": ("in_call=self._calls.inside", "in_call=False"),
    "a member that dies while all save before too few are left": (
        "            return False\n        return True\n",
        "            raise\n        return True\n",
    ),
}
"""A text of ``recovery.py``, and what is planted in its place."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_finds_a_planted_fault(fault: str, tmp_path: Path) -> None:
    """Within the schedules of the ordinary run, as a broken invariant."""
    text, replacement = FAULTS[fault]
    shutil.copytree(
        ROOT / "elastic_trainer", tmp_path / "elastic_trainer", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = tmp_path / "elastic_trainer" / "worker" / "recovery.py"
    whole = path.read_text(encoding="utf-8")
    *before, after = whole.split(text)
    assert before
    path.write_text(text.join(before) + replacement + after, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PLAY]
    played = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "invariants.Violation" in played.stderr, played.stderr[-2000:]
