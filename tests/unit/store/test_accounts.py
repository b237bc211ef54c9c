"""Which rights are given, and what is done for them."""

from __future__ import annotations

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.store.accounts import Known, Right, account_of, granted, monitors_account, steps

A = account_of("/p", "a")
OTHER = Right("/other/a/", "/other/a0", write=True)


def test_the_rights_of_a_run_are_those_of_its_keys() -> None:
    """From its slash on, so that no run whose name begins like it is in between."""
    assert (A.name, A.right) == ("run-a", Right("/p/a/", "/p/a0", write=True))
    assert not A.right.key <= "/p/a-b/x" < A.right.range_end
    assert not A.right.key <= "/p/a0/x" < A.right.range_end
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
