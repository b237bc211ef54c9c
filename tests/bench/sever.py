"""Ranks blocked in gloo by a frozen peer: how long until they are free once the agent has said that the round is over.

Three real workers train in place. In each cycle one is frozen (SIGSTOP) at a random moment, the others block in a
collective with it, and are told that the round is over; then the frozen one goes on, hears it too, and all three form
the next round.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.ipc.channel import Over
from tests.bench.report import Report, at_most, at_most_time, emit, note, parse
from tests.drills.inplace.leading import Lead, Worker, leading

CYCLES, QUICK_CYCLES = 1000, 12
STUCK_S = 5.0
SLOW_S = 0.05
BLOCKED_AFTER_S = 0.05
WORKLOADS = (("4 MB in small buckets", 4.0, 0.25), ("64 MB in large buckets", 64.0, 25.0))
"""Megabytes of gradients and of each bucket: many small messages, and some that fill the sockets' buffers."""


@dataclass(slots=True)
class Severed:
    """What came of all cycles: seconds from the agent's word to freedom, of each rank that became free by it."""

    cycles: int = 0
    seconds: list[float] = field(default_factory=list)
    stuck: int = 0
    growth: dict[str, tuple[int, int]] = field(default_factory=dict)

    def quantile_ms(self, part: float) -> float:
        """So much of the ranks were free within these milliseconds."""
        return 1e3 * float(np.quantile(self.seconds, part)) if self.seconds else float("nan")

    def as_json(self) -> dict[str, Any]:
        return {
            "cycles": self.cycles,
            "free_ms": {name: self.quantile_ms(part) for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
            "slower_than_50_ms": self.stuck + sum(each > SLOW_S for each in self.seconds),
            "stuck_longer_than_5_s": self.stuck,
            "held_early_and_late": self.growth,
        }


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("sever", __doc__, argv, repeats=1, extend=_own_options)
    cycles = options.extra.cycles or (QUICK_CYCLES if options.quick else CYCLES)
    found: dict[str, Severed] = {}
    for name, megabytes, bucket_mb in WORKLOADS[:1] if options.quick else WORKLOADS:
        note(f"{name}: {cycles} cycles")
        with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place, leading(Path(place)) as lead:
            found[name] = sever(lead, cycles, megabytes, bucket_mb)
    figures = {name: each.as_json() for name, each in found.items()}
    ranks = sum(2 * each.cycles for each in found.values())
    musts = [
        at_most(f"ranks of {ranks} never freed", sum(each.stuck for each in found.values()), 0),
        at_most_time(
            "free after the agent's word, 99 % within, ms", max(e.quantile_ms(0.99) for e in found.values()), 50.0
        ),
    ]
    return emit(Report(options, figures, musts))


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cycles", type=int, help=f"freezes ({CYCLES}; quick: {QUICK_CYCLES})")


class Notes:
    """What one worker wrote about its rounds, read on as it comes."""

    def __init__(self, worker: Worker) -> None:
        self._path = worker.log.with_suffix(".rounds")
        self._read = 0
        self.rounds: list[dict[str, Any]] = []

    def reach(self, count: int) -> bool:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                *complete, _ = file.read().split(b"\n")
            self._read += sum(len(line) + 1 for line in complete)
            self.rounds += map(json.loads, complete)
        return len(self.rounds) >= count


class Trial:
    """Three workers that are frozen in turn."""

    def __init__(self, lead: Lead, *job: float, stuck_s: float = STUCK_S) -> None:
        self._lead, self._stuck_s = lead, stuck_s
        self.workers = [lead.start(name, "lasting.py", *job) for name in "abc"]
        self.notes = {worker.name: Notes(worker) for worker in self.workers}
        self.result = Severed()

    def form(self) -> None:
        number = self._lead.form(self.workers)
        for worker in self.workers:
            self._lead.wait(lambda worker=worker: self.notes[worker.name].reach(number), f"{worker.name} at work")  # type: ignore[misc]

    def freeze(self, victim: Worker) -> None:
        """One cycle: the others are to be free while ``victim`` is frozen."""
        others = [worker for worker in self.workers if worker is not victim]
        victim.signal(signal.SIGSTOP)
        try:
            pause(BLOCKED_AFTER_S)
            word = time.monotonic()
            for worker in others:
                worker.tell(Over(number=self._lead.number, reason=f"{victim.name} is frozen"))
            free = [self._becomes_free(worker) for worker in others]
        finally:
            victim.signal(signal.SIGCONT)
        victim.tell(Over(number=self._lead.number, reason="you were frozen"))
        self.result.cycles += 1
        self.form()
        for worker, freed in zip(others, free, strict=True):
            if freed:
                self.result.seconds.append(max(0.0, self.notes[worker.name].rounds[-1]["freed"] - word))
            else:
                self.result.stuck += 1

    def _becomes_free(self, worker: Worker) -> bool:
        deadline = Deadline.after(self._stuck_s)
        with self._lead.changed:
            while not worker.readiness(self._lead.number + 1):
                if deadline.expired:
                    return False
                self._lead.changed.wait(0.05)
        return True


def sever(lead: Lead, cycles: int, megabytes: float, bucket_mb: float) -> Severed:
    chance, trial = random.Random(1), Trial(lead, megabytes, bucket_mb)
    trial.form()
    for cycle in range(cycles):
        pause(chance.random() * 0.05)
        trial.freeze(trial.workers[cycle % 3])
        if cycle % 100 == 99:
            found = trial.result
            note(
                f"{cycle + 1}: p50 {found.quantile_ms(0.5):.1f}, max {found.quantile_ms(1):.1f} ms, {found.stuck} stuck"
            )
    rounds = trial.notes["a"].rounds
    for name in ("descriptors", "threads", "bytes"):
        trial.result.growth[name] = (rounds[min(2, len(rounds) - 1)][name], rounds[-1][name])
    return trial.result


if __name__ == "__main__":
    sys.exit(main())
