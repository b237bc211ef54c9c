"""Who is left out when members of a round cannot reach each other."""

from __future__ import annotations

import pytest

from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.rules import (
    FAILED_ROUNDS,
    blamed,
    cannot_reach,
    left_out,
)
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
        (nodes(a=("a",), b=("c",), c=("b",)), "a"),  # who names itself knows better than the others
        (nodes(a=("a",), b=("b",), c=()), "b"),
    ],
)
def test_the_node_that_most_others_cannot_reach_is_left_out(ready: list[NodeView], expected: str | None) -> None:
    """Whoever is named by most; the last in rank order where several are."""
    assert name_of(left_out(ready, FAILED_ROUNDS)) == expected


def test_one_round_that_failed_is_no_reason() -> None:
    """Where only one side says so: the other may have been slow, or has died, which is found by other means."""
    assert left_out(nodes(a=("c",), b=("c",), c=()), FAILED_ROUNDS - 1) is None


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
    assert name_of(left_out(ready, 0)) == expected


@pytest.mark.parametrize(
    ("tried", "others", "expected"),
    [
        ("10.0.0.3", {"b": "10.0.0.2", "c": "10.0.0.3"}, "c"),
        ("127.0.0.1", {"b": "10.0.0.2"}, "b"),
        ("", {"b": "10.0.0.2"}, None),
        ("127.0.0.1", {"b": "10.0.0.2", "c": "10.0.0.3"}, None),
        ("10.0.0.2", {"b": "10.0.0.2", "c": "10.0.0.2"}, None),
    ],
)
def test_who_was_not_reached_follows_from_the_address_that_was_tried(
    tried: str, others: dict[str, str], expected: str | None
) -> None:
    """Nobody is blamed on a guess."""
    assert blamed(tried, {name: node(name, 1, address=address).record for name, address in others.items()}) == expected


def test_the_sentence_names_both_nodes_the_address_and_whose_it_is() -> None:
    """And what to check."""
    assert cannot_reach("a", "b", "10.0.0.2", "10.0.0.2", "timed out") == (
        "node a cannot reach node b at 10.0.0.2, which b announces (timed out); to check, run 'elastic-trainer doctor"
        " --endpoint HOST:2379 --run-id check --peers 2' on both"
    )
    other = cannot_reach("a", "b", "10.0.0.2", "127.0.0.1", "refused")
    assert "at 127.0.0.1, which its worker published, while its agent announces 10.0.0.2 (refused)" in other
