"""How tests wait for what other threads and processes do."""

from __future__ import annotations

from collections.abc import Callable

from elastic_trainer.clock import Deadline, pause

LIMIT_S = 60.0
"""How long anything may take on a slow machine before a test fails."""


def soon() -> Deadline:
    """A deadline that no working machine reaches."""
    return Deadline.after(LIMIT_S)


def eventually(condition: Callable[[], object], what: str | Callable[[], str], limit_s: float = LIMIT_S) -> None:
    """Wait until ``condition()`` is true; fail with ``what`` otherwise."""
    deadline = Deadline.after(limit_s)
    while not condition():
        assert not deadline.expired, what if isinstance(what, str) else what()
        pause(0.005)
