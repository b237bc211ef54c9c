"""Watches this node's worker processes, and kills those that hang or outlive their round.

``Watchdog`` (in place): a thread of each worker does nothing but answer pings. A worker that does not answer is frozen
or holds the interpreter lock: it cannot learn that a round is over either, and all others wait for it. Its death is
noticed at once, torchrun restarts it, and the others continue. The heartbeat page reveals a worker that answers but
makes no progress (:mod:`elastic_trainer.agent.health.node_health`). ``Supervisor`` (restart): kills workers that
outlive their round. :func:`await_session` gives up on workers that never open a Session.

*Runs in* the agent: threads named ``watchdog``, ``supervisor`` and ``session-watch``. *Owns* no process; torchrun
starts and reaps them. *Fails by* nothing: a process that has already ended needs no kill.
*Invariant*: time in which the agent itself was frozen does not count against a worker. Only children of this process
that carry the run's id in their environment, or are connected to it, are ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from elastic_trainer.agent.workers.conductor import Worker
from elastic_trainer.agent.workers.hang_rules import LATE
from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import SessionTimeoutError
from elastic_trainer.ipc.channel import ChannelClosedError, Ping
from elastic_trainer.ipc.page import stacks_of
from elastic_trainer.telemetry.logs import logger

ASKED_EVERY_S = 1.0
QUESTIONS_PER_LIMIT = 8


class Watchdog:
    """See the module. ``workers()`` returns the workers to watch now; ``kill(pid, reason, local_rank=)`` ends one."""

    def __init__(
        self, limit_s: float, workers: Callable[[], Iterable[Worker]], kill: Callable[..., None], clock: Clock = SYSTEM
    ) -> None:
        self._limit_s, self._workers, self._kill, self._clock = limit_s, workers, kill, clock
        self.every_s = min(ASKED_EVERY_S, limit_s / QUESTIONS_PER_LIMIT)
        self._looked_at = clock.monotonic()

    def turn(self) -> float:
        """Kill the workers that have been silent for too long, ping the others; seconds until the next turn."""
        now = self._clock.monotonic()
        stood_still = now - self._looked_at > LATE * self.every_s
        self._looked_at = now
        for worker in self._workers():
            if stood_still or not worker.heard_at:
                worker.heard_at = now
            elif now - worker.heard_at > self._limit_s:
                self._end(worker, now - worker.heard_at)
                continue
            ping(worker, now)
        return self.every_s

    def _end(self, worker: Worker, silent_s: float) -> None:
        state = process_state(worker.pid)
        if state == "traced":
            worker.heard_at = self._clock.monotonic()
            logger().warning("worker.silent", pid=worker.pid, silent_s=round(silent_s, 1), state=state)
            return
        reason = f"it has answered nothing for {silent_s:.1f} s (state: {state})"
        self._kill(worker.pid, reason, local_rank=worker.local_rank)


def ping(worker: Worker, now: float) -> None:
    """Send ``worker`` a ping."""
    if not worker.pinged_at:
        worker.pinged_at, worker.queued = now, queued_s(worker.pid)
    with contextlib.suppress(ChannelClosedError):
        worker.connection.send(Ping())


def queued_s(pid: int) -> Mapping[str, float]:
    """Seconds that each thread of ``pid`` was runnable without a CPU in its whole life; empty if the kernel does not
    count them (sched-stats.rst, /proc/PID/task/TID/schedstat)."""
    found = {}
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/task").iterdir():
            found[each.name] = int((each / "schedstat").read_text().split()[1]) / 1e9
    return found


def process_state(pid: int) -> str:
    """The kernel's state of a process: ``traced`` (by a debugger), ``stopped``, ``running``, ...; or ``unknown``."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "unknown"
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if int(fields.get("TracerPid", "0")):
        return "traced"
    return fields.get("State", "unknown").strip().partition("(")[2].rstrip(")") or "unknown"


