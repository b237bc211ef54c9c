"""Which workers hang, and which of them keep the others waiting."""

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


@pytest.mark.parametrize(
    ("phase", "fresh", "limit_s"),
    [
        (Phase.STARTING, 0, 0.0),
        (Phase.WAITING, 5, 0.0),
        (Phase.RENDEZVOUS, 5, 0.0),
        (Phase.ENDING, 5, 0.0),
        (Phase.HEALING, 0, 1000.0),
        (Phase.CHECKPOINT, 5, 1000.0),
        (Phase.EVALUATION, 5, 1000.0),
        (Phase.TRAINING, 0, 100.0),
        (Phase.TRAINING, 1, 100.0),
        (Phase.TRAINING, 2, 30.0),
        (Phase.REPEATED, 2, 30.0),
        (Phase.DATA, 2, 30.0),
        (Phase.DATA, 1, 100.0),
    ],
)
def test_each_phase_has_its_limit(phase: Phase, fresh: int, limit_s: float) -> None:
    """A step may take ten of the usual ones longer; the first two of a round may compile; 0 is for ever."""
    assert limit_of(reading(phase, fresh=fresh, step_s=2.0), LIMITS) == limit_s


def test_the_wait_at_the_end_is_that_of_a_step() -> None:
    """Loops of unequal length: one rank is through, another waits for it in one more step. Else nobody would say so."""
    assert limit_of(reading(Phase.ENDING, step_s=2.0, waits=True), LIMITS) == 30.0


@pytest.mark.parametrize(
    ("limits", "phase", "fresh", "limit_s"),
    [
        (HangLimits(0.0, 100.0, 1000.0), Phase.TRAINING, 5, 0.0),
        (HangLimits(0.0, 100.0, 1000.0), Phase.DATA, 0, 0.0),
        (HangLimits(10.0, 0.0, 1000.0), Phase.TRAINING, 1, 0.0),
        (HangLimits(10.0, 0.0, 1000.0), Phase.TRAINING, 2, 10.0),
        (HangLimits(10.0, 5.0, 1000.0), Phase.TRAINING, 0, 10.0),
        (HangLimits(10.0, 100.0, 0.0), Phase.EVALUATION, 5, 0.0),
    ],
)
def test_limits_of_zero_are_none(limits: HangLimits, phase: Phase, fresh: int, limit_s: float) -> None:
    assert limit_of(reading(phase, fresh=fresh), limits) == limit_s


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
    assert busy(reading(phase, fresh=fresh, inside=inside, waits=True)) == ""


def test_a_save_inside_of_steps_is_seen_in_the_moment() -> None:
    assert busy(reading(Phase.TRAINING, moment=Phase.DATA)) == "waiting for samples"


def test_the_shortest_limit_is_that_of_those_there_are() -> None:
    assert LIMITS.least_s == 10.0
    assert HangLimits(0.0, 0.0, 7.0).least_s == 7.0
    assert HangLimits(0.0, 0.0, 0.0).least_s == 0.0


def test_who_waits_for_rank_0s_save_has_the_time_of_a_save() -> None:
    assert limit_of(reading(Phase.TRAINING, moment=Phase.CHECKPOINT), LIMITS) == 1000.0
    assert limit_of(reading(Phase.EVALUATION, moment=Phase.TRAINING), LIMITS) == 1000.0


def test_who_has_not_got_on_for_longer_than_it_may_is_hung() -> None:
    culprit, victim = reading(pid=1, moved_at=50.0), reading(pid=2, moved_at=50.0, waits=True)
    assert hung([culprit, victim], LIMITS, 60.0) == []
    first, second = hung([culprit, victim], LIMITS, 61.0)
    assert (first.is_victim, second.is_victim) == (False, True)
    assert (first.still_s, first.limit_s) == (11.0, 10.0)
    assert first.reason == "it has made no progress for 11.0 s (in training, after step 0; its limit is 10.0 s)"


def test_a_victim_that_has_just_been_freed_is_no_culprit() -> None:
    """It has not moved for long, and waits no longer: its own time begins when it was last seen to wait."""
    freed, other = reading(pid=1, moved_at=50.0), reading(pid=2, moved_at=50.0)
    assert [each.reading.pid for each in hung([freed, other], LIMITS, 70.0, waited={1: 69.8})] == [2]
    assert hung([freed], LIMITS, 79.8, waited={1: 69.8}) == []
    assert hung([freed], LIMITS, 80.0, waited={1: 69.8})[0].still_s == pytest.approx(10.2)
    victim = reading(pid=1, moved_at=50.0, waits=True)
    assert hung([victim], LIMITS, 70.0, waited={1: 70.0})[0].still_s == 20.0


def test_the_time_in_which_the_agent_stood_still_counts_for_nobody() -> None:
    worker = reading(moved_at=50.0)
    assert hung([worker], LIMITS, 160.0, [(155.0, 100.0)]) == []
    assert hung([worker], LIMITS, 162.0, [(155.0, 100.0)])[0].still_s == 12.0
    assert hung([worker], LIMITS, 61.0, [(49.0, 100.0)])[0].still_s == 11.0


@pytest.mark.parametrize("step_s", [0.01, 1.0, 60.0, 3600.0])
def test_a_step_ten_times_as_long_as_usual_is_no_hang(step_s: float) -> None:
    options = rendezvous_options({})
    limits = HangLimits(options.step_timeout, options.first_step_timeout, options.phase_timeout)
    worker = reading(moved_at=0.0, step_s=step_s)
    assert hung([worker], limits, 10.0 * step_s) == []
    assert hung([worker], limits, 10.0 * step_s + 301.0) != []


