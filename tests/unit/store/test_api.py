"""Names of keys."""

from __future__ import annotations

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.membership.documents import GONE
from elastic_trainer.store.api import RunKeys


def test_keys_of_a_run() -> None:
    """All keys lie below prefix and run id."""
    keys = RunKeys("/elastic_trainer", "job-1")
    assert keys.root == "/elastic_trainer/job-1/"
    assert keys.spec == "/elastic_trainer/job-1/spec"
    assert keys.round == "/elastic_trainer/job-1/round"
    assert keys.progress == "/elastic_trainer/job-1/progress"
    assert keys.nodes == "/elastic_trainer/job-1/nodes/"
    assert keys.node("n1") == "/elastic_trainer/job-1/nodes/n1"
    assert keys.events == "/elastic_trainer/job-1/events/"


def test_a_node_key_names_its_node() -> None:
    """And other keys, or those of another run, name none."""
    keys = RunKeys("/p", "a")
    assert keys.node_id(keys.node("n1")) == "n1"
    for other in (keys.spec, keys.nodes, RunKeys("/p", "b").node("n1"), RunKeys("/p", "a.b").node("n1")):
        assert keys.node_id(other) is None


def test_what_nodes_tell_of_their_checks_is_not_mistaken_for_their_meeting() -> None:
    """No node can have the name that the meeting has in the keys."""
    keys = RunKeys("/p", "a")
    assert keys.preflight_node("n1") == "/p/a/preflight/n1"
    assert keys.preflight_meeting.startswith(keys.preflight)
    assert keys.is_preflight_meeting(keys.preflight_meeting + "n1")
    assert not keys.is_preflight_meeting(keys.preflight_node("meeting"))
    with pytest.raises(ConfigError):
        keys.preflight_node("_meeting")


@pytest.mark.parametrize("wrong", ["", "a/b", "-a", "a b", "ä", "x" * 129])
def test_names_that_cannot_be_keys_are_refused(wrong: str) -> None:
    """A slash in a name would reach into another run's keys."""
    with pytest.raises(ConfigError, match="run id"):
        RunKeys("/p", wrong)
    with pytest.raises(ConfigError, match="node id"):
        RunKeys("/p", "a").node(wrong)


@pytest.mark.parametrize(("kind", "digits"), [("event", 12), ("incident", 16)])
def test_keys_of_journal_and_incidents_sort_as_their_numbers(kind: str, digits: int) -> None:
    """So that the oldest can be deleted as a range; incidents have milliseconds since 1970."""
    key = getattr(RunKeys("/p", "a"), kind)
    numbers = [0, 1, 9, 10, 12, 999, 123456789, 10**digits - 1]
    assert sorted(map(key, reversed(numbers))) == [key(number) for number in numbers]
    assert all(key(number).startswith(f"/p/a/{kind}s/") for number in numbers)
    for wrong in (-1, 10**digits):
        with pytest.raises(ValueError, match="out of range"):
            key(wrong)


def test_keys_of_health_are_those_of_nodes_and_no_node_is_called_gone() -> None:
    """Under that name the sums of nodes are kept that are gone."""
    keys = RunKeys("/p", "a")
    assert keys.node_health("n1") == f"{keys.health}n1" == "/p/a/health/n1"
    assert keys.node_id(keys.node_health("n1")) is None
    with pytest.raises(ConfigError, match="node id"):
        keys.node_health(GONE)
