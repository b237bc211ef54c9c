"""Exit codes and errors in words. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LONGEST = 300
_RANK = re.compile(r"\[rank\d+\]: ")
"""What torch writes before each line of a traceback once a process group is there."""
_OURS = re.compile(r"(?:error|elastic-trainer): ")
_TORCHRUNS = ("ChildFailedError", "SignalException")


def exit_text(exit_code: int) -> str:
    """How a process ended (its code as in :class:`subprocess.Popen`: negative for a signal)."""
    return f"ended by signal {-exit_code}" if exit_code < 0 else f"exited with {exit_code}"


def last_error(lines: Iterable[str]) -> str:
    """The message of the last traceback or of our own in a process's output, except torchrun's; "" if none."""
    found, inside = "", False
    for raw in lines:
        line = _RANK.sub("", raw, count=1) if raw.startswith("[rank") else raw
        if line.startswith(("Traceback (most recent call last)", '  File "')):  # a SyntaxError has no first line
            inside = True
        elif ours := _OURS.match(line):
            found = line[ours.end() :]
        elif inside and line.strip() and not line[0].isspace():
            found, inside = found if any(name in line for name in _TORCHRUNS) else line, False
    return found[:_LONGEST]
