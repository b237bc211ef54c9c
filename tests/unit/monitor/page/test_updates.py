"""What an update of a page carries, and what a reader may choose to see."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.monitor import page
from elastic_trainer.monitor.page import edits
from tests.support import snapshots

texts = st.lists(st.sampled_from("abc"), max_size=12)


def after(before: Sequence[str], changes: Sequence[tuple[int, int, Sequence[str]]]) -> list[str]:
    """What the browser makes of it."""
    lines = list(before)
    for start, removed, put in changes:
        lines[start : start + removed] = put
    return lines


@given(texts, texts)
def test_edits_make_one_text_the_other(before: list[str], now: list[str]) -> None:
    """Whatever the two are."""
    assert after(before, edits(before, now)) == now


def test_an_update_carries_what_has_changed() -> None:
    """A run of 64 ranks that has made a step: a small part of its snapshot, which readers were sent before."""
    before, run = page.run_update(snapshots.large(8)), snapshots.large(8, turn=1)
    now = page.run_update(run)
    told = page.message(now, before)
    assert after(before.view, json.loads(told)["view"]) == list(now.view)
    assert len(told) < len(json.dumps(run)) / 10


def test_the_first_update_is_the_whole_page() -> None:
    """Whatever the browser has."""
    now = page.run_update(snapshots.healthy())
    told = json.loads(page.message(now))
    assert told["full"]
    assert after((), told["view"]) == list(now.view)
    assert after((), told["course"]) == list(now.course)


@pytest.mark.parametrize(
    ("query", "choice"),
    [
        ("", page.Choice()),
        ("turned=a&turned=b&turn=b&turn=c", page.Choice(turned=frozenset("ac"))),
        ("all=&all=1&find=+node-4", page.Choice(every=True, find="node-4")),
        ("all=1&all=0", page.Choice()),
        ("find=" + "x" * 200, page.Choice(find="x" * 100)),
    ],
)
def test_a_choice_is_that_of_the_form(query: str, choice: page.Choice) -> None:
    """Of two values the button's counts; a node that is turned twice is as it was."""
    assert page.Choice.of(query) == choice
