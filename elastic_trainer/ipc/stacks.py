"""The stacks of a hung worker: the agent requests them by a signal, and the worker's C handler writes them.

The handler works even while the interpreter lock is held, but not while the process is stopped. If py-spy is installed
it reads a stopped process from outside.

*Runs in* the agent. *Fails by* nothing: the text says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final

from elastic_trainer.clock import Deadline, pause

SIGNAL: Final = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + 5
"""A signal that no other program uses: SIGUSR1 and SIGUSR2 belong to scripts and job controllers."""
ANSWER_S: Final = 0.5
_QUIET_S: Final = 0.03
_SPY_S: Final = 3.0
_MOST: Final = 16_000


def stacks_of(pid: int, page: Path) -> str:
    """The stacks of all threads of worker ``pid``, whose heartbeat page is ``page``; or why there are none."""
    written = _requested(pid, page.with_suffix(".stacks"))
    return (written or _py_spy(pid) or "none: the process is stopped or silent, and py-spy is not installed")[-_MOST:]


def _requested(pid: int, file: Path) -> str:
    try:
        before = file.stat().st_size
        handled, stopped = signal_state(pid)
        if stopped or SIGNAL not in handled:  # a signal without a handler would kill the process
            return ""
        os.kill(pid, SIGNAL)
    except OSError:
        return ""
    deadline, size = Deadline.after(ANSWER_S), before
    while not deadline.expired:
        pause(_QUIET_S)
        now = file.stat().st_size if file.exists() else before
        if now > before and now == size:
            break
        size = now
    with contextlib.suppress(OSError):
        return file.read_bytes()[before:].decode(errors="replace").strip()
    return ""


def signal_state(pid: int) -> tuple[set[int], bool]:
    """The signals that process ``pid`` handles, and whether it is stopped (then it handles none)."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    mask = int(fields.get("SigCgt", "0"), 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}, fields.get("State", "").strip()[:1] in "Tt"


def _py_spy(pid: int) -> str:
    spy = shutil.which("py-spy")
    if spy is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=_SPY_S, check=True).stdout.strip()
    return ""
