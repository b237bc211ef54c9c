"""The interval between saves: what loses least to saves and to repeated steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.state.saver import (
    FIELD,
    FIRST_S,
    LONGEST_S,
    PRIOR_S,
    SHORTEST_S,
    Cadence,
    Experience,
    best_interval_s,
)


def lost(interval_s: float, seen: Experience) -> float:
    """Time that a training takes for each second of progress, with restarts that take none (Daly, equation 20)."""
    assert seen.cost_s is not None
    mean_s = seen.mean_time_to_failure_s
    return mean_s * math.expm1((interval_s + seen.cost_s) / mean_s) / interval_s


@given(cost_s=st.floats(0.01, 60.0), trained_s=st.floats(0.0, 1e6), failures=st.integers(0, 200))
def test_no_other_interval_loses_noticeably_less(cost_s: float, trained_s: float, failures: int) -> None:
    """Within the bounds, of all intervals between a quarter and four times as long."""
    seen = Experience(cost_s, trained_s, failures)
    best_s = best_interval_s(seen)
    assert SHORTEST_S <= best_s <= LONGEST_S
    others = (min(LONGEST_S, max(SHORTEST_S, best_s * 2.0 ** (power / 4))) for power in range(-8, 9))
    assert lost(best_s, seen) <= 1.001 * min(lost(each, seen) for each in others)


@given(cost_s=st.floats(0.01, 600.0), trained_s=st.floats(0.0, 1e6), failures=st.integers(0, 200))
def test_saves_come_more_often_with_failures_and_less_often_with_their_cost(
    cost_s: float, trained_s: float, failures: int
) -> None:
    interval_s = best_interval_s(Experience(cost_s, trained_s, failures))
    assert best_interval_s(Experience(cost_s, trained_s, failures + 1)) <= interval_s
    assert best_interval_s(Experience(cost_s, trained_s + 3600.0, failures)) >= interval_s
    if cost_s < PRIOR_S / (1 + failures) / 2:
        assert best_interval_s(Experience(1.5 * cost_s, trained_s, failures)) >= interval_s


def test_known_intervals() -> None:
    """Before a save is measured; for a cheap one; for a dear one; and where a failure comes every half minute."""
    assert best_interval_s(Experience()) == FIRST_S
    assert best_interval_s(Experience(0.1)) == pytest.approx(65.7, abs=0.5)
    assert best_interval_s(Experience(2.0)) == pytest.approx(292.6, abs=1.0)
    assert best_interval_s(Experience(2.0, trained_s=2 * 86400.0)) == pytest.approx(880.0, rel=0.02)
    assert best_interval_s(Experience(600.0)) == LONGEST_S
    assert best_interval_s(Experience(0.1, trained_s=3000.0, failures=800)) == SHORTEST_S


def test_the_cost_follows_the_saves_and_outlives_no_life() -> None:
    """The first is taken as it is, later ones move it; a resumed life measures anew."""
    seen = Experience().saved(1.0)
    assert seen.cost_s == 1.0
    for _ in range(20):
        seen = seen.saved(3.0)
    assert seen.cost_s == pytest.approx(3.0, rel=0.01)
    assert Experience.resumed({FIELD: seen.kept(settled=False)}).cost_s is None


def test_a_life_that_resumes_behind_its_last_save_has_failed() -> None:
    """One that had saved all before it ended has not, nor one that is known to have gone no further.

    A checkpoint without such a field says nothing."""
    seen = Experience(1.0, 5000.0, 2)
    assert Experience.resumed({FIELD: seen.kept(settled=False)}) == Experience(None, 5000.0, 3)
    assert Experience.resumed({FIELD: seen.kept(settled=True)}) == Experience(None, 5000.0, 2)
    assert Experience.resumed({FIELD: seen.kept(settled=False)}, lost=False) == Experience(None, 5000.0, 2)
    assert Experience.resumed({"length": 5}) == Experience()


def test_a_cadence_is_checked() -> None:
    seen = Experience(0.1)
    assert Cadence(None, None).interval_s(seen) is None
    assert Cadence(None, 5.0).interval_s(seen) == 5.0
    assert Cadence(None, "auto").interval_s(seen) == best_interval_s(seen)
    for wrong in (0.0, -1.0, math.nan, "often"):
        with pytest.raises(ConfigError, match="checkpoint_every_s"):
            Cadence(None, wrong)
    with pytest.raises(ConfigError, match="checkpoint_every_steps"):
        Cadence(0)
