"""Ranks that average now and then: alone, under torchrun and in place, against plain loops that met no fault.

Faults and joins are placed within outer steps and at their ends, between real processes with real gloo groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.ipc.channel import Progress
from elastic_trainer.local.ledger import audit
from tests.drills.inplace.leading import SCRIPTS, Lead
from tests.drills.inplace.scripts.apart import ENDS, EVERY, SAMPLES, STEPS, simulated, trained
from tests.integration.worker.launch import run, standalone


def assert_state(result: dict[str, Any], expected: Sequence[torch.Tensor]) -> None:
    assert all(map(torch.equal, result["state"], expected))


@pytest.mark.parametrize("reduction", ["local_sgd", "diloco"])
def test_alone_it_is_the_plain_loop_also_when_it_is_left_and_resumed(tmp_path: Path, reduction: str) -> None:
    """The outer optimizer's momentum is in the checkpoint, and in each there is the state of a synchronisation."""
    expected = simulated(reduction, ["a"] * len(ENDS))
    assert_state(trained(reduction), expected)

    def leave(step: int, where: str, session: Any) -> None:
        if (step, where) == (8, "drawn"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(reduction, leave, str(tmp_path))
    assert [entry.step for entry in CheckpointManager(tmp_path).entries()] == [EVERY]
    resumed = trained(reduction, directory=str(tmp_path))
    assert (resumed["seen"][0], resumed["counter"][-1]) == (EVERY + 1, STEPS)
    assert resumed["resumed_from"] is not None
    assert_state(resumed, expected)


def test_under_torchrun_two_ranks_are_the_plain_loop_of_two(tmp_path: Path) -> None:
    script = str(SCRIPTS / "apart.py")
    run(standalone(2, script, json.dumps({"reduction": "diloco", "into": str(tmp_path)})), tmp_path / "log")
    for rank in range(2):
        result = torch.load(tmp_path / f"{rank}.result", weights_only=True)
        assert_state(result, simulated("diloco", ["ab"] * len(ENDS)))


def test_faults_and_joins_within_outer_steps_leave_nothing_behind(lead: Lead) -> None:
    """B dies within the second outer step, which A repeats alone from its first step on. C comes within the fourth
    one and begins with the fifth one. Its end fails on C when A has it: C gets it from A, with its own samples in it.
    """
    faults = [("b", 8, "after_step", "kill"), ("a", 14, "drawn", "gate:joining")]
    faults += [("a", 14, "drawn", "planned")]  # else a busy machine lets it hear of that too late
    faults += [("a", 8, "drawn", "gate:dying"), ("b", 8, "drawn", "gate:dying")]
    a, b, c = lead.begin("apart.py", "abc", faults, reduction="diloco", behind=["c", 1])
    lead.form([a, b])
    lead.await_file("dying.a")
    lead.await_file("dying.b")
    b.kill()
    lead.end("b is gone")
    lead.open("dying")
    assert lead.await_ready([a]) == [(1, 5)]
    lead.form([a])
    lead.await_file("joining.a")
    lead.change([a, c])
    lead.open("joining")
    lead.await_failed([a, c])
    lead.end("c has lost a")
    assert lead.await_ready([a, c]) == [(3, 20), (2, 15)]
    lead.form([a, c])
    lead.await_done([a, c])
    results = [torch.load(lead.directory / f"{name}.result", weights_only=True) for name in "ac"]
    expected = simulated("diloco", ["ab", "a", "a", "a", "ac", "ac"], healed=["c5"])
    for result in results:
        assert_state(result, expected)
        assert result["counter"] == list(range(1, STEPS + 1))
    seen = results[0]["seen"]
    assert (seen[:8], seen[EVERY - STEPS :]) == ([*range(1, 9)], [*range(EVERY + 1, STEPS + 1)])
    assert len(seen) > STEPS
    assert results[1]["seen"][0] == 16
    assert {said.step for said in a.said if isinstance(said, Progress)} <= set(ENDS)
    found = audit(lead.lines(), SAMPLES)
    assert found.exact, found.reason
    assert (found.steps, found.unrecorded) == (STEPS, 0)
