"""The first tier of tests: unit tests, and those that ``tests/first_tier.txt`` lists for pytest (``@FILE``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

FIRST_TIER = Path(__file__).parents[1] / "first_tier.txt"


def listed(test: str, names: Iterable[str]) -> bool:
    """Whether ``test`` (a path, or a test's id) is one of ``names``, or in one."""
    return any(test == name or test.startswith((f"{name}/", f"{name}::", f"{name}[")) for name in names)


def tiers_of(files: Iterable[str]) -> str:
    """Where the tests of ``files`` are played: ``1``, ``2``, or both."""
    first = [name.partition("::")[0] for name in FIRST_TIER.read_text(encoding="utf-8").split()]
    found = {"1" if file.startswith("tests/unit/") or file in first else "2" for file in files}
    return ", ".join(sorted(found))
