"""The traps of recovery in memory: each fault is placed exactly, between real processes with real gloo groups.

The job has dropout, BatchNorm, AdamW, a schedule, clipped gradients and a registered object. Where the ranks stay the
same, a job that met faults must end bit by bit like one that met none.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.errors import EXIT_CONFIG, EXIT_LEFT
from elastic_trainer.ipc.channel import Drain, Evicted, Progress
from elastic_trainer.local.ledger import LineKind, audit, parse
from tests.drills.inplace.leading import LIMIT_S, Lead, Worker, leading
from tests.integration.worker.launch import free_port

STEPS, SAMPLES = 8, 60
"""Two epochs in batches of 16."""
PACE_S = 0.3
"""Of jobs that are to agree on a planned change: ranks ask each other about four times a second."""
State = tuple[int, int] | None
"""The round that committed it and its step."""


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


def regrouped(lead: Lead, workers: Sequence[Worker], failing: Sequence[Worker]) -> list[State]:
    """A collective has failed on ``failing``: end the round, and form the next of ``workers``; their states then."""
    lead.await_failed(failing)
    lead.end()
    states = lead.await_ready(workers)
    lead.form(workers)
    return states


def steps_of(states: Sequence[State]) -> list[int | None]:
    return [state[1] if state is not None else None for state in states]


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
    # B's step may still be on its way: only B's own failure, in what comes behind that, says that it has committed.
    assert steps_of(regrouped(lead, workers, workers)) == [2, 3]
    assert steps_of(regrouped(lead, workers, workers)) == [None, 5]
    ended = results(lead, workers)
    assert [result["digest"] for result in ended] == [undisturbed["digest"]] * 2
    assert [result["counter"] for result in ended] == [undisturbed["counter"]] * 2
    assert [len(result["losses"]) for result in ended] == [STEPS, STEPS]
    untouched(lead, workers, ended)


def untouched(lead: Lead, survivors: Sequence[Worker], ended: Sequence[dict[str, Any]], *, unrecorded: int = 0) -> None:
    """No survivor was restarted, none took a committed step back, and each sample was used exactly once.

    ``unrecorded`` samples were used in a step that the others committed, by a rank that died before it could say so.
    """
    assert [result["pid"] for result in ended] == [worker.pid for worker in survivors]
    for result in ended:
        assert result["seen"] == sorted(result["seen"])
    for worker in survivors:
        told = [(said.round, said.step) for said in worker.said if isinstance(said, Progress)]
        assert told == sorted(told)
    lines = [line for path in lead.ledger.glob("*.jsonl") for line in map(parse, path.read_text().splitlines()) if line]
    found = audit(lines, SAMPLES)
    assert found.exact, found.reason
    assert found.unrecorded == unrecorded


def test_a_member_excluded_after_its_commit_comes_back_with_the_others_state(lead: Lead) -> None:
    """C commits a step that A and B repeat without it: then the two differ at the same number, and C gives way.

    The first that would give C their state dies in the middle of that: C still holds what it held, and gets it from B.
    """
    faults = [fault("all", 3, "before_update"), fault("all", 4, "after_step", "gate:rejoined")]
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
    ended = results(lead, [b, c])
    assert ended[0]["digest"] == ended[1]["digest"]
    assert ended[0]["counter"] == ended[1]["counter"] == list(range(1, STEPS + 1))
    assert [result["pid"] for result in ended] == [b.pid, c.pid]


def test_a_newcomer_gets_everything_out_of_memory_and_joins_between_two_steps(lead: Lead) -> None:
    """Moments that its own optimizer never made, loss scale, schedule, the registered object: nobody loses a step.

    Who is there already does what it does behind a step (a collective about the loss) before the newcomer is let in.
    """
    faults = [fault("all", 3, "after_step", "gate:joining")]
    members = begun(lead, "ab", faults, scaled=True, losses=True, pace_s=PACE_S)
    lead.form(members)
    (c,) = begun(lead, "c", scaled=True, losses=True, pace_s=PACE_S)
    lead.await_ready([c])
    lead.await_file("joining.a")
    lead.change([*members, c])
    lead.open("joining")
    ended = results(lead, [*members, c])
    assert len({result["digest"] for result in ended}) == 1
    assert [result["counter"] for result in ended] == [list(range(1, STEPS + 1))] * 3
    assert [len(result["losses"]) for result in ended[:2]] == [STEPS, STEPS]
    assert lead.number == 2
    untouched(lead, [*members, c], ended)


def test_ranks_that_cut_the_data_differently_do_not_begin(lead: Lead) -> None:
    """Another global batch on one node, as in a configuration that is half rolled out: a sentence, and no step."""
    workers = begun(lead, "a") + begun(lead, "b", size=20)
    lead.tolerate(workers)
    lead.form(workers)
    for worker in workers:
        assert worker.process.wait(LIMIT_S) == EXIT_CONFIG
        assert "'global_batch' is 20 on rank 1 (node b) and 16 on rank 0 (node a)" in worker.log.read_text()
    lines = [line for path in lead.ledger.glob("*.jsonl") for line in map(parse, path.read_text().splitlines()) if line]
    assert {line.event for line in lines} == {LineKind.OPENED}


def test_a_newcomer_that_cuts_the_data_differently_is_refused_alone(lead: Lead) -> None:
    """Before it has drawn a batch, though it says that its plan may be another than a checkpoint's; the others train
    on without it, on all samples."""
    faults = [fault("all", 3, "after_step", "gate:joining")]
    members = begun(lead, "ab", faults, pace_s=PACE_S)
    lead.form(members)
    (c,) = begun(lead, "c", size=20, allow_changed=["global_batch"])
    lead.tolerate([c])
    lead.await_ready([c])
    lead.await_file("joining.a")
    lead.change([*members, c])
    lead.open("joining")
    assert c.process.wait(LIMIT_S) == EXIT_CONFIG
    assert "'global_batch' is 20 on rank 2 (node c) and 16 on the ranks that train already" in c.log.read_text()
    regrouped(lead, members, members)
    ended = results(lead, members)
    assert ended[0]["digest"] == ended[1]["digest"]
    untouched(lead, members, ended)


def test_a_member_that_is_asked_to_go_leaves_between_two_steps(lead: Lead) -> None:
    """SIGTERM reaches its agent, the others agree, it exits 143, and they go on with the next step."""
    workers = begun(lead, "abc", [fault("all", 3, "after_step", "gate:leaving")], pace_s=PACE_S)
    lead.form(workers)
    lead.await_file("leaving.c")
    workers[2].signal(signal.SIGTERM)
    lead.wait(lambda: workers[2].last(Evicted), "the wish to leave")
    lead.change(workers[:2])
    lead.open("leaving")
    ended = results(lead, workers[:2])
    assert workers[2].process.wait(LIMIT_S) == EXIT_LEFT
    assert ended[0]["digest"] == ended[1]["digest"]
    untouched(lead, workers[:2], ended)


def test_a_member_that_dies_while_all_save_before_too_few_are_left_costs_the_other_nothing(lead: Lead) -> None:
    """One is asked to go, and is killed before it has saved: the other keeps its process and its state, and waits."""
    faults = [fault("all", 3, "after_step", "gate:leaving"), fault("b", 0, "settling", "kill")]
    a, b = workers = begun(lead, "ab", faults, pace_s=PACE_S, checkpoints=str(lead.directory / "checkpoints"))
    lead.form(workers)
    lead.await_file("leaving.b")
    b.signal(signal.SIGTERM)
    lead.wait(lambda: b.last(Evicted), "the wish to leave")
    for each in workers:
        each.tell(Drain(number=lead.number, reason="b leaves", waits=True, next=None))
    lead.open("leaving")
    (state,) = regrouped(lead, [a], [a])
    assert state is not None
    assert state[1] >= 3
    (ended,) = results(lead, [a])
    assert b.process.wait(LIMIT_S) == -signal.SIGKILL
    assert ended["counter"] == list(range(1, STEPS + 1))
    untouched(lead, [a], [ended])


def test_when_no_state_is_whole_the_newest_checkpoint_decides(lead: Lead, undisturbed: dict[str, Any]) -> None:
    """All ranks were within the optimizer's step: what they hold is used by nobody."""
    values = {"scaled": True, "checkpoints": str(lead.directory / "checkpoints"), "save_every": 2}
    workers = begun(lead, "ab", [fault("all", 5, "inside_update")], **values)
    lead.form(workers)
    assert regrouped(lead, workers, workers) == [None, None]
    ended = results(lead, workers)
    assert [result["digest"] for result in ended] == [undisturbed["digest"]] * 2
    assert all(result["resumed_from"].startswith("step-000000004-") for result in ended)
    assert ended[0]["seen"] == [1, 2, 3, 4, 4, 5, 6, 7, 8]


