"""The traps of recovery in memory: each fault is placed exactly, between real processes with real gloo groups.

The job has dropout, BatchNorm, AdamW, a schedule, clipped gradients and a registered object. Where the ranks stay the
same, a job that met faults must end bit by bit like one that met none.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from elastic_trainer.errors import EXIT_CONFIG
from elastic_trainer.ipc.channel import Drain, Evicted, Progress
from tests.drills.inplace.leading import LIMIT_S, Fault, Lead, Worker, leading
from tests.integration.worker.launch import free_port

STEPS = 8
"""Two epochs in batches of 16."""
PACE_S = 0.3
"""Of jobs that are to agree on a planned change: ranks ask each other about four times a second."""


def begun(lead: Lead, names: str, faults: Sequence[Fault] = (), **values: Any) -> list[Worker]:
    return lead.begin("job.py", names, faults, **values)


def joins(step: int, gate: str) -> list[Fault]:
    """Behind ``step`` all stop at ``gate``, and then until they have heard of a planned change, however busy the
    machine."""
    return [("all", step, "after_step", f"gate:{gate}"), ("all", step, "after_step", "planned")]


def results(lead: Lead, workers: Sequence[Worker], unrecorded: int = 0) -> list[dict[str, Any]]:
    """What the workers wrote at their end. None took a committed step back."""
    ended = lead.results(workers, unrecorded=unrecorded)
    for worker, result in zip(workers, ended, strict=True):
        assert result["seen"] == sorted(result["seen"])
        told = [(said.round, said.step) for said in worker.said if isinstance(said, Progress)]
        assert told == sorted(told)
    return ended


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a job of two ranks that nothing happened to."""
    with leading(tmp_path_factory.mktemp("undisturbed")) as lead:
        workers = begun(lead, "ab", scaled=True)
        lead.form(workers)
        first, _ = results(lead, workers)
    assert first["counter"] == list(range(1, STEPS + 1))
    return first


def test_a_step_that_lost_a_peer_ends_with_the_bits_of_one_that_did_not(
    lead: Lead, undisturbed: dict[str, Any]
) -> None:
    """Wherever a rank loses the other: BatchNorm, dropout, schedule, moments, loss scale are as if nothing had been.

    Between the optimizer's first change and the commit a state is neither the old nor the new one: it is not reported.
    """
    places = [("a", "forward"), ("b", "before_update"), ("a", "after_update"), ("b", "inside_update")]
    places += [("b", "forward"), ("b", "after_update")]
    faults = [(node, step, where, "lose") for step, (node, where) in enumerate(places, 2)]
    workers = begun(lead, "ab", faults, scaled=True)
    lead.form(workers)
    for step, (node, where) in enumerate(places, 2):
        mine, peer = ("ab".index(node), "ba".index(node))
        states = lead.regroup(workers, [workers[mine]])
        assert states[mine] == {"inside_update": None, "after_update": step}.get(where, step - 1)
        assert states[peer] is not None
    ended = results(lead, workers)
    assert [(each["state"], each["counter"]) for each in ended] == [(undisturbed["state"], undisturbed["counter"])] * 2
    assert ended[0]["buffers"] == undisturbed["buffers"]


def test_a_rank_0_that_is_behind_is_healed_by_a_peer(lead: Lead, undisturbed: dict[str, Any]) -> None:
    """It gets the state of the peer that has committed the step, never the other way round, and goes on behind it.

    What the script does behind the step (here: a collective about the loss) it does on both.
    """
    faults = [("a", 3, "before_update", "lose"), ("a", 5, "inside_update", "lose")]
    workers = begun(lead, "ab", faults, scaled=True, losses=True)
    lead.form(workers)
    # B's step may still be on its way: only B's own failure, in what comes behind that, says that it has committed.
    assert lead.regroup(workers, workers) == [2, 3]
    assert lead.regroup(workers, workers) == [None, 5]
    for result in results(lead, workers):
        assert (result["state"], result["counter"]) == (undisturbed["state"], undisturbed["counter"])
        assert len(result["losses"]) == STEPS


