"""One record of each round's end, reported by one node, with what ended it and how it went on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from elastic_trainer.agent.health.incidents import SILENT_S, Incidents
from elastic_trainer.ipc.page import Reading
from elastic_trainer.membership.documents import Ghost, Incident, RoundDocument, RoundState, RunResult
from elastic_trainer.model import Cause, Phase
from tests.unit.agent.readings import reading, round_of

BROKEN, DRAINING, CLOSED = RoundState.BROKEN, RoundState.DRAINING, RoundState.CLOSED
WALL = 1_700_000_000.0


@dataclass
class Run:
    """The agents of several nodes, that see the same documents; and what they report."""

    nodes: dict[str, Incidents]
    now: float = 1000.0
    present: tuple[str, ...] = ()
    told: list[tuple[str, Incident]] = field(default_factory=list)

    def see(self, document: RoundDocument, after_s: float = 0.0, *, takes_part: bool = True) -> Run:
        self.now += after_s
        for each in self.nodes.values():
            each.see(document, self.now, WALL + self.now, self.present, takes_part=takes_part)
        return self

    def look(self, *readings: Reading, after_s: float = 0.0) -> Run:
        """All agents see workers like these."""
        self.now += after_s
        for name, each in self.nodes.items():
            self.told += [(name, incident) for incident in each.complete(readings, self.now)]
        return self

    @property
    def only(self) -> tuple[str, Incident]:
        (one,) = self.told
        return one


def run_of(*names: str) -> Run:
    return Run({name: Incidents(name) for name in names}, present=names)


def stepping(round_: int, step: int, now: float, *, fresh: int = 1, **more: object) -> Reading:
    values: dict[str, Any] = {"first_at": now, "moved_at": now, "stepped_at": now} | more
    return reading(round=round_, step=step, fresh=fresh, **values)


def trained(*names: str, step: int = 10) -> Run:
    run = run_of(*names).see(round_of(1, *names))
    return run.look(stepping(1, step, run.now, fresh=step), after_s=5.0)


@pytest.mark.parametrize("seen", [{"round": 1, "phase": Phase.RENDEZVOUS}, {"round": 2, "phase": Phase.TRAINING}])
@pytest.mark.parametrize("told", ["of the end", "of the next round alone"])
def test_who_is_freed_by_the_end_of_a_round_does_not_shorten_what_it_took_to_find(
    seen: dict[str, Any], told: str
) -> None:
    """A victim meets the others as soon as the culprit is dead, and may be in the next round before its node has read
    that this one is over: the time to find the fault runs from the last step on."""
    run = trained("a", "b")
    run.look(reading(step=10, fresh=0, moved_at=run.now + 7.0, **seen), after_s=7.0)
    if told == "of the end":
        run.see(round_of(1, "a", "b", state=BROKEN, cause=Cause.WORKER_HUNG, reason="its worker 0 hung"), 0.01)
    run.see(round_of(2, "a", "b!2", cause=Cause.WORKER_HUNG, reason="node b's worker hung"), 0.5)
    run.look(stepping(2, 11, run.now), after_s=1.0)
    assert run.only[1].detect_s == pytest.approx(12.0, abs=0.6)


def test_a_hang_took_all_from_the_last_step_to_the_next() -> None:
    """Not from when it was found: what a worker did meanwhile, or a phase that it changed, was no progress."""
    run = trained("a", "b")
    run.look(reading(step=10, stepped_at=1000.0, moved_at=run.now + 20.0), after_s=20.0)
    run.see(round_of(1, "a", "b", state=BROKEN, cause=Cause.WORKER_HUNG), 17.0)
    run.see(round_of(2, "a", "b!2", cause=Cause.WORKER_HUNG), 0.4).look(stepping(2, 11, run.now + 0.5), after_s=1.0)
    incident = run.only[1]
    assert incident.total_s == pytest.approx(42.9)
    assert incident.outcome == (
        "No step was lost. Training stood still for 43 s: 42 s until the hang was noticed, 400 ms to regroup, 500 ms to"
        " resume."
    )


def test_a_worker_that_is_killed_is_one_incident() -> None:
    """The node of rank 0 reports it when the next round has made a step, with the node and the ranks it was about."""
    run = trained("a", "b")
    run.see(round_of(1, "a", "b", state=BROKEN, cause=Cause.WORKER_LOST, reason="its worker 0 was lost"), 2.0)
    run.look(stepping(1, 10, 1000.0), after_s=0.5)
    run.see(round_of(2, "a", "b!2", cause=Cause.WORKER_LOST, reason="node b lost a worker"), 0.5)
    run.look(stepping(1, 10, 1000.0), after_s=1.0)
    assert run.told == []
    run.look(stepping(2, 11, run.now), after_s=3.0)
    teller, incident = run.only
    assert (teller, incident.planned) == ("a", False)
    assert incident == Incident(
        wall=WALL + 1007.0,
        by="a",
        cause=Cause.WORKER_LOST,
        round=1,
        next_round=2,
        reason="node b lost a worker",
        nodes=("b",),
        ranks=(1,),
        world_before=2,
        world_after=2,
        step=10,
        steps_lost=0,
        detect_s=7.0,
        regroup_s=1.0,
        resume_s=1.0,
    )
    run.look(stepping(2, 12, run.now), after_s=1.0)
    assert len(run.told) == 1


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize(("killed", "rank", "teller"), [("b", 1, "a"), ("a", 0, "b")])
def test_a_node_that_is_killed_is_named_with_its_ranks(killed: str, rank: int, teller: str, silent: bool) -> None:
    """The end of rank 0's node is reported by the next rank 0's, with how it was found if somebody asked it in vain."""
    run = trained("a", "b", "c")
    del run.nodes[killed]
    found = f"node {killed} does not answer" if silent else "ranks lost each other"
    ghosts = (Ghost(node=killed, mod_revision=1),) if silent else ()
    run.see(round_of(1, "a", "b", "c", state=BROKEN, cause=Cause.CONTACT_LOST, reason=found, ghosts=ghosts), 1.0)
    run.see(round_of(2, *run.nodes, cause=Cause.NODE_LOST, reason=f"node {killed} was lost"), 1.0)
    run.look(stepping(2, 11, run.now + 1.0), after_s=1.0)
    by, incident = run.only
    assert (by, incident.cause, incident.nodes, incident.ranks) == (teller, Cause.NODE_LOST, (killed,), (rank,))
    assert incident.reason == f"node {killed} was lost" + (f": {found}" if silent else "")
    assert (incident.world_before, incident.world_after) == (3, 2)


@pytest.mark.parametrize(
    ("before", "after", "cause", "concerned"),
    [
        (("a",), ("a", "b"), Cause.NODE_JOINED, ("b",)),
        (("a", "b"), ("a",), Cause.NODE_LEFT, ("b",)),
        (("a", "b"), ("a", "c"), Cause.NODE_LEFT, ("b", "c")),
    ],
)
def test_a_planned_change_took_only_the_pause(
    before: tuple[str, ...], after: tuple[str, ...], cause: Cause, concerned: tuple[str, ...]
) -> None:
    """They trained on until they changed over: what a worker spent in pauses is what it cost."""
    run = trained(*before)
    run.look(reading(round=1, step=10, seconds={Phase.RENDEZVOUS: 1.0}, phase_at=run.now))
    planned = round_of(2, *after)
    run.see(round_of(1, *before, state=DRAINING, next=planned), 1.0).see(planned, 30.0)
    spent = {Phase.RENDEZVOUS: 1.5, Phase.HEALING: 0.25}
    run.look(stepping(2, 21, run.now + 1.0, seconds=spent), after_s=1.0)
    teller, incident = run.only
    assert (teller, incident.planned, incident.cause, incident.nodes) == ("a", True, cause, concerned)
    assert (incident.total_s, incident.detect_s, incident.steps_lost) == (0.75, 0.0, 0)


def test_a_planned_change_that_restarts_workers_took_all_between() -> None:
    """The new process knows nothing of the pauses of the old one: from the last step, which the old one made while the
    round was ending, to the first of the new one."""
    run = trained("a")
    run.look(reading(pid=1, round=1, step=10, seconds={Phase.RENDEZVOUS: 9.0}, phase_at=run.now))
    run.see(round_of(1, "a", state=DRAINING), 1.0).look(stepping(1, 12, run.now + 2.0, pid=1), after_s=2.0)
    run.see(round_of(2, "a!2", "b"), 3.0).look(after_s=1.0)
    run.look(stepping(2, 11, run.now + 4.0, pid=2), after_s=5.0)
    _, incident = run.only
    assert (incident.planned, incident.cause) == (True, Cause.NODE_JOINED)
    assert (incident.regroup_s, incident.resume_s) == (3.0, 5.0)


def test_a_failure_goes_before_the_planned_change_that_was_under_way() -> None:
    """What is broken is the round behind it; it is one incident, and a failure."""
    run = trained("a", "b")
    planned = round_of(2, "a", "b", "c")
    run.see(round_of(1, "a", "b", state=DRAINING, next=planned), 1.0)
    run.see(planned.model_copy(update={"state": BROKEN, "cause": Cause.NODE_LOST}), 1.0)
    run.see(round_of(3, "a", "b", cause=Cause.NODE_LOST), 1.0).look(stepping(3, 11, run.now + 1.0))
    _, incident = run.only
    assert (incident.planned, incident.cause, incident.round) == (False, Cause.NODE_LOST, 2)
    assert incident.nodes == ("c",)


@pytest.mark.parametrize("seen", [True, False])
def test_a_round_that_ends_before_its_first_step_leaves_an_incident_behind(seen: bool) -> None:
    """Both ends are reported. Nothing went on after the first; the second took all from the last step on."""
    run = trained("a", "b", "c")
    run.see(round_of(1, "a", "b", "c", state=BROKEN, cause=Cause.WORKER_LOST), 1.0)
    run.see(round_of(2, "a", "b!2", "c", cause=Cause.WORKER_LOST), 1.0).look(after_s=1.0)
    if seen:
        run.see(round_of(2, "a", "b!2", "c", state=BROKEN, cause=Cause.NODE_LOST), 1.0)
    run.see(round_of(3, "a", "b!2", cause=Cause.NODE_LOST), 1.0)
    run.look(stepping(3, 11, run.now + 1.0), after_s=1.0)
    told = [(teller, each.cause, each.round, each.resumed) for teller, each in run.told]
    assert told == [("a", Cause.WORKER_LOST, 1, False), ("a", Cause.NODE_LOST, 2, True)]
    first, second = (each for _, each in run.told)
    assert first.total_s is None
    assert (second.before_s, second.total_s) == (7.0, run.now - 1000.0)


@pytest.mark.parametrize("broken", [True, False])
def test_a_run_that_failed_ends_with_an_incident(broken: bool) -> None:
    run = trained("a", "b")
    if broken:
        run.see(round_of(1, "a", "b", state=BROKEN, cause=Cause.WORKER_LOST), 1.0)
    closing = {"state": CLOSED, "result": RunResult.FAILED, "reason": "3 failures", "cause": Cause.WORKER_LOST}
    run.see(round_of(1, "a", "b").model_copy(update=closing), 2.0).look()
    teller, incident = run.only
    assert (teller, incident.next_round, incident.total_s, incident.reason) == ("a", None, None, "3 failures")
    assert (incident.cause, incident.world_after) == (Cause.WORKER_LOST, 0)
    assert incident.regroup_s == (2.0 if broken else 0.0)


def test_a_run_that_failed_with_rank_0s_node_is_reported_by_another() -> None:
    run = trained("a", "b", "c")
    del run.nodes["a"]
    run.present = ("b", "c")
    run.see(round_of(1, "a", "b", "c", state=BROKEN, cause=Cause.NODE_LOST), 1.0)
    run.see(round_of(1, "a", "b", "c", state=CLOSED, result=RunResult.FAILED), 1.0).look()
    assert run.only[0] == "b"


def test_a_run_that_failed_while_it_recovered_has_two_incidents_and_one_that_succeeded_none() -> None:
    """One that goes on after it was closed begins anew."""
    run = trained("a", "b")
    run.see(round_of(1, "a", "b", state=BROKEN, cause=Cause.WORKER_LOST), 1.0)
    run.see(round_of(2, "a", "b!2"), 1.0)
    run.see(round_of(2, "a", "b!2", state=CLOSED, result=RunResult.FAILED), 1.0).look()
    assert [(incident.round, incident.next_round) for _, incident in run.told] == [(1, 2), (2, None)]
    run = trained("a", "b").see(round_of(1, "a", "b", state=CLOSED, result=RunResult.SUCCEEDED), 1.0)
    run.look().see(round_of(1, "a", "b", state=CLOSED, result=RunResult.FAILED)).look()
    run.see(round_of(2, "a!2"), 60.0).look(stepping(2, 11, run.now))
    assert run.told == []


def test_scripts_without_a_session_are_reported_as_well() -> None:
    """Nothing reports a step: a minute after the agreement the incident is closed with what is known. The age of the
    round says nothing of when training stopped."""
    run = run_of("a", "b").see(round_of(1, "a", "b"))
    run.see(round_of(1, "a", "b", state=BROKEN, cause=Cause.WORKER_LOST), 5.0)
    run.see(round_of(2, "a!2", "b!2", cause=Cause.WORKER_LOST), 2.0)
    run.look(after_s=SILENT_S)
    assert run.told == []
    run.look(after_s=1.0)
    _, incident = run.only
    assert (incident.detect_s, incident.regroup_s, incident.resumed, incident.nodes) == (0.0, 2.0, False, ())
    assert (incident.total_s, incident.outcome) == (None, "No step of round 2 is known; it took 2.0 s to regroup.")


def test_steps_behind_the_checkpoint_are_lost() -> None:
    """From the newest that any worker is known to have made, also in the moment behind the last look."""
    run = trained("a", "b", step=110)
    run.see(round_of(1, "a", "b", state=BROKEN, cause=Cause.NODE_LOST), 0.1)
    run.look(stepping(1, 112, run.now))
    run.see(round_of(2, "a!2", cause=Cause.NODE_LOST), 1.0)
    run.look(stepping(2, 103, run.now, fresh=3, pid=2), after_s=1.0)
    _, incident = run.only
    assert (incident.step, incident.steps_lost) == (112, 12)


def test_the_first_round_is_no_incident() -> None:
    run = run_of("a", "z").see(round_of(1, "a")).look(stepping(1, 1, 1000.0))
    assert run.told == []
    run.see(round_of(1, "a", state=DRAINING), 1.0).see(round_of(2, "a", "z"), 1.0)
    run.look(stepping(2, 2, run.now + 1.0), after_s=1.0)
    assert run.only[0] == "a"


@pytest.mark.parametrize("names", [("c", "d"), ("a", "b")], ids=["others", "of the same names"])
@pytest.mark.parametrize("steps", [True, False])
def test_a_round_whose_nodes_all_died_at_once_is_recorded_by_those_that_come(
    names: tuple[str, ...], steps: bool
) -> None:
    """Nobody could break it. One of the next round reports it, also if that round makes no step."""
    run = Run({name: Incidents(name, reached=12) for name in names})
    following = renamed(round_of(2, *names, reason="all 2 nodes are present"), key=50)
    run.see(round_of(1, "a", "b", size=2), takes_part=False).see(following, 30.0)
    if steps:
        run.look(stepping(2, 11, run.now + 4.0), after_s=4.0)
    else:
        run.see(following.model_copy(update={"state": BROKEN}), 4.0).see(renamed(round_of(3, *names), key=50), 1.0)
        run.look()
    teller, incident = run.only
    assert (teller, incident.total_s) == (names[0], None)
    assert (incident.cause, incident.nodes, incident.ranks) == (Cause.NODE_LOST, ("a", "b"), (0, 1, 2, 3))
    assert incident.reason == "all nodes of round 1 were lost"
    assert (incident.round, incident.next_round, incident.open) == (1, 2, False)
    assert (incident.step, incident.steps_lost) == (12, 2 if steps else 0)
    assert (incident.detect_s, incident.wall) == (0.0, WALL + 1030.0)


@pytest.mark.parametrize("state", [DRAINING, BROKEN], ids=["stopped", "broken by a member"])
@pytest.mark.parametrize("name", ["a", "c"], ids=["of the same name", "another"])
def test_a_round_whose_end_its_own_nodes_recorded_is_not_recorded_again(state: RoundState, name: str) -> None:
    """A spare node saw it: a run that was stopped is no fault, and the incident of a broken round is in the store."""
    run = Run({name: Incidents(name)}).see(round_of(1, "a", "b"), takes_part=False)
    run.see(round_of(1, "a", "b", state=state), 1.0, takes_part=False).see(renamed(round_of(2, name), key=50), 5.0)
    assert run.look(stepping(2, 1, run.now), after_s=1.0).told == []


def test_a_node_that_watched_a_round_and_joined_it_records_its_end_as_any_other() -> None:
    run = Run({"c": Incidents("c")}).see(round_of(1, "a"), takes_part=False).see(round_of(2, "a", "c"), 1.0)
    run.look(stepping(2, 5, run.now), after_s=1.0)
    run.see(round_of(2, "a", "c", state=BROKEN, cause=Cause.NODE_LOST), 1.0).see(round_of(3, "c"), 1.0)
    run.look(stepping(3, 6, run.now), after_s=1.0)
    assert (run.only[1].round, run.only[1].nodes, run.only[1].planned) == (2, ("a",), False)


def renamed(document: RoundDocument, key: int) -> RoundDocument:
    """The same round of nodes with other keys."""
    members = tuple(member._replace(create_revision=key + at) for at, member in enumerate(document.members))
    return document.model_copy(update={"members": members})