def test_without_a_checkpoint_nobody_goes_on_from_half_an_update(lead: Lead) -> None:
    """The job ends with a sentence that says what was missing."""
    workers = begun(lead, "ab", [fault("all", 5, "inside_update")])
    lead.form(workers)
    lead.await_failed(workers)
    lead.end()
    lead.await_ready(workers)
    lead.tolerate(workers)
    lead.form(workers)
    for worker in workers:
        assert worker.process.wait(LIMIT_S) == 1
        assert "no rank holds a whole state any more" in worker.log.read_text()


def test_a_mistake_of_the_script_is_no_lost_peer(lead: Lead) -> None:
    """Whatever its words: its exception ends its process, as anywhere else, and the others go on without it.

    It had given its gradients for the step in question, so they commit that. What they absorb is in their logs.
    """
    text = "gloo: socket timeout, Broken pipe"
    workers = begun(lead, "abc", [fault("c", 4, "before_update", f"error:{text}")])
    lead.tolerate(workers[2:])
    lead.form(workers)
    assert workers[2].process.wait(LIMIT_S) == 1
    assert f"RuntimeError: {text}" in workers[2].log.read_text()
    assert '"collective.failed"' not in workers[2].log.read_text()
    regrouped(lead, workers[:2], workers[:2])
    ended = results(lead, workers[:2])
    assert ended[0]["digest"] == ended[1]["digest"]
    untouched(lead, workers[:2], ended, unrecorded=SAMPLES % 16 // 3)
    for worker in workers[:2]:
        (said,) = [json.loads(line) for line in worker.log.read_text().splitlines() if '"collective.failed"' in line]
        assert "(job.py:" in said["trail"][0], said


@pytest.mark.parametrize(("what", "where"), [("raw", "forward"), ("barrier", "before_update")])
def test_a_collective_of_the_scripts_own_inside_a_step_may_lose_a_peer(lead: Lead, what: str, where: str) -> None:
    """One of torch's own functions, waited for at once or later, or the session's barrier behind the backward pass: the
    step comes again, without the lost one."""
    faults = [fault("c", 3, where, "kill"), fault("all", 3, where, what)]
    workers = begun(lead, "abc", faults)
    lead.form(workers)
    regrouped(lead, workers[:2], workers[:2])
    ended = results(lead, workers[:2])
    assert ended[0]["digest"] == ended[1]["digest"]
    untouched(lead, workers[:2], ended)


def test_connections_of_the_script_outlive_the_group_that_was_formed_beside_them(lead: Lead) -> None:
    """A thread opens them while gloo opens its own. C dies, A and B are freed from waiting for it, and not one
    connection of theirs is shut."""
    workers = begun(lead, "abc", [fault("c", 4, "forward", "kill")], neighbours=True)
    lead.form(workers)
    regrouped(lead, workers[:2], workers[:2])
    ended = results(lead, workers[:2])
    assert [result["broken"] for result in ended] == [0, 0]
    assert ended[0]["digest"] == ended[1]["digest"]
    untouched(lead, workers[:2], ended)


def test_a_batch_drawn_before_the_ranks_changed_is_divided_anew(lead: Lead) -> None:
    """C dies while A and B wait for it between the draw of a batch and its step: they train on C's samples too."""
    workers = begun(lead, "abc", [fault("c", 4, "drawn", "kill")], barrier=True)
    lead.form(workers)
    regrouped(lead, workers[:2], workers[:2])
    ended = results(lead, workers[:2])
    assert ended[0]["digest"] == ended[1]["digest"]
    untouched(lead, workers[:2], ended)


def test_a_round_whose_store_is_gone_is_left(lead: Lead) -> None:
    """The node that hosts it died while the round was formed: the ranks stop looking when they hear of that."""
    workers = begun(lead, "ab")
    lead.form(workers, store=f"127.0.0.1:{free_port()}")
    lead.end()
    lead.form(workers)
    ended = results(lead, workers)
    assert ended[0]["digest"] == ended[1]["digest"]
