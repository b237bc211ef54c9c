"""The traps of recovery in memory: each fault is placed exactly, between real processes with real gloo groups.

The job has dropout, BatchNorm, AdamW, a schedule, clipped gradients and a registered object. Where the ranks stay the
same, a job that met faults must end bit by bit like one that met none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.ipc.messages import StateReport
from tests.integration.inplace.leading import Lead, Worker, leading

STEPS = 8
"""Steps of two epochs of 60 samples in batches of 16."""


def begun(lead: Lead, names: Sequence[str], faults: Sequence[dict[str, Any]] = (), **values: Any) -> list[Worker]:
    """Workers that run the job with these faults, not led into a round yet."""
    scenario = json.dumps({"faults": list(faults), **values})
    return [lead.start(name, "job.py", scenario) for name in names]


def results(lead: Lead, workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """What each worker wrote at its end."""
    lead.await_done(workers)
    return [json.loads((lead.directory / f"{worker.name}.result").read_text()) for worker in workers]


def fault(node: str, step: int, where: str, what: str = "lose") -> dict[str, Any]:
    return {"node": node, "step": step, "where": where, "what": what}


@pytest.fixture
def lead(tmp_path: Path) -> Any:
    with leading(tmp_path) as lead:
        yield lead


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a job of two ranks that nothing happened to."""
    with leading(tmp_path_factory.mktemp("undisturbed")) as lead:
        workers = begun(lead, ["a", "b"])
        lead.form(workers)
        first, second = results(lead, workers)
    assert first["digest"] == second["digest"]
    assert first["counter"] == list(range(1, STEPS + 1))
    return first


def regrouped(lead: Lead, workers: Sequence[Worker], failing: Sequence[Worker]) -> list[StateReport | None]:
    """A collective has failed on ``failing``: end the round, and form the next of the same ranks."""
    lead.await_failed(failing)
    lead.end()
    states = lead.await_ready(workers)
    lead.form(workers)
    return states


def test_a_step_that_lost_a_peer_ends_with_the_bits_of_one_that_did_not(
    lead: Lead, undisturbed: dict[str, Any]
) -> None:
    """Wherever a rank loses the other: BatchNorm, random numbers, schedule and moments are as if nothing had been."""
    places = [("a", "forward"), ("b", "before_update"), ("a", "after_update"), ("b", "inside_update")]
    places += [("b", "forward"), ("b", "after_update")]
    workers = begun(lead, ["a", "b"], [fault(node, step, where) for step, (node, where) in enumerate(places, 2)])
    lead.form(workers)
    for step, (node, where) in enumerate(places, 2):
        mine, peer = ("ab".index(node), "ba".index(node))
        states = regrouped(lead, workers, [workers[mine]])
        held = states[mine].step if states[mine] is not None else None  # type: ignore[union-attr]
        # Between the optimizer's first change and the commit a state is neither the old nor the new: not reported.
        assert held == {"inside_update": None, "after_update": step}.get(where, step - 1)
        assert states[peer] is not None
    ended = results(lead, workers)
    assert [result["digest"] for result in ended] == [undisturbed["digest"]] * 2
    assert ended[0]["buffers"] == undisturbed["buffers"]
    assert [result["counter"] for result in ended] == [undisturbed["counter"]] * 2
