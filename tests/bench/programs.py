"""Other people's programs, unchanged: a node joins, a worker and a node are killed, under etcd3 and torchrun's c10d.

Each program runs on two nodes of this machine, with a tiny model and data made on the spot, in restart mode, in place
where an integration offers it (the script's twin with a session), and under c10d with its timeouts tuned. The report
has, for each fault, whether training went on, the seconds from the fault to the survivors' next step, how many steps
were made again, and if it did not go on, the exit codes and why. A program that cannot run here is named with the
reason and counts nowhere: sources that no package has are looked for in ``--sources DIRECTORY/<program>/``.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from elastic_trainer.local.etcd import EtcdServer
from tests.bench.programs_known import PROGRAMS, STANDINS, Program, chosen
from tests.bench.recovery import LIMIT_S, columns, kill_series
from tests.bench.recovery_jobs import Column, Cost, Job, join, kill_node, kill_worker, start
from tests.bench.report import Must, Report, alternate, at_least, at_most_time, emit, median, note, parse
from tests.support.plainjob import Step

NODES = 2
KILLS = 10
PYTHONPATH = os.pathsep.join([str(STANDINS), str(Path(__file__).parents[2])])
WARM_S = {"ddp": 0.7, "transformers": 1.5}
"""Promised of a warm restart: the median from a worker's SIGKILL to the survivors' next step."""
FAULTS: Mapping[str, Callable[[Job, float], Cost]] = {
    "node_join": join,
    "worker_kill": lambda job, limit_s: kill_worker(job, "n1", limit_s),
    "node_kill": lambda job, limit_s: kill_node(job, "n1", limit_s),
}
_COMPLAINT = re.compile(r"(?:^|: )((?:[\w.]*(?:Error|Exception)|elastic-trainer): .+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault did to a program. ``repeated`` steps were made before it, and again after it.

    None: its steps change no parameter, so they cannot be told apart.
    """

    seconds: float
    repeated: int | None = None
    exit_codes: Mapping[str, int | None] = field(default_factory=dict)
    """By node; None for one that still runs."""
    why: str = ""

    @property
    def went_on(self) -> bool:
        """Whether there was a next step."""
        return math.isfinite(self.seconds)

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        if self.went_on:
            return {"went_on": True, "seconds": self.seconds, "steps_repeated": self.repeated}
        return {"went_on": False, "exit_codes": self.exit_codes, "why": self.why}


@dataclass(frozen=True, slots=True)
class ProgramColumn(Column):
    """A program launched in one way, on one or two nodes."""

    program: Program = PROGRAMS[0]
    sources: Path | None = None

    def job(self, place: Path) -> Job:
        """A job in a working directory of its own; nothing runs yet."""
        return ProgramJob(self, place)


