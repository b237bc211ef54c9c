"""Names of keys, and the rights on them that users of etcd get."""

from __future__ import annotations

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.membership.documents import GONE
from elastic_trainer.store.accounts import Known, Right, account_of, granted, monitors_account, steps
from elastic_trainer.store.api import RunKeys

A = account_of("/p", "a")
OTHER = Right("/other/a/", "/other/a0", write=True)


def test_keys_of_a_run() -> None:
    """All lie below prefix and run id. No node can have the name of the preflight's meeting, nor the one under which
    the health of those that are gone is summed up."""
    keys = RunKeys("/p", "a")
    assert (keys.root, keys.spec, keys.round, keys.progress) == ("/p/a/", "/p/a/spec", "/p/a/round", "/p/a/progress")
    assert (keys.nodes, keys.node("n1"), keys.events) == ("/p/a/nodes/", "/p/a/nodes/n1", "/p/a/events/")
    assert (keys.preflight_node("n1"), keys.node_health("n1")) == ("/p/a/preflight/n1", "/p/a/health/n1")
    assert keys.health == "/p/a/health/"
    assert keys.preflight_meeting.startswith(keys.preflight)
    assert keys.is_preflight_meeting(keys.preflight_meeting + "n1")
    assert not keys.is_preflight_meeting(keys.preflight_node("meeting"))
    for name in ("_meeting", GONE):
        with pytest.raises(ConfigError, match="node id"):
            keys.node_health(name)
        with pytest.raises(ConfigError, match="node id"):
            keys.preflight_node(name)


def test_a_node_key_names_its_node() -> None:
    """And other keys, or those of another run, name none."""
    keys = RunKeys("/p", "a")
    assert keys.node_id(keys.node("n1")) == "n1"
    others = RunKeys("/p", "b").node("n1"), RunKeys("/p", "a.b").node("n1")
    for other in (keys.spec, keys.nodes, keys.node_health("n1"), *others):
        assert keys.node_id(other) is None


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


def test_the_rights_of_a_run_are_those_of_its_keys() -> None:
    """From its slash on, so that no run whose name begins like it is in between."""
    assert (A.name, A.right) == ("run-a", Right("/p/a/", "/p/a0", write=True))
    assert not any(A.right.key <= key < A.right.range_end for key in ("/p/a-b/x", "/p/a0/x"))
    assert monitors_account("/p").right == Right("/p/", "/p0", write=False)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (Known({}, {}), "RoleAdd RoleGrantPermission UserAdd UserGrantRole"),
        (Known({}, {"run-a": frozenset()}), "RoleGrantPermission UserAdd UserGrantRole"),
        (Known({"run-a": ()}, {"run-a": frozenset({A.right})}), "UserChangePassword UserGrantRole"),
        (Known({"run-a": ("run-a",)}, {"run-a": frozenset({A.right})}), "UserChangePassword"),
    ],
)
def test_only_what_is_missing_is_done(known: Known, expected: str) -> None:
    """Rights before the user; a new password each time."""
    assert [method for method, _ in steps(A, known, "new")] == expected.split()


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        (Known({}, {"run-a": frozenset({OTHER})}), "a role 'run-a' with other rights: read and write /other/a/"),
        (Known({}, {"run-a": frozenset({A.right, OTHER})}), "with other rights"),
        (Known({"run-a": ("root", "run-a")}, {}), "has the role 'root' too"),
    ],
)
def test_rights_that_are_too_many_are_not_passed_on(known: Known, sentence: str) -> None:
    """A role or user of this name that may do more is somebody's decision, and not hidden by a grant."""
    with pytest.raises(ConfigError, match=sentence):
        steps(A, known, "new")


def test_the_list_has_the_runs_of_this_prefix() -> None:
    """With those that lack something; roles of others and of other prefixes are passed over."""
    known = Known(
        {"run-a": ("run-a",), "run-b": (), "run-c": ("run-c",), "trainer": ("trainer",)},
        {"run-a": frozenset({A.right}), "run-c": frozenset({OTHER}), "run-": frozenset(), "trainer": frozenset()},
    )
    assert granted(known, "/p") == {"a": True, "b": False}
