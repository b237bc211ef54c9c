"""Which state a run is in, and what is the newest step and loss."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import Departure, JournalEntry, RoundState, RunResult, Spec
from elastic_trainer.monitor import state
from elastic_trainer.monitor.state import RunDocuments
from elastic_trainer.telemetry.families import RUN_STATES
from tests.support.monitored import health, rank, record, run


def left(*, planned: bool) -> Departure:
    return Departure(wall=1.0, node="n0", planned=planned, reason="SIGTERM", exit_code=143)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (RunDocuments("r"), "gathering"),
        (run(round=None), "gathering"),
        (run(), "training"),
        (run(state=RoundState.DRAINING), "changing"),
        (run(state=RoundState.BROKEN), "recovering"),
        (run(1, state=RoundState.BROKEN, spec=Spec(min_nodes=2, max_nodes=2)), "gathering"),
        (run(0), "gathering"),
        (run(0, departure=left(planned=True)), "stopped"),
        (run(0, round=None, departure=left(planned=True)), "stopped"),
        (run(0, departure=left(planned=False)), "abandoned"),
        (run(1, departure=left(planned=True)), "training"),
        (run(0, state=RoundState.CLOSED, round_={"result": RunResult.SUCCEEDED}), "succeeded"),
        (run(state=RoundState.CLOSED, round_={"result": RunResult.FAILED}), "failed"),
    ],
)
def test_the_state_follows_from_round_and_nodes(documents: RunDocuments, expected: str) -> None:
    """Each of the states that the metrics know; a round that no node is left of is none."""
    assert state.run_state(documents) == expected
    assert expected in RUN_STATES
    assert (state.world_size(documents) > 0) is (expected in ("training", "changing"))


def test_a_ghost_is_no_node() -> None:
    """The key of an excluded node lasts until its lease ends; it counts again once it changes."""
    ghost = run(2).nodes["n1"].ghost
    documents = run(2, round_={"ghosts": (ghost,)})
    assert set(documents.live) == {"n0"}
    assert set(run(2, round_={"ghosts": (ghost.model_copy(update={"mod_revision": 20}),)}).live) == {"n0", "n1"}


def test_a_member_in_another_life_is_not_in_the_round() -> None:
    """The round means one life of a node's workers: after a restart, or under a new key, it is a newcomer."""
    documents = run(3)
    nodes = dict(documents.nodes)
    nodes["n1"] = NodeView("n1", 11, 30, record(life=2))
    nodes["n2"] = NodeView("n2", 99, 99, record())
    assert set(state.members(run(3, nodes=nodes))) == {"n0"}


def progress(round_: int, step: int, loss: float | None = 0.5) -> Progress:
    return Progress(round=round_, step=step, epoch=0, samples=64, loss=loss)


@pytest.mark.parametrize(
    ("more", "step", "loss"),
    [
        ({}, None, None),
        ({"round_": {"last_step": 7}}, 7, None),
        ({"progress": progress(1, 20)}, 20, 0.5),
        ({"progress": progress(1, 20, None), "health": {"n0": health("n0", loss=0.4)}}, 20, 0.4),
        ({"health": {"n0": health("n0", [rank(0, step=9)], loss=0.3)}, "progress": progress(0, 5)}, 9, 0.3),
        ({"health": {"n1": health("n1", [rank(0, step=9)], loss=0.2)}}, 9, None),
        ({"progress": progress(0, 5)}, 5, 0.5),
    ],
)
def test_the_newest_step_and_loss_come_from_whoever_knows_them(
    more: dict[str, Any], step: int | None, loss: float | None
) -> None:
    """Progress of this round, else what its ranks tell, else what an earlier round left. The loss is rank 0's."""
    documents = run(**more)
    assert state.current_step(documents) == step
    assert state.current_loss(documents) == loss


def story(*rounds: tuple[str, str]) -> tuple[JournalEntry, ...]:
    """Transitions: the state, and the nodes by their digits."""
    return tuple(
        JournalEntry(
            wall=1.0,
            by="n0",
            round=1,
            state=RoundState(name),
            reason="",
            nodes=tuple(f"n{each}" for each in nodes),
            world_size=len(nodes),
        )
        for name, nodes in rounds
    )


