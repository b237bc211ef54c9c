"""Shared values."""

from __future__ import annotations

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor, Incarnation, StateIdentity, checked_name


@pytest.mark.parametrize("name", ["a", "A-1", "node_0.example", "9", "x" * 128])
def test_names_that_may_be_used(name: str) -> None:
    assert checked_name(name, "run id") == name


@pytest.mark.parametrize("name", ["", ".", "-a", "_a", "a/b", "a b", "a\n", "ü", "x" * 129, "a:b", "a,b"])
def test_names_that_may_not(name: str) -> None:
    """The error quotes the name and says what it was for."""
    with pytest.raises(ConfigError, match="run id") as caught:
        checked_name(name, "run id")
    assert repr(name) in str(caught.value)


def test_order_is_by_what_came_later() -> None:
    """A later round beats any step, a later epoch any sample, a later creation any life."""
    assert StateIdentity(2, 1) > StateIdentity(1, 900)
    assert StateIdentity(1, 2) > StateIdentity(1, 1)
    assert Cursor(1, 0) > Cursor(0, 50_000)
    assert Incarnation(7, 0) > Incarnation(6, 9)


def test_a_digest_is_part_of_an_identity() -> None:
    assert StateIdentity(1, 5, "aa") != StateIdentity(1, 5, "bb")
