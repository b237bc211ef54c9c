"""The heartbeat pages of this node's workers: finds them, reads them, buries those of dead workers, sums what they
counted.

*Runs in* the agent: whatever thread asks. *Owns* a directory in shared memory, removed at the end; that of an agent
that was killed is removed by the next one on the machine.
*Fails by* nothing: where no directory can be made the workers have no pages, and nothing is known of them.
*Invariant*: what a worker has counted is never forgotten.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.ipc.channel import Identity
from elastic_trainer.ipc.folders import PrivateFolder
from elastic_trainer.ipc.page import ORDER_SUFFIX, SAVE_SUFFIX, PageReader, Reading, crash_of
from elastic_trainer.model import Phase
from elastic_trainer.telemetry.logs import logger

_PREFIX: Final = "elastic-trainer-pages-"
_SHARED_MEMORY: Final = Path("/dev/shm")


class Pages:
    """The pages of one node; see the module."""

    def __init__(self, clock: Clock = SYSTEM, root: Path | None = None) -> None:
        self._clock = clock
        self._folder = _folder((_SHARED_MEMORY, None) if root is None else (root,))
        self.directory = self._folder.path if self._folder is not None else None
        self._lock = threading.RLock()
        self._readers: dict[Path, PageReader] = {}
        self._last: dict[Path, Reading] = {}
        self._ended: dict[int, Reading] = {}
        """The last worker that was buried of each local rank."""
        self._nonfinite: dict[int, int] = {}
        self._closed = False
        self.sent_off = set[int]()
        """Workers that an operator had leave, so that others are started."""
        self.accounts = TimeAccounting(clock.monotonic())
        self.reached = 0
        """The newest step that a worker of this node has committed."""

    def living(self) -> list[Reading]:
        """The workers that live, by local rank."""
        with self._lock:
            if self._closed:
                return []
            now = self._clock.monotonic()
            living = [reading for reading in map(self._read, self._paths()) if reading is not None]
            for reading in [each for each in living if not each.is_alive]:
                living.remove(reading)
                self._bury(reading, now)
            self.accounts.book(living, now)
            self.reached = max([self.reached, *(each.pulse.step for each in living)])
            return sorted(living, key=lambda each: each.local_rank)

    def glance(self) -> list[Reading]:
        """The pages that the last look found, as they are now: cheap enough for many times a second."""
        with self._lock:
            return [reading for reader in self._readers.values() if (reading := reader.read()) is not None]

    def counters(self) -> dict[str, float]:
        """What this node's workers have counted, dead ones too."""
        with self._lock:
            now = self._clock.monotonic()  # before the reading: a phase that ends meanwhile is not shown too long
            return self.accounts.total(self.living(), now)

    def position_of(self, pid: int) -> tuple[int, int] | None:
        """The round that the worker ``pid`` is in, and the step of the state that it holds; it may be dead.

        None where it has no page, or has committed no step.
        """
        reading = self.last(pid)
        return (reading.pulse.round, reading.pulse.step) if reading is not None and reading.pulse.step else None

    def reading(self, pid: int) -> Reading | None:
        """The page of the worker ``pid``, if that lives and has one."""
        return next((each for each in self.living() if each.pid == pid), None)

    def last(self, pid: int) -> Reading | None:
        """The last page of the worker ``pid``, which may have ended."""
        return next((each for each in self._known() if each.pid == pid), None)

    def path_of(self, pid: int) -> Path | None:
        """Where the page of the worker ``pid`` is, if that lives and has one."""
        reading = self.reading(pid)
        return reading.path if reading is not None else None

    def came_to(self, number: int) -> Identity | None:
        """How far the workers that were in round ``number`` came; None where none has a step."""
        found = [each for each in self._known() if each.pulse.round == number]
        last = max(found, key=lambda each: each.pulse.step, default=None)
        if last is None or not last.pulse.step:
            return None
        pulse, left = last.pulse, int(last.notes.get("length", 0)) - last.pulse.used
        batch = max(0, min(int(last.notes.get("batch", 0)), left))
        return Identity(round=number, step=pulse.step, epoch=pulse.epoch, samples=pulse.used, batch=batch)

    def lost_peers(self, pids: Collection[int]) -> bool:
        """Whether each of the dead processes ``pids`` has noted that it ended for the loss of a peer."""
        noted = {each.pid for each in self._known() if each.notes.get("lost_peer")}
        return noted.issuperset(pids)

    def restarted(self, pids: Collection[int]) -> bool:
        """Whether each of the dead processes ``pids`` was sent off, or has noted that it ended, for an operator's
        restart."""
        noted = {each.pid for each in self._known() if each.notes.get("restarted")}
        return bool(pids) and (noted | self.sent_off).issuperset(pids)

    def said(self) -> dict[int, str]:
        """The last line of the exception that ended a worker's Session, by process id."""
        return {each.pid: str(each.notes["error"]) for each in self._known() if each.notes.get("error")}

    def failed(self) -> list[Reading]:
        """The workers whose Session has ended by an exception, which they have noted; dead ones too."""
        return [each for each in self._known() if each.notes.get("fault")]

    def passed(self) -> bool:
        """Whether a worker's last Session has passed the end of its training, which all ranks pass together."""
        return any(each.notes.get("passed") and not each.notes.get("closed") for each in self._known())

    def ranks(self) -> dict[int, int]:
        """The rank that each worker has, or had when it died, by process id."""
        return {each.pid: each.pulse.rank for each in self._known()}

    def nonfinite_losses(self, reading: Reading) -> int:
        """Non-finite losses that the local rank of ``reading`` has found in all its lives."""
        with self._lock:
            return self._nonfinite.get(reading.local_rank, 0) + reading.pulse.nonfinite

    def employ(self, slots: int) -> None:
        with self._lock:
            self.accounts.employ(slots)

    def mode(self, phase: Phase) -> None:
        """What the agent does while a worker is missing."""
        with self._lock:
            self.accounts.mode(phase, self._clock.monotonic())

    def count_event(self, name: str, amount: float = 1.0) -> None:
        with self._lock:
            self.accounts.add(name, amount)

    def close(self) -> None:
        """Take the last counts, and remove the directory."""
        with self._lock:
            if self._closed:
                return
            now = self._clock.monotonic()
            for reading in self.living():
                self._bury(reading, now)
            self.accounts.close(now)
            self._closed = True
            if self._folder is not None:
                self._folder.close()

    def _known(self) -> Sequence[Reading]:
        """The workers that live, then the last that was buried of each local rank, also by this look."""
        with self._lock:
            return *self.living(), *self._ended.values()

    def _paths(self) -> list[Path]:
        if self.directory is not None:
            with contextlib.suppress(OSError):
                return list(self.directory.glob("*.page"))
        return []

    def _read(self, path: Path) -> Reading | None:
        """The page; as it was last time, if its worker died while it wrote."""
        reader = self._readers.get(path)
        if reader is None:
            try:
                reader = self._readers[path] = PageReader(path)
            except (OSError, ValueError):
                return None  # it is just being made
        reading = reader.read()
        if reading is not None:
            self._last[path] = reading
        return self._last.get(path)

    def _bury(self, reading: Reading, now: float) -> None:
        self.accounts.bury(reading, now)
        slot = reading.local_rank
        self._ended[slot] = replace(reading, crash=crash_of(reading.path))
        self._nonfinite[slot] = self._nonfinite.get(slot, 0) + reading.pulse.nonfinite
        self.reached = max(self.reached, reading.pulse.step)
        reader = self._readers.pop(reading.path, None)
        if reader is not None:
            reader.close()
        self._last.pop(reading.path, None)
        for path in map(reading.path.with_suffix, (".page", ".stacks", SAVE_SUFFIX, ORDER_SUFFIX)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _folder(parents: Sequence[Path | None]) -> PrivateFolder | None:
    """A folder in the first of ``parents`` where one can be made (None: that for temporary files).

    Shared memory comes first: on a disk each write of a page would be written back some time.
    """
    for parent in parents:
        try:
            return PrivateFolder(_PREFIX, parent)
        except OSError as error:
            logger().warning("pages.unavailable", place=str(parent or "temporary"), error=str(error))
    return None


# ---- how the workers spent their time


HELD_BACK_S: Final = 60.0
"""A slot that has been empty for longer holds a worker that never has a page: a script without a Session."""


class TimeAccounting:
    """How this node spent its time, and what its workers have counted, over all their lives.

    Each local rank is a slot. While a worker is in it, the slot's time is the worker's, from its page; in between it is
    the agent's: gathering nodes, or starting a worker. A gap is booked when the next worker has a page, since its life
    began before that; so every second is booked once, and no sum ever becomes smaller. Under the lock of the pages;
    ``now`` is monotonic everywhere.
    """

    def __init__(self, now: float) -> None:
        self.counters: dict[str, float] = {f"seconds.{phase}": 0.0 for phase in Phase}
        """Of workers that are gone, and of gaps."""
        self._began = now
        self._booked_to: dict[int, float] = {}
        """Up to when the time of each empty slot is booked."""
        self._occupied: dict[int, int] = {}
        """The worker (process id) in each slot."""
        self._ahead: dict[int, float] = {}
        """Seconds of each worker's start that were booked before it was there (by process id)."""
        self._shown: dict[str, float] = {}
        """What :meth:`total` has returned last."""
        self._modes: list[tuple[float, Phase]] = [(now, Phase.WAITING)]
        """What the agent has done since when, as far as gaps may still ask."""

    def employ(self, slots: int) -> None:
        for slot in range(slots):
            if slot not in self._occupied:
                self._booked_to.setdefault(slot, self._began)

    def mode(self, phase: Phase, now: float) -> None:
        """From now on empty slots are empty because of this."""
        self._modes.append((now, phase))

    def book(self, living: Iterable[Reading], now: float) -> None:
        """Book the gaps that have ended, and those that nobody will end."""
        for reading in living:
            if self._occupied.get(reading.local_rank) != reading.pid:
                self._occupied[reading.local_rank] = reading.pid
                self._book_gap(reading.local_rank, reading.born_at)
                booked_to = self._booked_to.pop(reading.local_rank, reading.born_at)
                self._ahead.setdefault(reading.pid, max(0.0, booked_to - reading.born_at))
        for slot in list(self._booked_to):
            self._book_gap(slot, now - HELD_BACK_S, unseen=True)
        booked_to = min(self._booked_to.values(), default=now - HELD_BACK_S)
        while len(self._modes) > 1 and self._modes[1][0] <= booked_to:
            del self._modes[0]

    def bury(self, reading: Reading, now: float) -> None:
        """A worker is gone: what it counted is kept."""
        for phase, seconds in self._unbooked(reading.pid, reading.last_seconds(now)).items():
            self.add(f"seconds.{phase}", seconds)
        self._ahead.pop(reading.pid, None)
        for name, value in counted(reading).items():
            self.add(name, value)
        self._occupied.pop(reading.local_rank, None)
        self._booked_to[reading.local_rank] = now

    def close(self, now: float) -> None:
        """The node leaves: empty slots are booked to the end."""
        for slot in self._booked_to:
            self._book_gap(slot, now)

    def total(self, living: Iterable[Reading], now: float) -> dict[str, float]:
        """All counters of the node, with those of the workers that live. None is ever less than it was.

        (A worker ends a phase a moment before its page says so; until then the phase is shown that moment too long.)
        """
        total = dict(self.counters)
        for reading in living:
            for phase, seconds in self._unbooked(reading.pid, reading.seconds(now)).items():
                total[f"seconds.{phase}"] += seconds
            for name, value in counted(reading).items():
                total[name] = total.get(name, 0.0) + value
        self._shown = {name: max(value, self._shown.get(name, 0.0)) for name, value in total.items()}
        return dict(self._shown)

    def _unbooked(self, pid: int, seconds: dict[Phase, float]) -> dict[Phase, float]:
        """``seconds`` of worker ``pid`` without those that were booked before it had a page."""
        seconds[Phase.STARTING] = max(0.0, seconds[Phase.STARTING] - self._ahead.get(pid, 0.0))
        return seconds

    def _book_gap(self, slot: int, until: float, *, unseen: bool = False) -> None:
        begin = self._booked_to.get(slot, until)
        if until <= begin:
            return
        self._booked_to[slot] = until
        for index, (since, phase) in enumerate(self._modes):
            end = self._modes[index + 1][0] if index + 1 < len(self._modes) else until
            seconds = min(end, until) - max(since, begin)
            if seconds > 0.0:
                # A worker that runs without a page is one of a script without a Session: it trains, most likely.
                self.add(f"seconds.{Phase.TRAINING if unseen and phase is Phase.STARTING else phase}", seconds)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Count ``amount`` more of ``name``."""
        self.counters[name] = self.counters.get(name, 0.0) + amount


def counted(reading: Reading) -> dict[str, float]:
    """What one worker has counted, without its seconds."""
    pulse = reading.pulse
    counts = {str(name): float(value) for name, value in reading.notes.get("counts", {}).items()}
    return {
        "samples": float(pulse.samples),
        "steps": float(pulse.steps),
        "nonfinite_steps": float(pulse.nonfinite),
        **counts,
    }
