"""Which workers hang, which of them keep the others waiting, whom to ask, and what speaks against a worker."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.agent.workers.hang_rules import HangLimits, Waiting, all_wait, busy, hung, limit_of
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.model import Phase
from elastic_trainer.settings import rendezvous_options
from tests.unit.agent.readings import rank, reading, round_of, told_by

LIMITS = HangLimits(step_s=10.0, first_step_s=100.0, phase_s=1000.0)
NO_STEP, NO_FIRST, NO_PHASE = (HangLimits(*each) for each in ((0.0, 100.0, 9.0), (10.0, 0.0, 9.0), (10.0, 100.0, 0.0)))


@pytest.mark.parametrize(
    ("limits", "phase", "values", "limit_s"),
    [
        (LIMITS, Phase.STARTING, {"fresh": 0}, 0.0),
        (LIMITS, Phase.WAITING, {}, 0.0),
        (LIMITS, Phase.RENDEZVOUS, {}, 0.0),
        (LIMITS, Phase.ENDING, {}, 0.0),
        (LIMITS, Phase.ENDING, {"waits": True}, 30.0),  # another rank may hang in one more step
        (LIMITS, Phase.HEALING, {"fresh": 0}, 1000.0),
        (LIMITS, Phase.CHECKPOINT, {}, 1000.0),
        (LIMITS, Phase.EVALUATION, {}, 1000.0),
        (LIMITS, Phase.EVALUATION, {"moment": Phase.TRAINING}, 1000.0),
        (LIMITS, Phase.TRAINING, {"moment": Phase.CHECKPOINT}, 1000.0),  # it waits for rank 0's save
        (LIMITS, Phase.TRAINING, {"fresh": 1}, 100.0),
        (LIMITS, Phase.TRAINING, {"fresh": 2}, 30.0),
        (LIMITS, Phase.REPEATED, {"fresh": 2}, 30.0),
        (LIMITS, Phase.DATA, {"fresh": 1}, 100.0),
        (LIMITS, Phase.DATA, {"fresh": 2}, 30.0),
        (LIMITS, Phase.DATA, {"fresh": 0, "steps": 7}, 30.0),
        (LIMITS, Phase.TRAINING, {"fresh": 0, "steps": 7}, 100.0),
        (NO_STEP, Phase.TRAINING, {}, 0.0),
        (NO_STEP, Phase.DATA, {"fresh": 0}, 0.0),
        (NO_FIRST, Phase.TRAINING, {"fresh": 1}, 0.0),
        (NO_FIRST, Phase.TRAINING, {"fresh": 2}, 30.0),
        (HangLimits(10.0, 5.0, 9.0), Phase.TRAINING, {"fresh": 0}, 10.0),
        (NO_PHASE, Phase.EVALUATION, {}, 0.0),
    ],
)
def test_each_phase_has_its_limit(limits: HangLimits, phase: Phase, values: dict[str, Any], limit_s: float) -> None:
    """A step may take ten of the usual ones longer; the first two of a round may compile, and a process's first samples
    may take as long; 0 is for ever."""
    assert limit_of(reading(phase, step_s=2.0, **values), limits) == limit_s


@pytest.mark.parametrize(
    ("phase", "fresh", "inside", "found"),
    [
        (Phase.CHECKPOINT, 5, False, "in checkpoint"),
        (Phase.EVALUATION, 5, True, "in evaluation"),
        (Phase.HEALING, 0, False, "receiving its state"),
        (Phase.DATA, 5, False, "waiting for samples"),
        (Phase.TRAINING, 5, False, "between two steps"),
        (Phase.TRAINING, 1, True, "in the first steps of its round, which may compile"),
        (Phase.TRAINING, 2, True, ""),
        (Phase.REPEATED, 2, True, ""),
        (Phase.RENDEZVOUS, 0, False, ""),
        (Phase.ENDING, 5, False, ""),
    ],
)
def test_what_keeps_a_worker_in_a_round_that_is_over(phase: Phase, fresh: int, inside: bool, found: str) -> None:
    """What waits for nobody: it ends by itself. Who waits for others, in whatever phase, is interrupted."""
    assert busy(reading(phase, fresh=fresh, inside=inside)) == found
    assert busy(reading(Phase.TRAINING, moment=phase, fresh=fresh, inside=inside)) == found
    assert busy(reading(phase, fresh=fresh, inside=inside, waits=True)) == ""


def test_the_shortest_limit_is_that_of_those_there_are() -> None:
    assert [HangLimits(*each).least_s for each in ((9.0, 8.0, 7.0), (0.0, 0.0, 7.0), (0.0, 0.0, 0.0))] == [7.0, 7.0, 0]


def test_who_makes_no_progress_for_longer_than_it_may_is_hung() -> None:
    """Not a victim that has just been freed: its own time begins when it was last seen to wait. Time in which the agent
    stood still counts for nobody."""
    culprit, victim = reading(pid=1, moved_at=50.0), reading(pid=2, moved_at=50.0, waits=True)
    assert hung([culprit, victim], LIMITS, 60.0) == []
    first, second = hung([culprit, victim], LIMITS, 61.0)
    assert (first.is_victim, second.is_victim) == (False, True)
    assert first.reason == "it has made no progress for 11.0 s (in training, after step 0; its limit is 10.0 s)"
    for now, stood, waited, still_s in (
        (160.0, [(155.0, 100.0)], {}, None),
        (162.0, [(155.0, 100.0)], {}, 12.0),
        (61.0, [(49.0, 100.0)], {}, 11.0),
        (79.8, [], {1: 69.8}, None),
        (80.0, [], {1: 69.8}, 10.2),
        (80.0, [], {2: 69.8}, 30.0),
    ):
        found = [each.still_s for each in hung([culprit], LIMITS, now, stood, waited)]
        assert found == ([] if still_s is None else [pytest.approx(still_s)])
    assert hung([victim], LIMITS, 70.0, waited={2: 70.0})[0].still_s == 20.0


@pytest.mark.parametrize("step_s", [0.01, 1.0, 60.0, 3600.0])
def test_a_step_ten_times_as_long_as_usual_is_no_hang(step_s: float) -> None:
    options = rendezvous_options({})
    limits = HangLimits(options.step_timeout, options.first_step_timeout, options.phase_timeout)
    worker = reading(moved_at=0.0, step_s=step_s)
    assert hung([worker], limits, 10.0 * step_s) == []
    assert hung([worker], limits, 10.0 * step_s + 301.0) != []


@pytest.mark.parametrize(
    ("b", "all_do"),
    [
        (told_by("b", rank(1)), True),
        (None, False),
        (told_by("b"), False),
        (told_by("b", rank(1), number=2), False),
        (told_by("b", rank(1, waits=False)), False),
        (told_by("b", rank(1), rank(2, waits=False)), False),
        (told_by("b", rank(1, still_s=269.0)), False),
        (told_by("b", rank(1, still_s=270.0)), True),
        (told_by("b", rank(1, waits_s=149.0)), False),  # it was slow, and has come to the collective
        (told_by("b", rank(1, waits_s=150.0)), True),
    ],
)
def test_all_wait_if_all_say_so(b: Any, all_do: bool) -> None:
    """Who reports nothing, or of another round, or not of all its ranks, or has moved, may be the culprit."""
    told = {"a": told_by("a", rank(0)), "c": told_by("c", rank(7, waits=False))} | ({"b": b} if b else {})
    assert all_wait(round_of(1, "a", "b"), told, 300.0) is all_do
    assert not all_wait(round_of(1, "a", size=2), told, 300.0)


def test_who_waits_is_seen_to_wait_since_it_last_moved() -> None:
    """Looked at now and then: a worker that waits each time, and has stepped in between, has not waited long."""
    still, stepped = reading(pid=1, waits=True, moved_at=1.0), reading(pid=2, waits=True, moved_at=1.0)
    first = Waiting.seen({}, [still, stepped], 10.0)
    assert {pid: each.since for pid, each in first.items()} == {1: 10.0, 2: 10.0}
    later = Waiting.seen(first, [still, reading(pid=2, waits=True, moved_at=11.0), reading(pid=3, waits=True)], 12.0)
    assert {pid: each.since for pid, each in later.items()} == {1: 10.0, 2: 12.0, 3: 12.0}
    assert Waiting.seen(later, [], 13.0) == {}


# ---- whom to ask, and what speaks against a worker that others wait for


@pytest.mark.parametrize(
    ("step_s", "patience_s"), [(0.0, hang_rules.LEAST_WAIT_S), (0.4, 1.2), (60.0, hang_rules.LONGEST_WAIT_S)]
)
def test_a_wait_is_too_long_after_three_steps(step_s: float, patience_s: float) -> None:
    """Within bounds: short steps are no reason for haste, and long ones none for patience."""
    assert hang_rules.patience_s(step_s) == pytest.approx(patience_s)


def test_late_answers_make_the_next_limit_longer_for_a_while() -> None:
    """Twice the longest one of late; the answer of somebody who had stood still teaches nothing."""
    delays = hang_rules.AnswerDelays()
    delays.add(0.3, now=0.0)
    delays.add(0.01, now=1.0)
    delays.add(hang_rules.LONGEST_DELAY_S + 1.0, now=2.0)
    assert delays.limit_s(0.2, now=3.0) == pytest.approx(0.6)
    assert delays.limit_s(0.2, now=0.5 + hang_rules.REMEMBERED_S) == pytest.approx(0.2)


def test_each_node_asks_those_around_it() -> None:
    """All of few, eight of a crowd, so that eight ask each; in a planned change those of the next round."""
    letters = "abcdefghijklmnopqrst"
    assert set(hang_rules.neighbours(round_of(1, *letters[:9]), "e")) == set(letters[:9]) - {"e"}
    assert hang_rules.neighbours(round_of(1, "a", "b"), "b") == ("a",)
    assert hang_rules.neighbours(round_of(1, "a"), "a") == ()
    asked = {node: hang_rules.neighbours(round_of(1, *letters), node) for node in letters}
    assert set(asked["h"]) == set("defgijkl")
    assert {sum(node in each for each in asked.values()) for node in letters} == {8}
    draining = round_of(1, "a", "b", "c", state=RoundState.DRAINING, next=round_of(2, "a", "b", "d"))
    assert set(hang_rules.neighbours(draining, "a")) == {"b", "d"}
    assert hang_rules.neighbours(draining, "c") == ()
    assert hang_rules.neighbours(round_of(1, "a", "b", state=RoundState.BROKEN), "a") == ()


def test_who_is_forming_a_group_waits_for_others_too() -> None:
    seek = [hang_rules.seeks_others(each) for each in (reading(waits=True), reading(Phase.RENDEZVOUS), reading())]
    assert seek == [True, True, False]


SILENT = "it has answered nothing for 0.6 s (state: running)"


@pytest.mark.parametrize(
    ("page", "state", "silent_s", "found"),
    [
        (reading(), "running", 0.6, SILENT),
        (reading(), "running", 0.4, None),
        (reading(), "traced", 60.0, None),
        (reading(fresh=1), "running", 60.0, None),  # it may compile
        (reading(Phase.CHECKPOINT), "running", 60.0, None),
        (reading(Phase.STARTING), "running", 60.0, None),
        (reading(Phase.CHECKPOINT), "stopped", 0.0, "its process is stopped"),
        (None, "running", 60.0, None),  # without a page only the kernel speaks against it
        (None, "stopped", 0.0, "its process is stopped"),
    ],
)
def test_a_worker_that_answers_nothing_in_a_step_is_stuck(
    page: Any, state: str, silent_s: float, found: str | None
) -> None:
    assert hang_rules.stuck(page, state, silent_s, 0.5) == found
