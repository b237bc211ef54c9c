"""The state of a run, and what a monitor observes of it over time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import Departure, JournalEntry, RoundState, RunResult, Saved, Spec
from elastic_trainer.monitor import state
from elastic_trainer.monitor.state import Observer, Point, Rate, Recorder, RunDocuments
from elastic_trainer.telemetry.families import RUN_STATES
from tests.support.monitored import entry, health, rank, record, run


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


def test_who_is_there_and_in_the_round() -> None:
    """The key of an excluded node lasts until its lease ends; it counts again once it changes. The round means one life
    of a node's workers: after a restart, or under a new key, it is a newcomer."""
    ghost = run(2).nodes["n1"].ghost
    assert set(run(2, round_={"ghosts": (ghost,)}).living_nodes) == {"n0"}
    assert set(run(2, round_={"ghosts": (ghost.model_copy(update={"mod_revision": 20}),)}).living_nodes) == {"n0", "n1"}
    nodes = {**run(3).nodes, "n1": NodeView("n1", 11, 30, record(life=2)), "n2": NodeView("n2", 99, 99, record())}
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
    named = ((RoundState(state), tuple(f"n{each}" for each in nodes)) for state, nodes in rounds)
    return tuple(entry(1, state, 1.0, nodes=nodes, world_size=len(nodes)) for state, nodes in named)


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


@pytest.mark.parametrize(
    ("count", "spec", "found"),
    [(3, None, ["n9"]), (4, Spec(min_nodes=2, max_nodes=6, shard_nodes=2), []),
     (4, Spec(min_nodes=2, max_nodes=4, shard_nodes=2), ["n9"])],
)  # fmt: skip
def test_a_node_that_waits_beside_a_round_is_a_spare(count: int, spec: Spec | None, found: list[str]) -> None:
    """Unless it waits for its shard group to be complete; before a round nodes are gathered."""
    nodes = {**run(count).nodes, "n9": NodeView("n9", 99, 99, record())}
    assert state.spares(run(count, nodes=nodes, spec=spec)) == found
    assert state.spares(run(count, nodes=nodes, spec=spec, round=None)) == []


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


