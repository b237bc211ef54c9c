"""Shared values."""

from __future__ import annotations

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.model import checked_name


@pytest.mark.parametrize("name", ["a", "A-1", "node_0.example", "9", "x" * 128])
def test_names_that_may_be_used(name: str) -> None:
    assert checked_name(name, "run id") == name


@pytest.mark.parametrize("name", ["", ".", "-a", "_a", "a/b", "a b", "a\n", "ü", "x" * 129, "a:b", "a,b"])
def test_names_that_may_not(name: str) -> None:
    """The error quotes the name and says what it was for."""
    with pytest.raises(ConfigError, match="run id") as caught:
        checked_name(name, "run id")
    assert repr(name) in str(caught.value)
