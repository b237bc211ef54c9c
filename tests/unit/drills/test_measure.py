"""The cost of a fault, from the ledger; and what drills read of a sharded model."""

from __future__ import annotations

import pytest

from elastic_trainer.drills.faults import FaultKind
from elastic_trainer.drills.measure import Book, Digest, JournalMoment, compared, recovery, state_problems
from elastic_trainer.local.ledger import Line, LineKind
from tests.support.story import committed, opened, struck


def test_recovery_is_the_first_step_of_a_later_round() -> None:
    """Steps that the old round still commits after the fault are no recovery, but they shorten the pause."""
    lines = [committed(step, 1, float(step)) for step in range(1, 6)]
    lines += [committed(6, 1, 5.3), committed(4, 2, 9.0, world=3), committed(5, 2, 9.5)]
    found = recovery(struck(t=5.2), lines)
    assert found is not None
    assert found.recovery_s == pytest.approx(3.8)
    assert found.pause_s == pytest.approx(3.7)
    assert (found.round, found.step, found.steps_repeated, found.world) == (2, 4, 3, 3)


def test_nothing_is_repeated_when_the_next_round_continues() -> None:
    """The in-place case."""
    found = recovery(struck(t=1.5), [committed(1, 1, 1.0), committed(2, 2, 1.6)])
    assert found is not None
    assert found.steps_repeated == 0


def test_only_what_was_standing_counts_as_repeated() -> None:
    """Steps of round 1 that round 2 had thrown away already are not charged to the fault in round 2."""
    lines = [committed(step, 1, float(step)) for step in range(1, 11)]
    lines += [committed(6, 2, 20.0), committed(7, 2, 21.0), committed(6, 3, 30.0)]
    found = recovery(struck(t=21.5), lines)
    assert found is not None
    assert found.steps_repeated == 2


def test_there_is_no_recovery_before_a_later_round_has_committed() -> None:
    """A round that was formed and committed nothing is none."""
    assert recovery(struck(t=1.5), [committed(1, 1, 1.0), opened(2, 3.0)]) is None
    assert recovery(struck(t=1.5), []) is None


def test_a_join_is_answered_by_the_first_round_that_has_the_newcomer() -> None:
    """Another failure in between makes a later round, but not with the new node."""
    joined = struck(FaultKind.JOIN, node="n2", t=1.5)
    lines = [committed(1, 1, 1.0), committed(2, 2, 2.0)]
    assert recovery(joined, lines) is None
    lines += [committed(3, 3, 4.0), opened(3, 3.9, step=2, node="n2", rank=1), committed(3, 3, 4.1, node="n2", rank=1)]
    found = recovery(joined, lines)
    assert found is not None
    assert found.round == 3
    assert found.recovery_s == pytest.approx(2.5)
    assert found.pause_s == pytest.approx(2.0)


def left(node: str, place: int, digest: str) -> Digest:
    """What a rank left at the end."""
    pid = int(node[1:]) * 10 + place
    return Digest(event=JournalMoment.END, node=node, pid=pid, round=1, step=7, digest=digest, place=place)


def test_ranks_of_one_place_hold_the_same_and_those_of_two_do_not() -> None:
    """Only a place is compared with itself."""
    whole = [left("n0", 0, "a"), left("n0", 1, "b"), left("n1", 0, "a"), left("n1", 1, "b")]
    assert state_problems(whole, ["n0", "n1"]) == []
    assert compared(whole) == 2
    problems = state_problems([*whole[:3], left("n1", 1, "c")], ["n0", "n1", "n2"])
    assert [each.split(" ")[0] for each in problems] == ["the", "no", "members"]


def test_all_workers_of_a_node_are_followed() -> None:
    """By name, the nodes in the order of their ranks."""
    book = Book(
        Line(event=LineKind.STEP, t=1.0, node=node, rank=rank, local_rank=place, world=4, round=1, pid=rank + 1, step=1)
        for node, rank, place in (("n0", 2, 0), ("n0", 3, 1), ("n1", 0, 0), ("n1", 1, 1))
    )
    standing = book.standing()
    assert standing is not None
    assert standing.nodes == ("n1", "n0")
    assert standing.pids == {"n0": 3, "n0/1": 4, "n1": 1, "n1/1": 2}
    assert standing.least_steps() == 1
