"""Simulation: how many random schedules of faults the protocol goes through an hour on one core, and whether it holds.

Each schedule is a run of its own on virtual time (see tests/simulation): nodes, workers, networks and etcd fail at
random, the invariants are checked at each event, and training has to go on when the faults are over. Seeds begin behind
those of the ordinary tests; a seed that breaks an invariant is in the report, and ``python -m tests.simulation SEED``
repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.bench.report import Report, at_most, at_most_time, emit, median, note, parse
from tests.simulation.invariants import Violation
from tests.simulation.world import play

SCHEDULES, QUICK_SCHEDULES = 2000, 40
FIRST_SEED = 1_000_000
LIMIT_MS = 36.0
"""100,000 schedules in an hour."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = parse("simulation", __doc__, argv, repeats=3, extend=_own_options)
    count = options.extra.schedules or (QUICK_SCHEDULES if options.quick else SCHEDULES)
    repeats = [_played(options.extra.seed + turn * count, count) for turn in range(options.repeats)]
    each_ms = median([repeat["cpu_s"] / count * 1e3 for repeat in repeats])
    broken = {seed: words for repeat in repeats for seed, words in repeat["broken"].items()}
    figures = {
        "schedules": count * options.repeats,
        "schedule_ms": each_ms,
        "schedules_per_s": 1e3 / each_ms,
        "schedules_per_hour": 3.6e6 / each_ms,
        "broken": broken,
        "repeats": repeats,
    }
    musts = [
        at_most_time("a schedule, ms of one core (100,000 an hour)", each_ms, LIMIT_MS),
        at_most("schedules that broke an invariant", len(broken), 0),
    ]
    return emit(Report(options, figures, musts))


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedules", type=int, help=f"in each repeat ({SCHEDULES}; quick: {QUICK_SCHEDULES})")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help=f"the first ({FIRST_SEED})")


def _played(first: int, count: int) -> dict[str, Any]:
    """The schedules from seed ``first`` on."""
    note(f"{count} schedules from seed {first}")
    faults: Counter[str] = Counter()
    broken: dict[int, str] = {}
    rounds = steps = 0
    began = time.process_time()
    for seed in range(first, first + count):
        try:
            counts = play(seed)
        except Violation as violation:
            broken[seed] = str(violation)
            note(f"seed {seed}: {violation.rule}")
            continue
        faults.update(counts.faults)
        rounds, steps = rounds + counts.rounds, steps + counts.steps
    cpu_s = time.process_time() - began
    return {"cpu_s": cpu_s, "rounds": rounds, "steps": steps, "faults": dict(faults), "broken": broken}


if __name__ == "__main__":
    sys.exit(main())
