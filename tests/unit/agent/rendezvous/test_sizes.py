"""Which numbers of nodes a round may have."""

from __future__ import annotations

import pytest

from elastic_trainer.agent.rendezvous.node import allowed_sizes
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
    with pytest.raises(ConfigError, match=f"{given} allows no node count within --nnodes 1:8"):
        allowed_sizes(rendezvous_options(options), 1, 8)


def test_with_shard_groups_sizes_are_multiples_of_their_nodes() -> None:
    """--nnodes counts nodes, as torchrun means it: 2:8 with groups of two are one to four groups."""
    assert allowed_sizes(rendezvous_options({"shard_nodes": "2"}), 2, 8) == (2, 4, 6, 8)
    assert allowed_sizes(rendezvous_options({"shard_nodes": "2", "multiple_of": "4"}), 2, 8) == (4, 8)
    assert allowed_sizes(rendezvous_options({"shard_nodes": "2", "sizes": "2:8"}), 2, 8) == (2, 8)


@pytest.mark.parametrize(
    ("options", "high", "given"), [({}, 7, "--nnodes 2:7"), ({"sizes": "2:3:8"}, 8, "sizes=2:3:8")]
)
def test_numbers_that_do_not_divide_into_shard_groups_are_an_error(
    options: dict[str, str], high: int, given: str
) -> None:
    """They would leave nodes idle that the user counts on."""
    with pytest.raises(ConfigError, match=f"{given} does not divide into shard groups of 2 nodes"):
        allowed_sizes(rendezvous_options({"shard_nodes": "2", **options}), 2, high)
