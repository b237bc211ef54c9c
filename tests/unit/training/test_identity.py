"""Facts of the data that may not change between runs are compared by name, and what changed is said."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.errors import EXIT_CONFIG, ConfigError
from elastic_trainer.jobs.trainer import TaskIdentity, changed


@pytest.mark.parametrize(
    ("was", "now", "sentence"),
    [
        (["a", "b"], ["a", "b"], None),
        (["a", "b"], ["a", "c", "d"], "'classes' changed since the run began: 'c', 'd' added, 'b' removed"),
        (["a", "b"], ["a"], "'classes' changed since the run began: 'b' removed"),
        (["a", "b"], ["b", "a"], "in another order or number"),
        (list("abcdefg"), [], "'a', 'b', 'c', 'd', 'e' and 2 more removed"),
        ("x", "y", "'classes' is 'y' here and was 'x' when the run began"),
        (3, ["a"], "'classes' is ['a'] here and was 3"),
    ],
)
def test_a_change_is_said_in_one_sentence(was: Any, now: Any, sentence: str | None) -> None:
    said = changed("classes", was, now)
    assert said is None if sentence is None else said is not None and sentence in said


def test_a_state_with_other_facts_is_refused_and_equal_ones_are_not() -> None:
    """As a mistake of the user's, with what to do; tuples are the lists that JSON makes of them."""
    saved = TaskIdentity({"classes": ("cat", "dog"), "size": 3}).state_dict()
    TaskIdentity({"classes": ["cat", "dog"], "size": 3}).load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"'cow' added.*checkpoint\.directory") as caught:
        TaskIdentity({"classes": ["cat", "cow", "dog"], "size": 3}).check_state(saved)
    assert caught.value.exit_code == EXIT_CONFIG
    with pytest.raises(ConfigError, match="'size' is 4 here and was 3"):
        TaskIdentity({"classes": ["cat", "dog"], "size": 4}).load_state_dict(saved)


def test_facts_that_only_one_side_knows_are_no_matter() -> None:
    """A newer version of a task may name more, or less, than the one that saved."""
    TaskIdentity({"classes": ["a"], "new": 1}).check_state(TaskIdentity({"classes": ["a"], "old": 2}).state_dict())


def test_what_json_cannot_say_is_refused_at_once() -> None:
    """Not at the first checkpoint."""
    with pytest.raises(ConfigError, match="JSON cannot say"):
        TaskIdentity({"classes": {1, 2}})
