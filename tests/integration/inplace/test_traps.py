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
        workers = begun(lead, ["a", "b"], scaled=True)
        lead.form(workers)
        first, second = results(lead, workers)
    assert first["digest"] == second["digest"]
    assert first["counter"] == list(range(1, STEPS + 1))
    return first


def regrouped(lead: Lead, workers: Sequence[Worker], failing: Sequence[Worker]) -> list[StateReport | None]:
    """A collective has failed on ``failing``: end the round, and form the next of ``workers``; their states then."""
    lead.await_failed(failing)
    lead.end()
    states = lead.await_ready(workers)
    lead.form(workers)
    return states


def steps_of(states: Sequence[StateReport | None]) -> list[int | None]:
    return [state.step if state is not None else None for state in states]


def test_a_step_that_lost_a_peer_ends_with_the_bits_of_one_that_did_not(
    lead: Lead, undisturbed: dict[str, Any]
) -> None:
    """Wherever a rank loses the other: BatchNorm, dropout, schedule, moments, loss scale are as if nothing had been.

    Between the optimizer's first change and the commit a state is neither the old nor the new one: it is not reported.
    """
    places = [("a", "forward"), ("b", "before_update"), ("a", "after_update"), ("b", "inside_update")]
    places += [("b", "forward"), ("b", "after_update")]
    faults = [fault(node, step, where) for step, (node, where) in enumerate(places, 2)]
    workers = begun(lead, ["a", "b"], faults, scaled=True)
    lead.form(workers)
    for step, (node, where) in enumerate(places, 2):
        mine, peer = ("ab".index(node), "ba".index(node))
        states = steps_of(regrouped(lead, workers, [workers[mine]]))
        assert states[mine] == {"inside_update": None, "after_update": step}.get(where, step - 1)
        assert states[peer] is not None
    ended = results(lead, workers)
    assert [result["digest"] for result in ended] == [undisturbed["digest"]] * 2
    assert [result["counter"] for result in ended] == [undisturbed["counter"]] * 2
    assert ended[0]["buffers"] == undisturbed["buffers"]
    untouched(lead, workers, ended)


def test_a_rank_0_that_is_behind_is_healed_by_a_peer(lead: Lead, undisturbed: dict[str, Any]) -> None:
    """It gets the state of the peer that has committed the step, never the other way round, and goes on behind it.

    What the script does behind the step (here: a collective about the loss) it does on both.
    """
    faults = [fault("a", 3, "before_update"), fault("a", 5, "inside_update")]
    workers = begun(lead, ["a", "b"], faults, scaled=True, losses=True)
    lead.form(workers)
    assert steps_of(regrouped(lead, workers, workers[:1])) == [2, 3]
    assert steps_of(regrouped(lead, workers, workers[:1])) == [None, 5]
    ended = results(lead, workers)
    assert [result["digest"] for result in ended] == [undisturbed["digest"]] * 2
    assert [result["counter"] for result in ended] == [undisturbed["counter"]] * 2
    assert [len(result["losses"]) for result in ended] == [STEPS, STEPS]
    untouched(lead, workers, ended)


def untouched(lead: Lead, survivors: Sequence[Worker], ended: Sequence[dict[str, Any]]) -> None:
    """No survivor was restarted, none took a committed step back, and each sample was used exactly once."""
    assert [result["pid"] for result in ended] == [worker.pid for worker in survivors]
    for result in ended:
        assert result["seen"] == sorted(result["seen"])
    for worker in survivors:
        told = [(said.round, said.step) for said in worker.said if isinstance(said, Progress)]
        assert told == sorted(told)
    lines = [line for path in lead.ledger.glob("*.jsonl") for line in map(parse, path.read_text().splitlines()) if line]
    found = audit(lines, SAMPLES)
    assert found.exact, found.reason
    assert found.unrecorded == 0


def test_a_member_excluded_after_its_commit_comes_back_with_the_others_state(lead: Lead) -> None:
    """C commits a step that A and B repeat without it: then the two differ at the same number, and C gives way.

    The first that would give C their state dies in the middle of that: C still holds what it held, and gets it from B.
    """
    lost = [fault(node, 3, "before_update") for node in "ab"]
    waits = [fault(node, 5, "after_step", "gate:rejoined") for node in "ab"]
    a, b = begun(lead, "ab", [*lost, *waits], dies_after_pieces=5)
    (c,) = begun(lead, "c")
    lead.form([a, b, c])
    lead.await_failed([a, b])
    lead.end()
    assert lead.await_ready([a, b, c]) == [held(1, 2), held(1, 2), held(1, 3)]
    lead.form([a, b])
    lead.await_file("rejoined.a")
    lead.change([a, b, c])
    lead.open("rejoined")
    lead.wait(lambda: a.process.poll() is not None, "the source to die")
    lead.end()
    states = lead.await_ready([b, c])
    assert states[0] is not None
    assert (states[0].round, states[1]) == (2, held(1, 3))
    lead.form([b, c])
    ended = results(lead, [b, c])
    assert ended[0]["digest"] == ended[1]["digest"]
    assert ended[0]["counter"] == ended[1]["counter"] == list(range(1, STEPS + 1))
    assert [result["pid"] for result in ended] == [b.pid, c.pid]


def held(round: int, step: int) -> tuple[int, int]:
    return round, step