FIRST = {"n0": health("n0"), "n1": health("n1")}
SECOND = {**FIRST, "n0": health("n0")}
SAVED, SAVED_AGAIN = (
    run(health={"n0": health("n0", saved=Saved(step=step, wall=wall))}) for step, wall in ((1, 4990.0), (2, 9999.0))
)
BROKEN, GONE = run(state=RoundState.BROKEN), run(0)
COURSES: dict[str, tuple[str, list[tuple[RunDocuments, float, float, Any]]]] = {
    # what is observed; then one look after the other: what is there, monotonic time, wall time, the value
    "the time in a state is known once it has been seen to begin": ("state_since", [
        (run(), 10.0, 0.0, None), (run(), 20.0, 0.0, None), (BROKEN, 30.0, 0.0, 30.0), (BROKEN, 40.0, 0.0, 30.0),
        (run(round_={"number": 2}), 50.0, 0.0, 50.0),
        (run(round_={"number": 4}), 60.0, 0.0, 60.0),  # what was between was too short
    ]),
    "an age begins anew with each document that arrives, and with none that is read again": ("arrived", [
        (run(health=FIRST), 10.0, 0.0, {}), (run(health=SECOND), 15.0, 0.0, {"n0": 15.0, "n1": 10.0}),
        (run(health={"n0": SECOND["n0"]}), 20.0, 0.0, {"n0": 15.0}),
    ]),
    "gathering begins when the round ended, or at the first look; never while ranks train": ("gathering_since_wall", [
        (run(), 1.0, 5001.0, 0.0),
        (run(state=RoundState.BROKEN, journal=(entry(1), entry(1, RoundState.BROKEN, 4999.5))), 2.0, 5002.0, 4999.5),
        (run(state=RoundState.DRAINING), 3.0, 5003.0, 0.0), (GONE, 4.0, 5004.0, 5004.0), (GONE, 5.0, 5005.0, 5004.0),
    ]),
    "the age of a checkpoint goes on from when it was seen; at the first look by its node's clock": ("saved_s", [
        (SAVED, 10.0, 5000.0, 10.0), (SAVED, 15.0, 5005.0, 15.0), (SAVED_AGAIN, 16.0, 5006.0, 0.0),
        (run(), 17.0, 5007.0, None),
    ]),
    "a run is over since it closed or was left by all": ("over_s", [
        (run(), 10.0, 5000.0, None), (GONE, 20.0, 5010.0, 0.0), (GONE, 25.0, 5015.0, 5.0), (run(), 30.0, 5020.0, None),
    ]),
    "one that was over before the first look, since its last transition": ("over_s", [
        (run(state=RoundState.CLOSED, journal=(entry(1, RoundState.CLOSED, 1000.0),)), 10.0, 5000.0, 4000.0),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", COURSES)
def test_what_is_observed_over_time(name: str) -> None:
    observer, (figure, looks) = Observer(), COURSES[name]
    for documents, now, wall, value in looks:
        assert getattr(observer.observe(documents, now, wall), figure) == value, now


def test_rates_are_taken_between_changes() -> None:
    """Looks between that show no change are no standstill. A count that rests has the rate 0 after the window, and one
    that shrinks begins anew."""
    rate, rates = Rate(window_s=30.0), []
    for second in range(100):
        rate.observe(float(second), float(second // 5 * 500))
        rates.append(rate.per_s())
    assert rates[4] is None
    assert {round(each) for each in rates[5:] if each is not None} == {100}
    rate, rates = Rate(window_s=30.0), []
    for now, count in ((0.0, 5.0), (1.0, 10.0), (40.0, 10.0), (41.0, 3.0), (42.0, 4.0), (43.0, None)):
        rate.observe(now, count)
        rates.append(rate.per_s())
    assert rates == [None, 5.0, 0.0, None, 1.0, None]


def test_the_curves_are_those_of_what_was_seen() -> None:
    """A point a second at first, and one at each change of the ranks."""
    observer = Observer()
    told = {"n0": health("n0", [rank(0, step=3, step_s=0.2), rank(1, 1, step=3, step_s=0.4)], loss=0.7)}
    observer.observe(run(health=told), 1.0, 5000.0)
    observer.observe(run(health=told), 1.5, 5000.5)
    curves = observer.observe(run(1, health=told), 1.7, 5000.7).curves
    assert curves["wall"] == [5000.0, 5000.7]
    assert (curves["step"], curves["loss"], curves["world_size"]) == ([3, 3], [0.7, 0.7], [4, 2])
    assert curves["step_s"] == [pytest.approx(0.3)] * 2
    gap = observer.observe(run(health=told), 3.0, 5002.0, known=False).curves
    assert (gap["step"][-1], gap["loss"][-1], gap["world_size"][-1]) == (None, None, None)


def test_a_long_course_is_thinned_over_its_whole_length() -> None:
    """Never more than the limit, from the first point to the last, at about equal distances, in order."""
    recorder = Recorder(limit=100)
    for second in range(100_000):
        recorder.offer(Point(float(second), second, 1.0, 0.1, 4))
        if second % 997 == 0:
            assert len(recorder.curves()["wall"]) <= 100
    wall = recorder.curves()["wall"]
    assert len(wall) >= 50
    assert wall == sorted(wall)
    assert wall[0] == 0.0
    assert wall[-1] > 97_000
    gaps = [later - earlier for earlier, later in pairwise(wall)]
    assert max(gaps) <= 4 * sorted(gaps)[len(gaps) // 2]


def test_a_standstill_is_a_gap_in_the_step_time_and_no_rate() -> None:
    """From three median steps on: what was measured before says nothing of the present."""
    observer, waits = Observer(), {"waits": True}
    for second, still_s in enumerate((0.1, 4.0, 42.0, 0.1)):
        told = {
            "n0": health("n0", [rank(0, still_s=still_s), rank(1, 1, still_s=still_s, **waits)], {"samples": second})
        }
        seen = observer.observe(run(1, health=told), 100.0 + second, 1000.0 + second)
        assert (seen.samples_per_s == 0.0) == (still_s > 5.0)
    assert seen.curves["step_s"] == [0.2, 0.2, None, 0.2]
    ended = run(0, state=RoundState.CLOSED, health=told)
    rates = [observer.observe(ended, now, 0.0).samples_per_s for now in (104.0, 200.0)]
    assert rates == [seen.samples_per_s] * 2, "a run that has ended keeps its rate"
