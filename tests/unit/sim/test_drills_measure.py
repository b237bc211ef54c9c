"""What the ledger tells about a fault."""

from __future__ import annotations

import pytest

from elastic_trainer.drills.measure import Book
from elastic_trainer.local.ledger import Line, LineKind


def step(node: str, t: float, number: int, round_: int = 1, *, pid: int, rank: int = 0, world: int = 2) -> Line:
    place = {"node": node, "pid": pid, "rank": rank, "world": world, "round": round_, "step": number}
    return Line(event=LineKind.STEP, t=t, samples=(number,), global_samples=world, **place)


def story() -> Book:
    """Two nodes step together; b dies at 0.35, a goes on alone from 0.5 on; b comes back as another process."""
    book = Book()
    book.add(step("a", t / 10, t, pid=1) for t in (1, 2, 3))
    book.add(step("b", t / 10 + 0.01, t, pid=2, rank=1) for t in (1, 2, 3))
    book.add(step("a", 0.5 + k / 10, 4 + k, 2, pid=1, world=1) for k in range(3))
    return book


def test_who_trains_is_told_by_the_newest_round() -> None:
    """Nodes in rank order, with their processes and the steps that each has committed in that round."""
    book = Book()
    assert book.standing() is None
    book.add([step("b", 0.1, 1, pid=2, rank=1), step("a", 0.1, 1, pid=1), step("a", 0.2, 2, pid=1)])
    standing = book.standing()
    assert standing is not None
    assert (standing.round, standing.world, standing.nodes) == (1, 2, ("a", "b"))
    assert standing.pids == {"a": 1, "b": 2}
    assert standing.least_steps() == 1
    after = story().standing()
    assert after is not None
    assert (after.round, after.nodes) == (2, ("a",))


def test_recovery_ends_with_the_last_survivors_step_in_a_later_round() -> None:
    """A step that the old round still committed after the fault is none; all survivors must have stepped."""
    book = story()
    assert book.resumed_at([1], 0.25, round_=2) == pytest.approx(0.5)
    assert book.resumed_at([1], 0.25) == pytest.approx(0.3)
    assert book.resumed_at([1], 0.25, round_=2, count=4) is None
    assert book.resumed_at([1, 2], 0.25, round_=2) is None
    assert book.resumed_at([], 0.25) is None
    book.add([step("b", 0.55, 4, 2, pid=3, rank=1)])
    assert book.resumed_at([1, 3], 0.25, round_=2) == pytest.approx(0.55)


def test_the_gap_is_the_longest_pause_that_touches_the_fault() -> None:
    """A longer pause long before does not count, nor does one of a process that was lost."""
    book = Book()
    book.add([step("a", 0.0, 1, pid=1), step("a", 9.0, 2, pid=1), step("a", 9.1, 3, pid=1), step("a", 9.4, 4, pid=1)])
    assert book.gap([1], 9.2, 9.4) == pytest.approx(0.3)
    assert book.gap([1], 8.0, 9.4) == pytest.approx(9.0)
    assert book.gap([2], 0.0, 10.0) == 0.0


def test_a_step_that_a_process_commits_twice_is_lost() -> None:
    """The worst of the processes counts; two ranks that commit the same step have lost nothing."""
    book = story()
    assert book.committed_again([1, 2]) == 0
    book.add([step("a", 0.9, 5, 3, pid=1), step("a", 1.0, 6, 3, pid=1)])
    assert book.committed_again([1, 2]) == 2
    assert book.committed_again([2]) == 0


def test_a_process_holds_the_state_once_it_has_opened() -> None:
    """Until then it could not be the only one that is left."""
    book = Book()
    book.add([Line(event=LineKind.OPENED, t=0.0, pid=5, node="a")])
    assert book.has_opened(5)
    assert not book.has_opened(6)


def test_the_first_step_of_a_node_in_a_round() -> None:
    """None where it took no part."""
    book = story()
    assert book.first_step("a", 2) == pytest.approx(0.5)
    assert book.first_step("b", 2) is None
