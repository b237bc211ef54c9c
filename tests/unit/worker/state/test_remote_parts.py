"""Which parts in the memory of several nodes make the newest whole state."""

from __future__ import annotations

from elastic_trainer.worker.state.restore import choose_parts, following


def test_the_newest_state_of_which_all_parts_are_left_is_chosen() -> None:
    """Each part is read from the first rank that has it; a part of another number of places is none of it."""
    own = [[(1, 7, 0, 3), (1, 8, 0, 3)], [(1, 7, 1, 3), (1, 7, 2, 3)], [(1, 8, 1, 2), (1, 7, 2, 3)]]
    assert choose_parts(own) == {(1, 7, 0, 3): 0, (1, 7, 1, 3): 1, (1, 7, 2, 3): 1}
    assert choose_parts([*own, [(1, 8, 1, 3), (1, 8, 2, 3)]]) == {(1, 8, 0, 3): 0, (1, 8, 1, 3): 3, (1, 8, 2, 3): 3}
    later = [[(2, 3, 0, 2), (2, 3, 1, 2)]]
    assert choose_parts([*own, *later]) == {(2, 3, 0, 2): 3, (2, 3, 1, 2): 3}


def test_without_a_part_there_is_none() -> None:
    assert choose_parts([[(1, 7, 0, 3)], [(1, 7, 1, 3)], []]) == {}
    assert choose_parts([[], []]) == {}


def test_copies_go_to_the_next_node() -> None:
    """Of nodes of two ranks each; past those without an agent of this package, and to nobody from or among such."""
    rows = ["a", "a", "b", "b", "", "", "c", "c"]
    assert [following(rows, rank) for rank in range(8)] == ["b", "b", "c", "c", "", "", "a", "a"]
    assert following(["a", "a"], 1) == ""
