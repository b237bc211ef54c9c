"""What the nodes of a failed test said: the machine that ran it, and its files, may be gone when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

LINES = 12
"""Of each log."""
LENGTH = 400
NODES = 8
TOLD = ('"level": "warning"', '"level": "error"', '"level": "critical"', "Error", "Traceback", "Fatal")


def said(directory: Path) -> Iterator[tuple[str, str]]:
    """The newest logs of nodes below ``directory``: the last lines that tell of a fault, and the very last ones."""
    logs = sorted(directory.rglob("logs/*.log"), key=lambda path: path.stat().st_mtime)[-NODES:]
    for path in logs:
        lines = path.read_text(errors="replace").splitlines()
        faults = [line for line in lines[: -LINES // 2] if any(each in line for each in TOLD)]
        shown = faults[-LINES // 2 :] + lines[-LINES // 2 :]
        yield str(path.relative_to(directory)), "\n".join(line[:LENGTH] for line in shown)
