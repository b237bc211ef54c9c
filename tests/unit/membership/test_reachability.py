"""Who is left out when members of a round cannot reach each other."""

from __future__ import annotations

import pytest

from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.reachability import FAILED_ROUNDS, left_out
from tests.unit.membership.scenes import node


def nodes(**unreachable: tuple[str, ...]) -> list[NodeView]:
    """Nodes in rank order, with whom each could not reach."""
    return [node(name, rank + 1, unreachable=names) for rank, (name, names) in enumerate(unreachable.items())]


def name_of(found: NodeView | None) -> str | None:
    return None if found is None else found.id


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        (nodes(a=(), b=(), c=()), None),
        (nodes(a=("c",), b=("c",), c=("a", "b")), "c"),
        (nodes(a=("b", "c"), b=("a",), c=("a",)), "a"),
        (nodes(a=(), b=("c",), c=("b",)), "c"),  # of equals the last: who came first stays
        (nodes(a=("x",), b=("x",), c=()), None),  # x is not among them anyway
        (nodes(a=("a", "a"), b=(), c=()), None),  # nobody is a witness against itself
    ],
)
def test_the_node_that_most_others_cannot_reach_is_left_out(ready: list[NodeView], expected: str | None) -> None:
    """Whoever is named by most; the last in rank order where several are."""
    assert name_of(left_out(ready, FAILED_ROUNDS, 2)) == expected


def test_one_round_that_failed_is_no_reason() -> None:
    """Where only one side says so: the other may have been slow, or has died, which is found by other means."""
    assert left_out(nodes(a=("c",), b=("c",), c=()), FAILED_ROUNDS - 1, 2) is None


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        (nodes(a=("c",), b=(), c=("a",)), "c"),
        (nodes(a=("b", "c"), b=("a",), c=("a",)), "a"),
        (nodes(a=("b", "c"), b=(), c=("a",)), "c"),  # b was only slow
    ],
)
def test_two_that_name_each_other_do_not_form_a_round_in_vain(ready: list[NodeView], expected: str) -> None:
    """The one that fewer reach is left out at once; of equals the last."""
    assert name_of(left_out(ready, 0, 2)) == expected


def test_nobody_is_left_out_of_the_fewest_that_may_train() -> None:
    """Then the run waits for the network, or ends by its own limit of rounds in vain."""
    ready = nodes(a=("c",), b=("c",), c=("a", "b"))
    assert left_out(ready, FAILED_ROUNDS, 3) is None
