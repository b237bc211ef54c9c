"""Which state continues, and who gives which shard of it."""

from __future__ import annotations

import pytest

from elastic_trainer.model import StateIdentity
from elastic_trainer.worker.state.elect import Election, elect, elect_copies

OLD, NEW, LATER, OTHER = (StateIdentity(*each) for each in ((3, 7, "a"), (3, 8, "a"), (4, 1, "a"), (3, 8, "b")))


@pytest.mark.parametrize(
    ("states", "size", "sources", "behind"),
    [
        ([OLD, NEW, None], 1, (1,), (0, 2)),
        ([NEW, LATER, LATER], 1, (1,), (0,)),
        ([OLD, OLD, NEW, NEW], 2, (2, 3), (0, 1)),
        ([NEW, OLD, OLD, NEW], 2, (0, 3), (1, 2)),
        ([None, None, NEW, NEW, NEW, NEW], 2, (2, 3), (0, 1)),
        ([OLD, OLD, NEW, None], 2, (0, 1), (2, 3)),
        ([OTHER, NEW, NEW], 1, (1,), (0,)),
        ([NEW, OTHER], 1, (0,), (1,)),
        ([OTHER, OLD, OLD, None], 1, (0,), (1, 2, 3)),
        ([OTHER, NEW, NEW, OTHER, NEW, NEW], 2, (2, 1), (0, 3)),
    ],
    ids=[
        "newest", "a round beats a step", "of both shards", "wherever", "newcomers", "newer but incomplete",
        "most common", "a tie", "one alone is newest", "most common of each shard",
    ],
)  # fmt: skip
def test_the_newest_complete_state_of_most_ranks_continues(
    states: list[StateIdentity | None], size: int, sources: tuple[int, ...], behind: tuple[int, ...]
) -> None:
    assert elect(states, size) == Election(sources, behind)


def test_without_a_complete_state_none_continues() -> None:
    assert elect([None, None]) is None
    assert elect([OLD, NEW], 2) is None
    assert elect([NEW, None, NEW, None], 2) is None


def test_the_newest_state_of_which_all_shards_are_in_memory_is_chosen() -> None:
    """Each copy is read from the first rank that has it; one of another number of shards is no part of it."""
    own = [[(1, 7, 0, 3), (1, 8, 0, 3)], [(1, 7, 1, 3), (1, 7, 2, 3)], [(1, 8, 1, 2), (1, 7, 2, 3)]]
    assert elect_copies(own) == {(1, 7, 0, 3): 0, (1, 7, 1, 3): 1, (1, 7, 2, 3): 1}
    assert elect_copies([*own, [(1, 8, 1, 3), (1, 8, 2, 3)]]) == {(1, 8, 0, 3): 0, (1, 8, 1, 3): 3, (1, 8, 2, 3): 3}
    assert elect_copies([*own, [(2, 3, 0, 2), (2, 3, 1, 2)]]) == {(2, 3, 0, 2): 3, (2, 3, 1, 2): 3}
    assert elect_copies([[(1, 7, 0, 3)], [(1, 7, 1, 3)], []]) == {}