def test_a_member_excluded_after_its_commit_comes_back_with_the_others_state(lead: Lead) -> None:
    """C commits a step that A and B repeat without it: then the two differ at the same number, and C gives way.

    The first that would give C their state dies in the middle of that: C still holds what it held, and gets it from B.
    """
    faults = [("all", 3, "before_update", "lose"), *joins(4, "rejoined")]
    values: dict[str, Any] = {"small_pieces": True, "pace_s": PACE_S}
    (a,) = begun(lead, "a", faults, **values, dies_after_pieces=5)
    (b,), (c,) = begun(lead, "b", faults, **values), begun(lead, "c", **values)
    lead.form([a, b, c])
    lead.await_failed([a, b, c])  # C in what comes behind its commit
    lead.end()
    assert lead.await_ready([a, b, c]) == [(1, 2), (1, 2), (1, 3)]
    lead.form([a, b])
    lead.await_file("rejoined.a")
    lead.change([a, b, c])
    lead.open("rejoined")
    lead.wait(lambda: a.process.poll() is not None, "the source to die")
    lead.end()
    states = lead.await_ready([b, c])
    assert states[0] is not None
    assert (states[0][0], states[1]) == (2, (1, 3))
    lead.form([b, c])
    for result in lead.results([b, c]):
        assert result["counter"] == list(range(1, STEPS + 1))


def test_a_newcomer_gets_everything_out_of_memory_and_joins_between_two_steps(lead: Lead) -> None:
    """Moments that its own optimizer never made, loss scale, schedule, the registered object: nobody loses a step.

    Who is there already does what it does behind a step (a collective about the loss) before the newcomer is let in.
    """
    faults = joins(3, "joining")
    members = begun(lead, "ab", faults, scaled=True, losses=True, pace_s=PACE_S)
    lead.form(members)
    (c,) = begun(lead, "c", scaled=True, losses=True, pace_s=PACE_S)
    lead.await_ready([c])
    lead.await_file("joining.a")
    lead.change([*members, c])
    lead.open("joining")
    ended = results(lead, [*members, c])
    assert [result["counter"] for result in ended] == [list(range(1, STEPS + 1))] * 3
    assert [len(result["losses"]) for result in ended[:2]] == [STEPS, STEPS]
    assert lead.number == 2


def test_a_newcomer_that_cuts_the_data_differently_is_refused_alone(lead: Lead) -> None:
    """Before it has drawn a batch, though it says that its plan may be another than a checkpoint's; the others train
    on without it, on all samples."""
    members = begun(lead, "ab", joins(3, "joining"), pace_s=PACE_S)
    lead.form(members)
    (c,) = begun(lead, "c", size=20, allow_changed=["global_batch"])
    lead.tolerate([c])
    lead.await_ready([c])
    lead.await_file("joining.a")
    lead.change([*members, c])
    lead.open("joining")
    assert c.process.wait(LIMIT_S) == EXIT_CONFIG
    assert "'global_batch' is 20 on rank 2 (node c) and 16 on the ranks that train already" in c.log.read_text()
    lead.regroup(members, members)
    results(lead, members)


def test_a_member_that_dies_while_all_save_before_too_few_are_left_costs_the_other_nothing(lead: Lead) -> None:
    """One is asked to go, and is killed before it has saved: the other keeps its process and its state, and waits."""
    faults = [*joins(3, "leaving"), ("b", 0, "settling", "kill")]
    a, b = workers = begun(lead, "ab", faults, pace_s=PACE_S, checkpoints=str(lead.directory / "checkpoints"))
    lead.form(workers)
    lead.await_file("leaving.b")
    b.signal(signal.SIGTERM)
    lead.wait(lambda: b.last(Evicted), "the wish to leave")
    for each in workers:
        each.tell(Drain(number=lead.number, reason="b leaves", waits=True, next=None))
    lead.open("leaving")
    (state,) = lead.regroup([a], [a])
    assert state is not None
    assert state >= 3
    (ended,) = results(lead, [a])
    assert b.process.wait(LIMIT_S) == -signal.SIGKILL
    assert ended["counter"] == list(range(1, STEPS + 1))


