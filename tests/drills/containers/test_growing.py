"""A run in containers that begins with one node, or comes down to one, and grows again."""

from __future__ import annotations

from pathlib import Path

from elastic_trainer.drills.measure import sample_problems
from tests.drills.containers.engine import Composed, say
from tests.drills.containers.fleet import ALL, SAMPLES, Fleet, digits


def test_a_run_grows_from_one_node_and_again_after_it_was_down_to_one(composed: Composed, tmp_path: Path) -> None:
    """With ``--nnodes 1:3`` on a network above 127.0.0.1, where what one node published of itself counts for all."""
    with Fleet(composed, "growing", tmp_path, digits("growing", 100_000)) as fleet:
        say("one container starts alone, two more join")
        fleet.start("n0")
        fleet.settled("n0")
        fleet.start("n1", "n2")
        before = fleet.settled(*ALL)
        t = fleet.kill("n1").asked
        fleet.kill("n2")
        fleet.aftermath(before, "docker kill of n1 and n2", t, "n1", "n2")
        fleet.settled("n0")
        fleet.engine.docker("start", "n1", "n2")
        assert fleet.settled(*ALL).pids["n0"] == before.pids["n0"]
        fleet.stop(*ALL)
        fleet.look()
        assert sample_problems(fleet.book.lines, SAMPLES) == []