class ProgramJob(Job):
    """The nodes of ``column``; they work in ``work`` below the job's directory."""

    def __init__(self, column: ProgramColumn, place: Path) -> None:
        super().__init__(column, place, least=1, most=NODES)
        program, work = column.program, self.spec.directory / "work"
        work.mkdir()
        if not column.in_place:
            program.place(work, column.sources)
        watched = {"BENCH_STEPS": str(self.spec.directory), "BENCH_WORK": str(work), "PYTHONPATH": PYTHONPATH}
        self.spec = replace(
            self.spec,
            entry=program.words_in_place(work) if column.in_place else program.words(work),
            environment={**self.spec.environment, **program.environment, **watched},
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = parse("programs", __doc__, argv, repeats=1, extend=_own_options)
    given: argparse.Namespace = options.extra
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    programs = chosen(given.programs or (["ddp"] if options.quick else []))
    absent = {program.name: reason for program in programs if (reason := program.missing(given.sources))}
    found: dict[str, dict[str, list[dict[str, Outcome]]]] = {}
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as text, EtcdServer() as etcd:
        place = Path(text)
        for program in (each for each in programs if each.name not in absent):
            ways = launched(program, given.sources, etcd.endpoint)[: 1 if options.quick else None]
            found[program.name] = alternate(
                {way.name: partial(suffer, way, place, list(FAULTS), given.limit) for way in ways},
                options.repeats,
            )
            if program.name in WARM_S and not options.quick:
                series = kill_series(ways[0], place, given.kills, given.limit, NODES)
                rows[program.name] = [cost.seconds for cost in series]
    figures = {
        "programs": {
            name: {
                way: [{fault: each.as_json() for fault, each in turn.items()} for turn in turns]
                for way, turns in by_way.items()
            }
            for name, by_way in found.items()
        },
        "not_run": absent,
        "worker_kills_in_a_row_s": rows,
    }
    return emit(Report(options, figures, musts(found, rows)))


def _own_options(parser: argparse.ArgumentParser) -> None:
    known = [program.name for program in PROGRAMS]
    parser.add_argument("--programs", nargs="+", choices=known, metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--sources", type=Path, help="the folder with the sources that no package has")
    parser.add_argument("--kills", type=int, default=KILLS, help=f"workers killed in a row ({KILLS})")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds after which a job is lost ({LIMIT_S:g})")


def launched(program: Program, sources: Path | None, endpoint: str) -> list[ProgramColumn]:
    """The ways to launch ``program``; restart mode under etcd3 comes first."""
    return [
        ProgramColumn(
            way.name,
            way.backend,
            way.endpoint,
            way.options,
            way.environment,
            in_place=way.in_place,
            program=program,
            sources=sources,
        )
        for way in columns(endpoint).values()
        if program.in_place or not way.in_place
    ]


def suffer(column: Column, place: Path, faults: Sequence[str], limit_s: float) -> dict[str, Outcome]:
    """The faults in their order: on one job as long as it goes on, then on a fresh one."""
    found: dict[str, Outcome] = {}
    while remaining := faults[len(found) :]:
        with column.job(place) as job:
            begun = outcome(job, partial(start, job, 1 if remaining[0] == "node_join" else NODES, limit_s))
            if not begun.went_on:
                return found | dict.fromkeys(remaining, replace(begun, why=f"did not start: {begun.why}"))
            for name in remaining:
                found[name] = outcome(job, partial(FAULTS[name], job, limit_s))
                note(f"  {column.name} {name}: {found[name].as_json()}")
                if not found[name].went_on:
                    break
    return found


def outcome(job: Job, act: Callable[[], Cost]) -> Outcome:
    """What ``act`` does to the job."""
    before = set(job.lives().values())
    seconds = act().seconds
    if not math.isfinite(seconds):
        codes = {node.name: node.exit_code() for node in job.nodes}
        return Outcome(seconds, exit_codes=codes, why=reason(job.log(node.name) for node in job.nodes))
    states = {line.split()[0] for line in (job.spec.directory / "states.txt").read_text().splitlines()}
    steps = [step for node in job.nodes for step in job.steps(node.name)]
    return Outcome(seconds, repeated(steps, before) if len(states) > 1 else None)


def repeated(steps: Sequence[Step], before: Collection[tuple[int, int]]) -> int:
    """How many steps of the lives ``before`` a fault the later lives made again."""
    former = [step for step in steps if (step.round, step.pid) in before]
    if not former:
        return 0
    newest = max(step.t for step in former)
    later = [step for step in steps if step.t > newest and (step.round, step.pid) not in before]
    first = min(later, key=lambda step: step.t)
    return max(step.step for step in former) - first.step + 1


def reason(logs: Iterable[str]) -> str:
    """The last complaint, of the program or of a launcher."""
    found = [complaint for log in logs for complaint in _COMPLAINT.findall(log)]
    return found[-1][:300] if found else "no step, and no error in the logs"


def musts(
    found: Mapping[str, Mapping[str, Sequence[Mapping[str, Outcome]]]], rows: Mapping[str, Sequence[float]]
) -> list[Must]:
    """What the project promises of other people's programs."""
    survived = [
        at_least(f"{name}, {way}: faults survived", sum(each.went_on for each in each_fault), len(each_fault))
        for name, by_way in found.items()
        for way, turns in by_way.items()
        if way.startswith("etcd3")
        for each_fault in [[each for turn in turns for each in turn.values()]]
    ]
    in_place = [
        at_most_time(
            f"{name}, in place: {fault} to the next step, s", median(each[fault].seconds for each in turns), 0.5
        )
        for name, by_way in found.items()
        for turns in [by_way.get("etcd3_in_place", ())]
        for fault in ("worker_kill", "node_kill")
        if turns
    ]
    warm = [
        at_most_time(f"{name}: median of workers killed in a row, s", median(row), WARM_S[name])
        for name, row in rows.items()
    ]
    return [*survived, *in_place, *warm]


if __name__ == "__main__":
    raise SystemExit(main())
