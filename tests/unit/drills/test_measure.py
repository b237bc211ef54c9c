"""The cost of a fault, from the ledger; and what drills read of a sharded model."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from elastic_trainer.drills.faults import FaultKind, Injected
from elastic_trainer.drills.measure import Book, Digest, compared, recovery, state_problems
from elastic_trainer.local.ledger import Line, LineKind
from tests.support.story import committed, opened, struck

STEPS = [committed(step, 1, float(step)) for step in range(1, 11)]
JOINED = struck(FaultKind.JOIN, node="n2", t=1.5)
OTHER = [committed(1, 1, 1.0), committed(2, 2, 2.0)]
COME = [opened(3, 3.9, step=2, node="n2", rank=1), committed(3, 3, 4.1, node="n2", rank=1)]


@pytest.mark.parametrize(
    ("fault", "lines", "found"),
    [
        # Steps that the old round still commits after the fault are no recovery, but they shorten the pause.
        (struck(t=5.2), [*STEPS[:5], committed(6, 1, 5.3), committed(4, 2, 9.0, world=3), committed(5, 2, 9.5)],
         (3.8, 3.7, 2, 4, 3, 3)),
        (struck(t=1.5), [committed(1, 1, 1.0), committed(2, 2, 1.6)], (0.1, 0.6, 2, 2, 0, 1)),
        # Steps of round 1 that round 2 had thrown away already are not charged to the fault in round 2.
        (struck(t=21.5), [*STEPS, committed(6, 2, 20.0), committed(7, 2, 21.0), committed(6, 3, 30.0)],
         (8.5, 9.0, 3, 6, 2, 1)),
        (struck(t=1.5), [committed(1, 1, 1.0), opened(2, 3.0)], None),
        (struck(t=1.5), [], None),
        # A join is answered by the first round that has the newcomer, whatever else has failed in between.
        (JOINED, OTHER, None),
        (JOINED, [*OTHER, committed(3, 3, 4.0), *COME], (2.5, 2.0, 3, 3, 0, 1)),
    ],
)  # fmt: skip
def test_recovery_is_the_first_step_of_a_later_round(
    fault: Injected, lines: list[Line], found: tuple[float, ...] | None
) -> None:
    """Its time, the pause of those who survived, round, step, steps made again, and ranks."""
    told = recovery(fault, lines)
    assert (None if told is None else astuple(told)) == (None if found is None else pytest.approx(found))


def left(node: str, shard_rank: int, digest: str) -> Digest:
    pid = int(node[1:]) * 10 + shard_rank
    return Digest(event="end", node=node, pid=pid, round=1, step=7, digest=digest, shard_rank=shard_rank)


def test_ranks_of_one_shard_rank_hold_the_same_and_those_of_two_do_not() -> None:
    whole = [left("n0", 0, "a"), left("n0", 1, "b"), left("n1", 0, "a"), left("n1", 1, "b")]
    assert state_problems(whole, ["n0", "n1"]) == []
    assert compared(whole) == 2
    problems = state_problems([*whole[:3], left("n1", 1, "c")], ["n0", "n1", "n2"])
    assert [each.split(" ")[0] for each in problems] == ["the", "no", "members"]


def test_all_workers_of_a_node_are_followed() -> None:
    """By name, the nodes in the order of their ranks."""
    book = Book(
        Line(event=LineKind.STEP, t=1.0, node=node, rank=rank, local_rank=local, world=4, round=1, pid=rank + 1, step=1)
        for node, rank, local in (("n0", 2, 0), ("n0", 3, 1), ("n1", 0, 0), ("n1", 1, 1))
    )
    standing = book.standing()
    assert standing is not None
    assert standing.nodes == ("n1", "n0")
    assert standing.pids == {"n0": 3, "n0/1": 4, "n1": 1, "n1/1": 2}
    assert standing.least_steps() == 1
