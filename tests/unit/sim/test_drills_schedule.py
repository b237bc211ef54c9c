"""Faults drawn by chance are possible, and leave somebody who can go on."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.drills.schedule import Blow, Situation, draw, possible

NAMES = ("n0", "n1", "n2", "n3")


@st.composite
def situations(chance: st.DrawFn) -> Situation:
    running = chance(st.lists(st.sampled_from(NAMES), unique=True))
    holders = [name for name in running if chance(st.booleans())]
    return Situation(tuple(running), tuple(holders), 2, 4, chance(st.booleans()))


@given(situations(), st.integers(0, 1000))
def test_somebody_who_holds_the_state_is_always_left(situation: Situation, seed: int) -> None:
    """Whoever is struck, another living worker holds it; nobody joins above the most; etcd goes away only once."""
    planned = draw(random.Random(seed), situation)
    if planned is None:
        return
    assert planned.wait_s >= 0
    if planned.node is not None:
        assert planned.node in situation.running
        assert set(situation.holders) - {planned.node}
    if planned.blow is Blow.JOIN:
        assert len(situation.running) < situation.max_nodes
    if planned.blow is Blow.OUTAGE:
        assert situation.etcd_answers
        assert planned.lasts_s > 0


@given(st.integers(0, 1000))
def test_too_few_nodes_are_filled_up_first(seed: int) -> None:
    """Otherwise the job would wait for ever."""
    planned = draw(random.Random(seed), Situation(("n0",), ("n0",), 2, 4))
    assert planned is not None
    assert planned.blow is Blow.JOIN


def test_the_same_seed_draws_the_same() -> None:
    """A storm can be told again by its seed, as far as the machine plays along."""
    situation = Situation(NAMES[:3], NAMES[:3], 2, 4)
    once, again = random.Random(7), random.Random(7)
    assert [draw(once, situation) for _ in range(20)] == [draw(again, situation) for _ in range(20)]


def test_every_blow_is_drawn() -> None:
    """None is forgotten."""
    situation = Situation(NAMES[:3], NAMES[:3], 2, 4)
    chance = random.Random(0)
    drawn = {planned.blow for _ in range(200) if (planned := draw(chance, situation)) is not None}
    assert drawn == set(Blow) == set(possible(situation))


def test_nothing_is_drawn_where_nothing_is_possible() -> None:
    """All places are taken, one alone holds the state and etcd is away: whoever is struck is not that one."""
    situation = Situation(("n0", "n1"), ("n0",), 1, 2, etcd_answers=False)
    struck = {planned.node for seed in range(50) if (planned := draw(random.Random(seed), situation)) is not None}
    assert struck == {"n1"}
    assert draw(random.Random(0), Situation(("n0",), ("n0",), 1, 1, etcd_answers=False)) is None
