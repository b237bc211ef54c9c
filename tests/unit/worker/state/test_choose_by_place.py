"""Which ranks give their shards to those that are behind."""

from __future__ import annotations

from elastic_trainer.model import StateIdentity
from elastic_trainer.worker.state.restore import StateCandidate, choose_by_place, most_common

OLD, NEW = StateCandidate(3, 7), StateCandidate(3, 8)


def test_each_place_has_a_source_of_one_state() -> None:
    """The newest of which every place has a holder, wherever; the lowest rank of the place."""
    assert choose_by_place([OLD, OLD, NEW, NEW], 2) == (2, 3)
    assert choose_by_place([NEW, OLD, OLD, NEW], 2) == (0, 3)
    assert choose_by_place([None, None, NEW, NEW, NEW, NEW], 2) == (2, 3)
    assert choose_by_place([OLD, NEW, None], 1) == (1,)


def test_a_newer_state_that_lacks_a_place_is_left() -> None:
    """If no state is whole, none of them is continued."""
    assert choose_by_place([OLD, OLD, NEW, None], 2) == (0, 1)
    assert choose_by_place([OLD, NEW], 2) is None
    assert choose_by_place([NEW, None, NEW, None], 2) is None
    assert choose_by_place([None, None], 2) is None


def test_a_state_that_one_rank_alone_holds_is_no_source_where_others_hold_another_as_new() -> None:
    """By place; of two the lowest rank's counts, and older states do not."""
    good, bad, old = StateIdentity(2, 9, "a"), StateIdentity(2, 9, "b"), StateIdentity(2, 8, "c")
    assert most_common([bad, good, good], (0,), 1) == (1,)
    assert most_common([good, bad], (0,), 1) == (0,)
    assert most_common([bad, old, old, None], (0,), 1) == (0,)
    assert most_common([bad, good, good, bad, good, good], (0, 1), 2) == (2, 1)
