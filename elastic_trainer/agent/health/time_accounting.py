"""How this node spent its time, and what its workers have counted, over all their lives.

Each local rank is a slot. While a worker is in it, the slot's time is the worker's, from its page; in between it is
the agent's: gathering nodes, or starting a worker. A gap is booked when the next worker has a page, since its life
began before that; so every second is booked once, and no sum ever becomes smaller.

*Runs in* the agent, under the lock of its pages. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from elastic_trainer.ipc.page import Reading
from elastic_trainer.model import Phase

HELD_BACK_S: Final = 60.0
"""A slot that has been empty for longer holds a worker that never has a page: a script without a Session."""


class TimeAccounting:
    """See the module. ``now`` is monotonic everywhere."""

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

    def settle(self, living: Iterable[Reading], now: float) -> None:
        """Book the gaps that have ended, and those that nobody will end."""
        for reading in living:
            if self._occupied.get(reading.local_rank) != reading.pid:
                self._occupied[reading.local_rank] = reading.pid
                self._book_gap(reading.local_rank, reading.born_at)
                booked_to = self._booked_to.pop(reading.local_rank, reading.born_at)
                self._ahead.setdefault(reading.pid, max(0.0, booked_to - reading.born_at))
        for slot in list(self._booked_to):
            self._book_gap(slot, now - HELD_BACK_S, unseen=True)
        self._forget_modes(min(self._booked_to.values(), default=now - HELD_BACK_S))

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

    def _forget_modes(self, before: float) -> None:
        """All that is booked; but for what the agent did then."""
        while len(self._modes) > 1 and self._modes[1][0] <= before:
            del self._modes[0]

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