def kill_now(pid: int, reason: str, **more: int) -> bool:
    """SIGKILL the worker ``pid``; ``more`` is added to the log entry. False if it had already ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    logger().warning("worker.killed", pid=pid, reason=reason, **more)
    return True


class HungWorkers:
    """The workers that were killed because they hung, and why: their node reports that cause instead of "lost".

    ``count()`` is called for each; ``page_of(pid)`` is the heartbeat page of a worker. ``seen`` is called for each
    before it is killed, with its process id, why, the kernel's state of it, and its stacks.
    """

    def __init__(
        self,
        count: Callable[[], None] = lambda: None,
        page_of: Callable[[int], Path | None] = lambda pid: None,
        seen: Callable[[int, str, str, str], None] = lambda pid, reason, state, stacks: None,
    ) -> None:
        self._count, self._page_of, self._seen = count, page_of, seen
        self._lock = threading.Lock()
        self._reasons: dict[int, str] = {}

    def kill(self, pid: int, reason: str, *, local_rank: int) -> None:
        """Log the stacks of the hung worker ``pid`` and kill it, at most once."""
        with self._lock:
            if pid in self._reasons or not os.path.exists(f"/proc/{pid}"):
                return  # who read its page may be late: it has ended, and its reason was taken
            self._reasons[pid] = reason
        page = self._page_of(pid)
        state = process_state(pid)
        stacks = stacks_of(pid, page) if page is not None else ""
        if page is not None:
            logger().warning("worker.hung", pid=pid, reason=reason, stacks=stacks, local_rank=local_rank)
        self._seen(pid, reason, state, stacks)
        if kill_now(pid, reason, local_rank=local_rank):
            self._count()

    def take(self, pid: int) -> str | None:
        """Why ``pid``, which has ended, was killed; None if it was not. Forgets it: the kernel may reuse the id."""
        with self._lock:
            return self._reasons.pop(pid, None)

    def take_any(self) -> str | None:
        """The reason of any of them, once; for a restart of all workers of the node by torchrun."""
        with self._lock:
            reason = next(iter(self._reasons.values()), None)
            self._reasons.clear()
            return reason


AGAIN_S = 0.5


def children(pid: int) -> set[int]:
    """The children of the process ``pid``; empty if it has ended."""
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= set(map(int, task.read_text().split()))
    return found


def worker_pids(run_id: str) -> list[int]:
    """Process ids of this process's workers of ``run_id``."""
    wanted, found = f"TORCHELASTIC_RUN_ID={run_id}".encode(), []
    for pid in sorted(children(os.getpid())):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def kill_workers(run_id: str, reason: str) -> None:
    """SIGKILL this process's workers of ``run_id``."""
    for pid in worker_pids(run_id):
        kill_now(pid, reason)


class Supervisor:
    """Kills workers that ignore torchrun's SIGTERM after the end of their round.

    torchrun waits 30 s for them (a Python signal handler does not run while its thread is blocked in a collective);
    after ``grace_s`` nothing that they could still save is worth the wait.
    """

    def __init__(self, run_id: str, grace_s: float, clock: Clock = SYSTEM) -> None:
        self._run_id, self._grace_s, self._clock = run_id, grace_s, clock
        self._working_in = self._over = 0
        self._over_since = 0.0
        self._thread = PeriodicThread("supervisor", self.turn, clock)

    def start(self) -> None:
        self._thread.start()

    def round_begun(self, number: int) -> None:
        """Workers are about to start in round ``number``; those of earlier rounds have ended."""
        self._working_in = number
        self._thread.wake()

    def round_over(self, number: int) -> None:
        """Rounds up to ``number`` are over: workers in one of them have ``grace_s`` seconds from now."""
        if number > self._over:
            self._over_since = self._clock.monotonic()  # first: a turn may come between the two
            self._over = number
            self._thread.wake()

    def close(self) -> None:
        self._thread.close()

    def turn(self) -> float:
        """Kill the workers whose grace period is over; seconds until the next look, since some may just be starting."""
        if not 0 < self._working_in <= self._over:
            return IDLE_S
        left_s = self._over_since + self._grace_s - self._clock.monotonic()
        if left_s > 0.0:
            return left_s
        kill_workers(self._run_id, f"its round ended {self._grace_s:g} s ago")
        return AGAIN_S


FIRST_NOTE_S: Final = 60.0
"""Seconds until the first log entry; the interval doubles after each."""
_CPU_FIELDS: Final = slice(11, 13)
"""Fields of ``/proc/PID/stat`` after the name: the time in user mode and in the kernel, in ticks."""


def await_session(
    met: threading.Event,
    awaited: Callable[[], bool],
    workers: Callable[[], Iterable[int]],
    limit_s: float,
    give_up: Callable[[SessionTimeoutError], None],
    clock: Clock = SYSTEM,
) -> None:
    """Wait until a worker opens a Session, which sets ``met``; ``give_up`` on workers that have opened none in time.

    ``awaited()`` says whether this life still counts.
    """
    limit, note_s = Deadline.after(limit_s, clock), FIRST_NOTE_S
    while not clock.wait(met, min(note_s, limit.remaining_s())) and awaited():
        found = doing(list(workers()))
        if limit.expired:
            text = f"no worker has opened an elastic_trainer.Session within {limit_s:g} s, as recovery=in_place needs"
            hint = "open it earlier, or raise --rdzv-conf session_timeout; a script without one needs recovery=restart"
            give_up(SessionTimeoutError(f"{text} ({found})", hint=hint))
            return
        waited_s = limit_s - limit.remaining_s()
        logger().info("session.awaited", seconds=round(waited_s), limit_s=limit_s, workers=found)
        note_s = waited_s


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
