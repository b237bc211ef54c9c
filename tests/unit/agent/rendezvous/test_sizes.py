"""Which numbers of nodes a round may have."""

from __future__ import annotations

import pytest

from elastic_trainer.agent.rendezvous.sizes import allowed_sizes
from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import rendezvous_options


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, ()),
        ({"sizes": "4:1:2:16"}, (1, 2, 4)),
        ({"multiple_of": "3"}, (3, 6)),
        ({"sizes": "1:2:4", "multiple_of": "2"}, (2, 4)),
    ],
)
def test_sizes_are_those_between_min_and_max(options: dict[str, str], allowed: tuple[int, ...]) -> None:
    """In rising order; none given: all."""
    assert allowed_sizes(rendezvous_options(options), 1, 8) == allowed


@pytest.mark.parametrize(
    ("options", "given"),
    [({"sizes": "9:10"}, "sizes=9:10"), ({"multiple_of": "16"}, "multiple_of=16")],
)
def test_sizes_of_which_none_is_between_min_and_max_are_an_error(options: dict[str, str], given: str) -> None:
    """With the option and --nnodes, before anything starts."""
    with pytest.raises(ConfigError, match=f"{given} allows no number of nodes of --nnodes 1:8"):
        allowed_sizes(rendezvous_options(options), 1, 8)
