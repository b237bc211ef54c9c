"""Retention: what stays, what goes, and the reasons."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.checkpoint.retention import BestMode, Candidate, Retention, by_metric, decide
from elastic_trainer.errors import ConfigError


def story(*steps: int, **metrics: float) -> list[Candidate]:
    """Checkpoints at ``steps``, newest first; ``s7=0.5`` gives the one of step 7 that loss."""
    values = {name: {"loss": value} for name, value in metrics.items()}
    return [Candidate(f"s{step}", step, metrics=values.get(f"s{step}", {})) for step in steps]


def kept(candidates: list[Candidate], policy: Retention, *protected: str) -> list[str]:
    return [verdict.name for verdict in decide(candidates, policy, frozenset(protected)) if verdict.keep]


SCORED = story(5, 4, 3, 2, 1, s4=math.nan, s3=0.5, s2=0.1, s1=0.9)
FLAGGED = [Candidate("a", 4), Candidate("b", 3, best=True), Candidate("c", 2, best=True)]


@pytest.mark.parametrize(
    ("candidates", "policy", "protected", "staying"),
    [
        (story(5, 4, 9, 2), Retention(keep_last=2), (), ["s5", "s4"]),
        (story(25, 24, 20, 15, 10), Retention(keep_last=1, keep_every=10), (), ["s25", "s20", "s10"]),
        (SCORED, Retention(keep_last=1, metric="loss", mode=BestMode.MIN), (), ["s5", "s2"]),
        (SCORED, Retention(keep_last=1, metric="loss", mode=BestMode.MAX), (), ["s5", "s1"]),
        (FLAGGED, Retention(keep_last=1), (), ["a", "b"]),
        (story(9, 8, 7), Retention(keep_last=1), ("s7",), ["s9", "s7"]),
    ],
    ids=["newest", "milestones", "lowest", "highest", "flagged", "protected"],
)
def test_each_rule_keeps_its_checkpoints(
    candidates: list[Candidate], policy: Retention, protected: tuple[str, ...], staying: list[str]
) -> None:
    """The order counts, not step numbers; NaN and missing metrics are never best; only the newest flag counts."""
    assert kept(candidates, policy, *protected) == staying


def test_of_equally_good_ones_the_newest_is_best() -> None:
    """Ties do not depend on chance."""
    policy = Retention(metric="loss")
    assert [each.name for each in by_metric(story(3, 2, 1, s3=1.0, s2=0.5, s1=0.5), policy)] == ["s2", "s1", "s3"]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"keep_last": 0}, "keep_last"),
        ({"keep_every": 0}, "keep_every"),
        ({"keep_best": 0}, "keep_best"),
        ({"metric": "loss", "mode": "minimum"}, "minimum"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Retention(**values)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.floats()), unique_by=lambda each: each[0], max_size=12),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 7)),
)
def test_invariants(values: list[tuple[int, bool, float]], keep_last: int, keep_every: int | None) -> None:
    """Every checkpoint gets one verdict with a reason; the newest stays; deciding again removes nothing more."""
    candidates = [Candidate(str(step), step, best, {"loss": loss}) for step, best, loss in values]
    policy = Retention(keep_last=keep_last, keep_every=keep_every, metric="loss")
    verdicts = decide(candidates, policy, frozenset())
    assert [verdict.name for verdict in verdicts] == [each.name for each in candidates]
    assert all(verdict.reason for verdict in verdicts)
    assert all(verdict.keep for verdict in verdicts[:keep_last])
    staying = [each for each, verdict in zip(candidates, verdicts, strict=True) if verdict.keep]
    assert kept(staying, policy) == [each.name for each in staying]
