"""When somebody is waited for too long, whom to ask, and what speaks against a worker."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.model import Phase
from tests.unit.agent.readings import reading, round_of

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
    delays.note(0.3, now=0.0)
    delays.note(0.01, now=1.0)
    delays.note(hang_rules.LONGEST_DELAY_S + 1.0, now=2.0)
    assert delays.limit_s(0.2, now=3.0) == pytest.approx(0.6)
    assert delays.limit_s(0.2, now=0.5 + hang_rules.REMEMBERED_S) == pytest.approx(0.2)


def test_each_node_of_few_is_asked() -> None:
    """By all others, once each."""
    assert set(hang_rules.neighbours(round_of(1, *LETTERS[:9]), "e")) == set(LETTERS[:9]) - {"e"}
    assert hang_rules.neighbours(round_of(1, "a", "b"), "b") == ("a",)
    assert hang_rules.neighbours(round_of(1, "a"), "a") == ()


def test_of_a_crowd_each_asks_its_neighbours() -> None:
    """So each is asked by eight, however many there are."""
    crowd = round_of(1, *LETTERS)
    asked = {node: hang_rules.neighbours(crowd, node) for node in LETTERS}
    assert set(asked["h"]) == set("defgijkl")
    assert {sum(node in each for each in asked.values()) for node in LETTERS} == {8}


def test_a_planned_change_needs_those_of_the_next_round() -> None:
    """Who leaves may be gone already. A round that is over needs nobody."""
    planned = round_of(2, "a", "b", "d")
    draining = round_of(1, "a", "b", "c", state=RoundState.DRAINING, next=planned)
    assert set(hang_rules.neighbours(draining, "a")) == {"b", "d"}
    assert hang_rules.neighbours(draining, "c") == ()
    assert hang_rules.neighbours(round_of(1, "a", "b", state=RoundState.BROKEN), "a") == ()


def test_who_is_forming_a_group_waits_for_others_too() -> None:
    """As in a collective."""
    assert hang_rules.seeks_others(reading(waits=True))
    assert hang_rules.seeks_others(reading(Phase.RENDEZVOUS))
    assert not hang_rules.seeks_others(reading())


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.EVALUATION, Phase.HEALING, Phase.STARTING])
def test_a_phase_that_takes_long_explains_silence(phase: Phase) -> None:
    """A stopped process it does not."""
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
    """Unless a debugger holds it, or its first steps may explain it."""
    assert hang_rules.stuck(reading(**pulse), state, silent_s, 0.5) == found


def test_without_a_page_only_the_kernel_speaks_against_a_worker() -> None:
    """What it does is not known then."""
    assert hang_rules.stuck(None, "running", 60.0, 0.5) is None
    assert hang_rules.stuck(None, "stopped", 0.0, 0.5) is not None
