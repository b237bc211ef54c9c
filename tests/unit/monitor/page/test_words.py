"""Numbers, durations and names in words."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.monitor.page import view as words
from elastic_trainer.monitor.page.view import NONE, TIMES


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, NONE),
        (-3, "0 s"),
        (0, "0 s"),
        (0.00125, "1.3 ms"),
        (0.0099, "9.9 ms"),
        (0.83, "830 ms"),
        (0.9996, "1.0 s"),
        (8.25, "8.3 s"),
        (43.4, "43 s"),
        (59.6, "1 min"),
        (75, "1 min 15 s"),
        (600, "10 min"),
        (1910, "31 min"),
        (3599.7, "1 h"),
        (8040, "2 h 14 min"),
        (86_400 * 3 + 3600 * 4, "3 d 4 h"),
        (float("nan"), NONE),
        (True, NONE),
        ("5", NONE),
    ],
)
def test_durations_have_the_units_that_matter(seconds: Any, said: str) -> None:
    """Two units at most, and no more digits than one reads."""
    assert words.duration(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (2.08714, "2.087"),
        (0.0123456, "0.0123"),
        (0.0000123, "1.23e-5"),
        (123456.7, "1.23e+5"),
        (1e-12, "1.00e-12"),
        (345.67, "345.7"),
        (-0.5, "-0.5000"),
        (0, "0.0000"),
        (None, NONE),
    ],
)
def test_losses_keep_about_four_digits(value: Any, said: str) -> None:
    """Large and tiny ones are written with a power of ten."""
    assert words.measure(value) == said


def test_counts_sizes_shares_and_ratios() -> None:
    """Each in its usual form; null is a dash."""
    assert words.count(1234567.5) == "1,234,568"
    assert words.size(1_483_000_000) == "1.5 GB"
    assert words.size(999.4) == "999 B"
    assert words.percent(0.9685) == "96.9 %"
    assert words.times(2.31) == f"2.31{TIMES}"
    assert {words.count(None), words.size(None), words.percent(None), words.times(None), words.ago(None)} == {NONE}


def test_names_that_nobody_knows_are_shown_as_they_are() -> None:
    """A newer node may tell of a phase that this monitor has never heard of."""
    assert words.named("phases", "warming_the_cache") == {
        "key": "other",
        "label": "warming the cache",
        "look": "other",
        "mark": "?",
    }
    assert words.named("phases", None)["label"] == "not known"


def test_nodes_sort_as_people_count() -> None:
    """node-10 comes after node-2."""
    assert sorted(["node-10", "node-2", "a"], key=words.natural) == ["a", "node-2", "node-10"]


def test_times_that_are_none_have_no_stamp() -> None:
    """Neither null nor a year that no calendar has breaks the page."""
    assert words.stamp(1_789_000_000.9) == ("2026-09-10T00:26:40Z", "2026-09-10 00:26:40 UTC")
    assert words.stamp(None) == words.stamp(1e300) == ("", "")
