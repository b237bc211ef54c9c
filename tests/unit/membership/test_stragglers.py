"""Which ranks are called stragglers."""

from __future__ import annotations

import pytest

from elastic_trainer.membership.stragglers import LEAST_EXCESS_S, RATIO, find_stragglers


@pytest.mark.parametrize(
    ("compute_s", "slow"),
    [
        ([], ""),
        ([0.1, 9.0], ""),  # of fewer than three known ranks none is one
        ([0.1, 9.0, 0.0], ""),
        ([0.1, 0.1, 0.11, 0.2], "3"),
        ([1.0, 1.0, RATIO], ""),  # the ratio is exceeded, not reached
        ([1.0, 1.0, RATIO + 0.01], "2"),
        ([0.001, 0.001, 0.001 + LEAST_EXCESS_S - 0.0001], ""),  # the noise of a machine in tiny steps
        ([0.001, 0.001, 0.001 + LEAST_EXCESS_S + 0.0001], "2"),
        ([0.1, 0.1, 0.1, 0.3, 0.4], "34"),
        ([0.1, 0.3, 0.3], ""),  # a common slowness
    ],
)
def test_a_rank_that_computes_much_longer_than_the_others_is_one(compute_s: list[float], slow: str) -> None:
    assert find_stragglers(dict(enumerate(compute_s))).ranks == set(map(int, slow))


def test_the_slowest_is_named_and_compared_with_the_median() -> None:
    found = find_stragglers({0: 0.1, 1: 0.1, 2: 0.1, 3: 0.3, 4: 0.4})
    assert "rank 4 computes 0.4 s" in found.reason
    assert "2 ranks are slow" in found.reason
    assert found.slowdown(0.21) == pytest.approx(2.1)
    assert find_stragglers({0: 0.1, 1: 9.0}).slowdown(9.0) is None
