"""Who watches the nodes, and when the others look whether it is their turn."""

from __future__ import annotations

import math
import random

import pytest

from elastic_trainer.membership.core import (
    CROWD,
    DEPUTY_PATIENCE_S,
    JITTER,
    SENIORS,
    AskOldest,
    ChangeWatch,
    Looked,
    Plan,
    WatchScope,
    elders,
    first_names,
    is_surplus_watcher,
    plan,
)
from elastic_trainer.membership.documents import Ghost, RoundDocument, RoundState
from elastic_trainer.membership.view import Observation
from elastic_trainer.store.api import KeyValue
from tests.unit.membership.scenes import node, round_of

PATIENCE_S = 6.0
NAMES = [f"n{number:04d}" for number in range(1024)]
NOT_ON = [RoundState.BROKEN, RoundState.DRAINING]


def run_of(size: int, state: RoundState = RoundState.ACTIVE) -> RoundDocument:
    """A round of nodes whose create-revisions are 10, 11, 12 and so on."""
    return round_of(1, [node(name, 10 + place) for place, name in enumerate(NAMES[:size])], state)


def planned(document: RoundDocument | None, place: int, asked: int = 0, asked_at_s: float = 0.0) -> Plan:
    return plan(document, NAMES[place], 10 + place, asked, asked_at_s, PATIENCE_S)


@pytest.mark.parametrize("state", [RoundState.ACTIVE, *NOT_ON])
def test_a_member_with_fewer_than_three_elders_asks_at_once_and_only_once(state: RoundState) -> None:
    """A round document that makes a node one of the three most senior is enough for it to ask."""
    for place in range(SENIORS):
        assert planned(run_of(8, state), place) == Plan(0.0, SENIORS)
        assert planned(run_of(8, state), place, asked=1).after_s > 0.0
    assert planned(run_of(8, state), SENIORS).after_s > 0.0


@pytest.mark.parametrize("state", NOT_ON)
def test_the_next_in_line_watch_a_round_that_stays_over(state: RoundState) -> None:
    """The fourth to sixth do not wait for leases to end."""
    for place in range(SENIORS, 2 * SENIORS):
        assert planned(run_of(8, state), place) == Plan(DEPUTY_PATIENCE_S, None)
    assert planned(run_of(8, state), 2 * SENIORS).after_s >= PATIENCE_S


def test_a_crowd_asks_seldom_while_a_round_is_on() -> None:
    """A thousand nodes send fewer questions in all than a tenth of their number in each patience, yet all ask."""
    document = run_of(1024)
    rate = sum(PATIENCE_S / planned(document, place).after_s for place in range(SENIORS, 1024))
    assert rate < 1024 / 7
    assert all(math.isfinite(planned(document, place).after_s) for place in range(1024))


def test_deciders_that_live_and_do_nothing_are_passed_by() -> None:
    """While no round is on each fruitless question widens the circle by three, less and less often."""
    document = run_of(64, RoundState.BROKEN)
    plans = [planned(document, 40, asked) for asked in range(6)]
    assert [each.places for each in plans] == [3, 6, 9, 12, 15, 18]
    waits = [each.after_s for each in plans]
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] == 8 * PATIENCE_S


def test_before_the_first_round_nodes_wait_for_leases_to_end() -> None:
    """Without a document nothing is known of the others."""
    assert planned(None, 5) == Plan(PATIENCE_S, SENIORS)


def test_a_closed_run_asks_nothing() -> None:
    """Nothing will be decided any more."""
    assert planned(run_of(4, RoundState.CLOSED), 0).after_s == math.inf


def test_elders_are_members_with_older_keys() -> None:
    """A newcomer has all members before it, the most senior none."""
    document = run_of(5)
    assert [elders(document, 10 + place) for place in range(6)] == [0, 1, 2, 3, 4, 5]
    assert elders(None, 10) == 0


def test_keys_of_ghosts_take_no_place() -> None:
    """A key left behind counts for nothing while it is as it was, and again when it changes."""
    ghosts = [Ghost(node="a", create_revision=5, mod_revision=5)]
    others = [(name, KeyValue("", b"", number, number)) for number, name in enumerate("bcd", 6)]
    for created, changed, first in ((5, 5, "bcd"), (5, 9, "abc"), (4, 5, "abc")):
        found = [("a", KeyValue("", b"", created, changed)), *others]
        assert first_names(found, ghosts, 3) == list(first)


def test_nobody_stops_watching_in_a_small_run_or_while_a_round_is_over() -> None:
    """Only a junior of a large run whose round is on may stop."""
    large = run_of(CROWD + 1)
    assert is_surplus_watcher(large, SENIORS, CROWD + 1)
    assert not is_surplus_watcher(large, SENIORS - 1, CROWD + 1)
    assert not is_surplus_watcher(large, SENIORS, CROWD)
    for state in NOT_ON:
        assert not is_surplus_watcher(run_of(CROWD + 1, state), SENIORS, CROWD + 1)


def test_a_junior_node_of_a_crowd_stops_watching_after_a_while() -> None:
    """Not at once, for its elders may be about to end; and the time begins anew when it was senior meanwhile."""
    scope = WatchScope(NAMES[3], PATIENCE_S, random.Random(0))

    def turn(present: int, now: float) -> ChangeWatch | AskOldest | None:
        nodes = {name: node(name, 10 + place) for place, name in enumerate(NAMES[:present])}
        seen = Observation(nodes, run_of(present), round_revision=1, connected=True, serial=1)
        return scope.turn(Looked(seen, 13, senior=False, away=False), now)[0]

    longest = PATIENCE_S * (1 + JITTER)
    assert turn(CROWD + 1, 100.0) is turn(CROWD + 1, 99.0 + PATIENCE_S) is None
    assert turn(CROWD, 99.0 + PATIENCE_S) is None
    assert turn(CROWD + 1, 200.0) is turn(CROWD + 1, 199.0 + PATIENCE_S) is None
    assert turn(CROWD + 1, 200.0 + longest) == ChangeWatch(nodes=False, reason="3 nodes are more senior")