def test_when_no_state_is_whole_the_newest_checkpoint_decides(lead: Lead, undisturbed: dict[str, Any]) -> None:
    """All ranks were within the optimizer's step: what they hold is used by nobody."""
    values = {"scaled": True, "checkpoints": str(lead.directory / "checkpoints"), "save_every": 2}
    workers = begun(lead, "ab", [("all", 5, "inside_update", "lose")], **values)
    lead.form(workers)
    assert lead.regroup(workers, workers) == [None, None]
    for result in lead.results(workers):
        assert result["state"] == undisturbed["state"]
        assert result["resumed_from"].startswith("step-000000004-")
        assert result["seen"] == [1, 2, 3, 4, 4, 5, 6, 7, 8]


def test_without_a_checkpoint_nobody_goes_on_from_half_an_update(lead: Lead) -> None:
    workers = begun(lead, "ab", [("all", 5, "inside_update", "lose")])
    lead.form(workers)
    lead.await_failed(workers)
    lead.tolerate(workers)
    lead.regroup(workers, workers)
    for worker in workers:
        assert worker.process.wait(LIMIT_S) == 1
        assert "no rank holds a whole state any more" in worker.log.read_text()


def test_a_mistake_of_the_script_is_no_lost_peer(lead: Lead) -> None:
    """Whatever its words: its exception ends its process, as anywhere else, and the others go on without it.

    It had given its gradients for the step in question, so they commit that. What they absorb is in their logs.
    """
    text = "gloo: socket timeout, Broken pipe"
    workers = begun(lead, "abc", [("c", 4, "before_update", f"error:{text}")])
    lead.tolerate(workers[2:])
    lead.form(workers)
    assert workers[2].process.wait(LIMIT_S) == 1
    assert f"RuntimeError: {text}" in workers[2].log.read_text()
    assert '"collective.failed"' not in workers[2].log.read_text()
    lead.regroup(workers[:2], workers[:2])
    results(lead, workers[:2], unrecorded=60 % 16 // 3)
    for worker in workers[:2]:
        (said,) = [json.loads(line) for line in worker.log.read_text().splitlines() if '"collective.failed"' in line]
        assert "(job.py:" in said["trail"][0], said


@pytest.mark.parametrize(
    ("where", "meanwhile", "values"),
    [
        ("forward", ["raw"], {}),
        ("before_update", ["barrier"], {}),
        ("forward", [], {"neighbours": True}),
        ("drawn", [], {"barrier": True}),
    ],
    ids=["in torch's own collective", "in a barrier", "beside the script's connections", "with a drawn batch"],
)
def test_a_step_in_which_a_rank_dies_comes_again_without_it(
    lead: Lead, where: str, meanwhile: list[str], values: dict[str, Any]
) -> None:
    """Wherever the others are: in a collective of the script's own, of torch or of the session; while a thread of
    theirs opens connections, of which not one is shut; between the draw of a batch and its step, which then has the
    lost rank's samples too."""
    faults = [("c", 4, where, "kill"), *(("all", 4, where, what) for what in meanwhile)]
    workers = begun(lead, "abc", faults, **values)
    lead.form(workers)
    lead.regroup(workers[:2], workers[:2])
    assert [result["broken"] for result in results(lead, workers[:2])] == [0, 0]


def test_a_round_whose_store_is_gone_is_left(lead: Lead) -> None:
    """The node that hosts it died while the round was formed: the ranks stop looking when they hear of that."""
    workers = begun(lead, "ab")
    lead.form(workers, store=f"127.0.0.1:{free_port()}")
    lead.end()
    lead.form(workers)
    results(lead, workers)
