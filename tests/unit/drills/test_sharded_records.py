"""What drills read of a sharded model: several workers of a node, each with shards of its own."""

from __future__ import annotations

from elastic_trainer.drills.measure import Book, Digest, JournalMoment, compared, state_problems
from elastic_trainer.local.ledger import Line, LineKind


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
