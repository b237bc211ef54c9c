"""Backoff: how far a node keeps away whose workers get nowhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.workers.conductor import ENOUGH_STEPS, LONGEST_S, Backoff


def after(*lives: int) -> Backoff:
    strikes = Backoff()
    for steps in lives:
        strikes = strikes.after(steps)
    return strikes


def test_the_first_failure_costs_nothing_then_the_distance_doubles() -> None:
    assert [after(*[0] * count).back_off_s() for count in range(8)] == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


def test_the_distance_is_bounded() -> None:
    assert after(*[0] * 5000).back_off_s() == LONGEST_S


@given(st.lists(st.integers(0, ENOUGH_STEPS - 1)))
def test_enough_committed_steps_clear_the_node(lives: list[int]) -> None:
    assert after(*lives, ENOUGH_STEPS) == Backoff()
    assert after(*lives).count == len(lives)
