"""How strong the simulator is: faults are planted in copies of the sources, and its schedules find each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLAY = """
from tests.simulation.world import play
for seed in range(2000):
    play(seed)
"""
MINE = "(mine.life, mine.create_revision) != (self._life.number, self._facts.create_revision())"
LEFT_BEHIND = "            if self._left_behind(document.number - 1):\n"
CONDUCTOR = {
    "another incarnation's ranks": (MINE, "mine.create_revision != self._facts.create_revision()"),
    "another life's ranks": (MINE, "mine.life != self._life.number"),
    "one rank for all workers": ("rank=mine.first_rank + local_rank", "rank=mine.first_rank"),
    "a ready worker learns of no round": ("self.see(self._document)", "pass"),
    "messages wait for ever": ("        if worker.unread:\n            self._read(worker)", "        pass"),
    "a back-off never ends": (", partial(self._offer, self._life.number))", ", lambda: None)"),
    "no end of the training": ('self.passed |= message.status == "done"', "pass"),
    "a closed run ends no worker": ("self._send(worker, Exit(code=code, reason=document.reason))", "pass"),
    "two lives with one number": ("Life(life.number + 1,", "Life(life.number,"),
    "busy workers are killed": ("if busy or stood_still", "if stood_still"),
    "a thawed agent kills": ("or stood_still or", "or"),
    "workers of one node wait for each other": (
        "        if self._checks:\n            self._check_next()",
        "        pass",
    ),
    "an older record is written last": (
        "            if self._record is None:\n",
        "            if record is not None:\n",
    ),
    "hung workers live": ("elif now - worker.heard_at > self._limit_s:", "elif False:"),
    "a round without this node counts as over": (
        "self._over(document, document.number - 1, f",
        "self._over(document, document.number, f",
    ),
    "a quarantine never tries again": ("        self._after(seconds, self._try_again, away=True)\n", ""),
}
MEMBERSHIP = {
    "a store that went back is believed": (
        "if position(seen) >= position(self.known) and not self._is_another(seen):",
        "if True:",
    ),
    "a lost key is not written again": ("            return self._do(Return())\n", "            return 1.0\n"),
    "newcomers join in a call": (
        "    if together := in_call(view, ready):",
        "    if together := list[NodeView]():",
    ),
}
HISTORY = {
    "a planned change for a node whose workers are ending": (
        "state = NodeState.WARMING if self.at_work else self.record.state",
        "state = self.record.state",
    ),
    "a node that was cut off in the middle of an evaluation": (LEFT_BEHIND, "            if False:\n"),
    "a node that first hears of a round while that drains": (
        "        else:\n            self._over(document, document.number - 1",
        "        else:\n            document.state is RoundState.DRAINING or self._over(document, document.number - 1",
    ),
}
FAULTS = CONDUCTOR | MEMBERSHIP | HISTORY
"""A text of ``agent`` or ``membership``, and what is planted in its place. Those of HISTORY were mended once."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_finds_a_planted_fault(fault: str, tmp_path: Path) -> None:
    """Within the schedules of the ordinary run, as a broken invariant."""
    text, replacement = FAULTS[fault]
    copy = tmp_path / "elastic_trainer"
    shutil.copytree(ROOT / "elastic_trainer", copy, ignore=shutil.ignore_patterns("__pycache__"))
    sources = [*copy.glob("agent/**/*.py"), *copy.glob("membership/*.py")]
    (path,) = (each for each in sources if text in each.read_text(encoding="utf-8"))
    whole = path.read_text(encoding="utf-8")
    assert whole.count(text) == 1
    path.write_text(whole.replace(text, replacement), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PLAY]
    played = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "invariants.Violation" in played.stderr, played.stderr[-2000:]
