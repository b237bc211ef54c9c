"""Waits until a worker of this node opens a Session; until then logs periodically what the workers do.

A script may download or compile for a long time before. A script without a Session would train alone on each node, so
the node gives up after a limit.

*Runs in* the agent: a thread named ``session-watch`` for each life of the workers. *Owns* that thread.
*Fails by* calling ``give_up`` once with the SessionTimeoutError.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from elastic_trainer.agent.workers.watchdog import process_state
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import SessionTimeoutError
from elastic_trainer.telemetry.logs import logger

FIRST_NOTE_S: Final = 60.0
"""Seconds until the first log entry; the interval doubles after each."""
_CPU_FIELDS: Final = slice(11, 13)
"""Fields of ``/proc/PID/stat`` after the name: the time in user mode and in the kernel, in ticks."""


class SessionWatch:
    """See the module. ``met`` is set with the first Session; ``awaited()`` says whether this life still counts."""

    def __init__(
        self,
        met: threading.Event,
        awaited: Callable[[], bool],
        workers: Callable[[], Iterable[int]],
        limit_s: float,
        give_up: Callable[[SessionTimeoutError], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._met, self._awaited, self._workers = met, awaited, workers
        self._limit_s, self._give_up, self._clock = limit_s, give_up, clock

    def start(self) -> None:
        threading.Thread(target=self.watch, name="session-watch", daemon=True).start()

    def watch(self) -> None:
        """Run until a Session is opened or the limit is over."""
        limit, note_s = Deadline.after(self._limit_s, self._clock), FIRST_NOTE_S
        while not self._clock.wait(self._met, min(note_s, limit.remaining_s())) and self._awaited():
            found = doing(list(self._workers()))
            if limit.expired:
                self._give_up(_error(self._limit_s, found))
                return
            waited_s = self._limit_s - limit.remaining_s()
            logger().info("session.awaited", seconds=round(waited_s), limit_s=self._limit_s, workers=found)
            note_s = waited_s


def _error(limit_s: float, found: str) -> SessionTimeoutError:
    return SessionTimeoutError(
        f"no worker has opened an elastic_trainer.Session within {limit_s:g} s, as recovery=in_place needs ({found})",
        hint="open it earlier, or raise --rdzv-conf session_timeout; a script without one needs recovery=restart",
    )


def doing(pids: Sequence[int], proc: Path = Path("/proc")) -> str:
    """What these processes do, in words."""
    found = [f"worker {pid} is {process_state(pid)}{_cpu(proc / str(pid) / 'stat')}" for pid in pids]
    return "; ".join(found) or "none lives"


def _cpu(stat: Path) -> str:
    try:
        fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        ticks = sum(map(int, fields[_CPU_FIELDS]))
    except (OSError, ValueError):
        return ""
    return f", after {ticks / os.sysconf('SC_CLK_TCK'):.1f} s of CPU time"
