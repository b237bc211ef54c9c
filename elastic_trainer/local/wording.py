"""Exit codes and errors in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST = 300


def exit_text(exit_code: int) -> str:
    """How a process ended (its code as in :class:`subprocess.Popen`: negative for a signal)."""
    return f"ended by signal {-exit_code}" if exit_code < 0 else f"exited with {exit_code}"


def last_error(lines: Iterable[str]) -> str:
    """The message of the last traceback or ``error:`` in a process's output, except torchrun's own; "" if none."""
    found, inside = "", False
    for line in lines:
        if line.startswith(("Traceback (most recent call last)", '  File "')):  # a SyntaxError has no first line
            inside = True
        elif line.startswith("error: "):
            found = line.removeprefix("error: ")
        elif inside and line.strip() and not line[0].isspace():
            found, inside = found if "ChildFailedError" in line else line, False
    return found[:_LONGEST]
