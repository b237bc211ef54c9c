"""Verdicts on labelled faults: how many are right, and how long after an incident's end each is there.

Each fault of all sets strikes a job of real nodes, one after the other, in one etcd. ``right`` means the culprit, its
node and what to do. Faults that need hosts of their own (root, ``ip``) are left out elsewhere.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic_trainer.local.etcd import EtcdServer
from tests.bench.report import Report, at_least, at_most_time, emit, median, note, parse
from tests.drills.verdicts.faults import FAULTS, Labelled
from tests.drills.verdicts.fifth import FIFTH
from tests.drills.verdicts.fourth import FOURTH
from tests.drills.verdicts.other import OTHER
from tests.drills.verdicts.striking import KERNEL, play
from tests.drills.verdicts.third import THIRD
from tests.support.networks import AnySegment

NEED_HOSTS = (*KERNEL, "part_newcomer", "part_for_a_while", "power_off", "trace_worker")
QUICK = ("a shape", "a bad row")
SETS = {"first": FAULTS, "second": OTHER, "third": THIRD, "fourth": FOURTH, "fifth": FIFTH}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("verdicts", __doc__, argv, repeats=1)
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        hosts = os.geteuid() == 0
        if hosts:
            stack.enter_context(AnySegment())
        etcd = stack.enter_context(EtcdServer())
        for name, faults in SETS.items():
            chosen = [each for each in faults if hosts or each.act not in NEED_HOSTS]
            if options.quick:
                chosen = [each for each in chosen if each.name in QUICK and each.on == "n1" and not each.restart]
            figures[name] = _played(name, chosen, etcd.endpoint)
    both = [each for each in figures.values() if each["faults"]]
    musts = [
        at_least(f"right, {name} set", each["right"] / each["faults"], 0.95)
        for name, each in figures.items()
        if each["faults"]
    ]
    musts += [at_most_time("seconds to a verdict, median", max(each["verdict_s"] for each in both), 2.0)]
    return emit(Report(options, figures, musts))


def _played(name: str, faults: Sequence[Labelled], endpoint: str) -> dict[str, Any]:
    wrong: dict[str, str] = {}
    times: list[float] = []
    for number, fault in enumerate(faults):
        note(f"{name} set, {number + 1} of {len(faults)}: {fault.kind}: {fault.name}")
        with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place:
            try:
                found = play(fault, Path(place), endpoint, f"{name}-{number}-{os.getpid()}")
            except AssertionError as error:
                wrong[f"{fault.kind}: {fault.name}"] = str(error).partition("\n")[0][:200]
                continue
        if mistakes := found.mistakes(fault):
            wrong[f"{fault.kind}: {fault.name}"] = "; ".join(mistakes)
        if found.verdict_s is not None:
            times.append(found.verdict_s)
    return {
        "faults": len(faults),
        "kinds": len({each.kind for each in faults}),
        "right": len(faults) - len(wrong),
        "wrong": wrong,
        "verdict_s": median(times) if times else 0.0,
        "verdict_s, most": max(times, default=0.0),
        "verdicts within 2 s": sum(each <= 2.0 for each in times) / len(times) if times else 1.0,
    }


if __name__ == "__main__":
    raise SystemExit(main())
