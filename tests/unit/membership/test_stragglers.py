"""Which ranks are called stragglers."""

from __future__ import annotations

import pytest

from elastic_trainer.membership.stragglers import LEAST_EXCESS_S, RATIO, find_stragglers


def test_a_rank_that_computes_much_longer_than_the_others_is_one() -> None:
    found = find_stragglers({0: 0.1, 1: 0.1, 2: 0.11, 3: 0.2})
    assert found.ranks == {3}
    assert found.slowdown(0.21) == pytest.approx(2.0)
    assert "rank 3 computes 0.2 s" in found.reason


@pytest.mark.parametrize("compute_s", [{}, {0: 0.1}, {0: 0.1, 1: 9.0}, {0: 0.1, 1: 9.0, 2: 0.0}])
def test_of_fewer_than_three_known_ranks_none_is_one(compute_s: dict[int, float]) -> None:
    found = find_stragglers(compute_s)
    assert found.ranks == frozenset()
    assert found.slowdown(9.0) is None


def test_the_ratio_is_exceeded_not_reached() -> None:
    assert find_stragglers({0: 1.0, 1: 1.0, 2: RATIO}).ranks == frozenset()
    assert find_stragglers({0: 1.0, 1: 1.0, 2: RATIO + 0.01}).ranks == {2}


def test_in_tiny_steps_the_noise_of_a_machine_makes_no_straggler() -> None:
    assert find_stragglers({0: 0.001, 1: 0.001, 2: 0.003}).ranks == frozenset()
    assert find_stragglers({0: 0.001, 1: 0.001, 2: 0.001 + LEAST_EXCESS_S + 0.0001}).ranks == {2}


def test_several_are_found_and_a_common_slowness_is_none() -> None:
    several = find_stragglers({0: 0.1, 1: 0.1, 2: 0.1, 3: 0.3, 4: 0.4})
    assert several.ranks == {3, 4}
    assert "rank 4" in several.reason
    assert "2 ranks are slow" in several.reason
    assert find_stragglers({0: 0.1, 1: 0.3, 2: 0.3}).ranks == frozenset()
