"""What a test lacks skips on a laptop and fails in CI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.requirements import find, in_ci, needs


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture
def ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")


@pytest.mark.usefixtures("laptop")
def test_on_a_laptop_a_missing_tool_skips_and_says_why() -> None:
    """The reason names the tool and what it is for."""
    with pytest.raises(pytest.skip.Exception, match=r"no-such-tool is not installed: splits networks"):
        needs("no-such-tool", "splits networks")


@pytest.mark.usefixtures("ci")
def test_in_ci_a_missing_tool_fails() -> None:
    """A CI machine that lacks a tool must not pass by skipping."""
    with pytest.raises(pytest.fail.Exception, match=r"missing in CI: no-such-tool"):
        needs("no-such-tool", "splits networks")


@pytest.mark.parametrize(
    ("value", "expected"), [("true", True), ("1", True), ("false", False), ("0", False), ("", False)]
)
def test_ci_is_what_the_variable_says(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit no is a no."""
    monkeypatch.setenv("CI", value)
    assert in_ci() is expected


def test_a_tool_on_the_path_comes_before_the_environments_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's tool wins over one of the same name in the virtual environment, which is the fallback."""
    environment, machine = tmp_path / "venv", tmp_path / "machine"
    for place in (environment, machine):
        place.mkdir()
        (place / "some-tool").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", str(machine))
    assert needs("some-tool", "") == str(machine / "some-tool")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find("some-tool") == str(environment / "some-tool")