WAITING = told_by("a", rank(0)), told_by("b", rank(1))


@pytest.mark.parametrize(
    ("a", "b", "all_do"),
    [
        (*WAITING, True),
        (WAITING[0], None, False),
        (WAITING[0], told_by("b"), False),
        (WAITING[0], told_by("b", rank(1), number=2), False),
        (WAITING[0], told_by("b", rank(1, waits=False)), False),
        (WAITING[0], told_by("b", rank(1, still_s=269.0)), False),
        (WAITING[0], told_by("b", rank(1, still_s=270.0)), True),
        (WAITING[0], told_by("b", rank(1, waits_s=149.0)), False),  # it was slow, and has come to the collective
        (WAITING[0], told_by("b", rank(1, waits_s=150.0)), True),
    ],
)
def test_all_wait_if_all_say_so(a: object, b: object, all_do: bool) -> None:
    """Who reports nothing, or of another round, or has moved, may be the culprit."""
    told = {name: health for name, health in (("a", a), ("b", b), ("c", told_by("c", rank(7, waits=False)))) if health}
    assert all_wait(round_of(1, "a", "b"), told, 300.0) is all_do  # type: ignore[arg-type]


def test_a_node_must_tell_of_all_its_ranks() -> None:
    both = round_of(1, "a", size=2)
    assert not all_wait(both, {"a": told_by("a", rank(0))}, 300.0)
    assert not all_wait(both, {"a": told_by("a", rank(0), rank(1, waits=False))}, 300.0)
    assert all_wait(both, {"a": told_by("a", rank(0), rank(1))}, 300.0)


def test_who_waits_is_seen_to_wait_since_it_last_got_on() -> None:
    """Looked at now and then: a worker that waits each time, and has stepped in between, has not waited long."""
    still, stepped = reading(pid=1, waits=True, moved_at=1.0), reading(pid=2, waits=True, moved_at=1.0)
    first = Waiting.seen({}, [still, stepped], 10.0)
    assert {pid: each.since for pid, each in first.items()} == {1: 10.0, 2: 10.0}
    later = Waiting.seen(first, [still, reading(pid=2, waits=True, moved_at=11.0), reading(pid=3, waits=True)], 12.0)
    assert {pid: each.since for pid, each in later.items()} == {1: 10.0, 2: 12.0, 3: 12.0}
    assert Waiting.seen(later, [], 13.0) == {}


# ---- whom to ask, and what speaks against a worker that others wait for

LETTERS = tuple("abcdefghijklmnopqrst")


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


def test_each_node_of_few_is_asked() -> None:
    assert set(hang_rules.neighbours(round_of(1, *LETTERS[:9]), "e")) == set(LETTERS[:9]) - {"e"}
    assert hang_rules.neighbours(round_of(1, "a", "b"), "b") == ("a",)
    assert hang_rules.neighbours(round_of(1, "a"), "a") == ()


def test_of_a_crowd_each_asks_its_neighbours() -> None:
    crowd = round_of(1, *LETTERS)
    asked = {node: hang_rules.neighbours(crowd, node) for node in LETTERS}
    assert set(asked["h"]) == set("defgijkl")
    assert {sum(node in each for each in asked.values()) for node in LETTERS} == {8}


def test_a_planned_change_needs_those_of_the_next_round() -> None:
    planned = round_of(2, "a", "b", "d")
    draining = round_of(1, "a", "b", "c", state=RoundState.DRAINING, next=planned)
    assert set(hang_rules.neighbours(draining, "a")) == {"b", "d"}
    assert hang_rules.neighbours(draining, "c") == ()
    assert hang_rules.neighbours(round_of(1, "a", "b", state=RoundState.BROKEN), "a") == ()


def test_who_is_forming_a_group_waits_for_others_too() -> None:
    assert hang_rules.seeks_others(reading(waits=True))
    assert hang_rules.seeks_others(reading(Phase.RENDEZVOUS))
    assert not hang_rules.seeks_others(reading())


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.EVALUATION, Phase.HEALING, Phase.STARTING])
def test_a_phase_that_takes_long_explains_silence(phase: Phase) -> None:
    assert hang_rules.stuck(reading(phase), "running", 60.0, 0.5) is None
    assert hang_rules.stuck(reading(phase), "stopped", 0.0, 0.5) == "its process is stopped"


@pytest.mark.parametrize(
    ("state", "silent_s", "pulse", "found"),
    [
        ("running", 0.6, {}, "it has answered nothing for 0.6 s (state: running)"),
        ("running", 0.4, {}, None),
        ("traced", 60.0, {}, None),
        ("running", 60.0, {"fresh": 1}, None),  # it may compile
    ],
)
def test_a_worker_that_answers_nothing_in_a_step_is_stuck(
    state: str, silent_s: float, pulse: dict[str, Any], found: str | None
) -> None:
    assert hang_rules.stuck(reading(**pulse), state, silent_s, 0.5) == found


def test_without_a_page_only_the_kernel_speaks_against_a_worker() -> None:
    assert hang_rules.stuck(None, "running", 60.0, 0.5) is None
    assert hang_rules.stuck(None, "stopped", 0.0, 0.5) is not None
