"""Which ranks give their shards to those that are behind."""

from __future__ import annotations

from elastic_trainer.worker.state.heal import choose_by_place
from elastic_trainer.worker.state.restore import StateCandidate

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