@pytest.mark.parametrize(
    ("live", "rounds", "asked", "lost"),
    [
        (2, [("active", "01")], (), []),
        (2, [("active", "012"), ("broken", "012"), ("active", "01")], (), ["n2"]),
        (2, [("active", "012"), ("draining", "012"), ("active", "01")], (), []),
        (2, [("active", "012"), ("broken", "012"), ("active", "01")], ("n2",), []),
        (3, [("active", "013"), ("broken", "013"), ("active", "01"), ("draining", "01"), ("active", "012")], (), []),
        (2, [("active", "789"), ("broken", "789"), ("active", "01")], ("n7", "n8"), []),
        (2, [("active", "789"), ("broken", "789"), ("active", "01")], ("n7",), []),
        (1, [("active", "789"), ("broken", "789")], ("n7",), ["n8"]),
        (0, [("active", "01")], (), ["n0", "n1"]),
    ],
)
def test_nodes_that_a_fault_took_are_missed_until_others_come(
    live: int, rounds: list[tuple[str, str]], asked: tuple[str, ...], lost: list[str]
) -> None:
    """A planned change sets the size anew, and who left on request is not missed."""
    left_health = {name: health(name, counters={"left": 1.0}) for name in asked}
    assert state.lost_nodes(run(live, journal=story(*rounds), health=left_health)) == lost


def test_a_node_that_waits_beside_a_round_is_a_spare() -> None:
    """Only where a round is on: before it, nodes are gathered."""
    documents = run(3)
    extra = NodeView("n9", 99, 99, record())
    assert state.spares(run(3, nodes={**documents.nodes, "n9": extra})) == ["n9"]
    assert state.spares(run(3, nodes={**documents.nodes, "n9": extra}, round=None)) == []


@pytest.mark.parametrize(("most", "found"), [(6, []), (4, ["n9"])])
def test_a_node_without_a_whole_shard_group_is_no_spare(most: int, found: list[str]) -> None:
    """When its partner is back it joins, and nothing was used up."""
    nodes = {**run(4).nodes, "n9": NodeView("n9", 99, 99, record())}
    spec = Spec(min_nodes=2, max_nodes=most, shard_nodes=2)
    assert state.spares(run(4, nodes=nodes, spec=spec)) == found


STILL, WAITS = {"still_s": 6.0}, {"still_s": 6.0, "waits": True}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((STILL, WAITS, WAITS), ["awaited", "waits", "waits"]),
        ((WAITS, {**STILL, "phase": "data"}, WAITS), ["waits", "awaited", "waits"]),
        ((STILL, WAITS, {**WAITS, "still_s": 4.9}), []),  # one has just come: a slow step
        ((STILL, WAITS, {**WAITS, "step_s": 30.0}), ["awaited", "waits", "waits"]),  # the median counts
        ((*[{**STILL, "step_s": 2.1}] * 2, {**WAITS, "step_s": 2.1}), []),  # not yet three steps
        ((WAITS, WAITS, WAITS), []),
        ((STILL, STILL, STILL), []),
        ((*[{**STILL, "still_s": 31.0}] * 3,), ["still"] * 3),
        ((*[{**WAITS, "still_s": 31.0}] * 3,), ["still"] * 3),  # all wait for each other
        (({**STILL, "phase": "checkpoint"}, WAITS, WAITS), []),  # it has its own limit
        ((*[{**STILL, "step_s": 0.0}] * 2, {**WAITS, "step_s": 0.0}), []),  # the first step may compile
        ((STILL, WAITS), []),  # the third, of which nothing is known, may be the one
    ],
)
def test_who_holds_up_the_others_is_known_after_three_steps(
    ranks: tuple[dict[str, Any], ...], expected: list[str]
) -> None:
    """Long before anybody is killed: the one that does not wait while all others do."""
    told = {f"n{i}": health(f"n{i}", [rank(i, **values)]) for i, values in enumerate(ranks)}
    assert list(state.stalls(run(3, 1, health=told)).values()) == expected
    ended = run(3, 1, health=told, state=RoundState.BROKEN)
    assert state.stalls(ended) == {}
