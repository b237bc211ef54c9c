"""A compiled GPT in restart mode: a worker killed, a node joining, against the same script uncompiled, and under c10d.

Compiled twice: as torch does it, with a graph for each of DDP's buckets, and ``unsplit`` (see compile_job).

Two nodes on this machine, as root each on a host of its own, so that the second has compiled nothing. (Those of c10d,
whose workers do not find each other across such hosts, share this one: the second finds the first's caches.) Each
repeat and column: one node starts and compiles, another joins, its worker is killed several times. ``kill_s`` is from
the kill to the next step of the other node. First steps of processes: ``cold``, of the first node; ``joined``, with
what that one has published; ``warm``, after kills. On a busy machine their seconds of CPU say more.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.hosts import Segment, lacks
from tests.bench.recovery import SHARED_STORE_OFF, TUNED
from tests.bench.recovery_jobs import Column, Job, join, kill_worker, start
from tests.bench.report import Must, Report, alternate, at_most, emit, median, note, parse

SCRIPT = str(Path(__file__).with_name("compile_job.py"))
OPTIONS = {"ttl": "10", "last_call": "0.5", "join_interval": "0.2"}
KILLS = 3
START_LIMIT_S, LIMIT_S = 600.0, 180.0
"""After these a start, and a recovery, have failed: they count as infinite."""
QUIET_S = 15.0
"""Seconds of training before a fault: templates have imported and published what they will."""


@dataclass(frozen=True, slots=True)
class First:
    """What the first step of a process took, in seconds, and of CPU; and the CPU of all that came before it too."""

    seconds: float
    cpu_s: float
    life_cpu_s: float


NEVER = First(math.inf, math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Taken:
    """One job: seconds until its first step, until the joiner's, and from each kill to the next step; the first steps
    of the first node, of the joiner, and of the lives after kills."""

    start_s: float
    join_s: float
    kills_s: Sequence[float]
    cold: First
    joined: First
    warm: Sequence[First]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("compile", __doc__, argv, repeats=3, quick_repeats=1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with ExitStack() as ends:
        place = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="elastic-bench-")))
        if lacks() is None:
            ends.enter_context(Segment())
        etcd = ends.enter_context(EtcdServer())
        width = "32" if options.quick else "128"
        chosen = columns(etcd.endpoint, width, options.quick)
        kills, quiet_s = (1, 1.0) if options.quick else (KILLS, QUIET_S)
        calls = {name: partial(measure, each, place, kills, quiet_s) for name, each in chosen.items()}
        found = alternate(calls, options.repeats)
    medians = {name: summary(each) for name, each in found.items()}
    figures = {
        "hosts": lacks() is None,
        "width": int(width),
        "median_s": medians,
        "all": {name: [asdict(each) for each in taken] for name, taken in found.items()},
    }
    return emit(Report(options, figures, musts(medians)))


def columns(endpoint: str, width: str, quick: bool) -> dict[str, Column]:
    plain, compiled = (SCRIPT, width), (SCRIPT, width, "compiled")
    chosen = [
        Column("etcd3_plain", "etcd3", endpoint, OPTIONS, script=plain),
        Column("etcd3_compiled", "etcd3", endpoint, OPTIONS, script=compiled),
        Column("etcd3_unsplit", "etcd3", endpoint, OPTIONS, script=(SCRIPT, width, "unsplit")),
        Column("c10d_plain", "c10d", options=TUNED, environment=SHARED_STORE_OFF, script=plain),
        Column("c10d_compiled", "c10d", options=TUNED, environment=SHARED_STORE_OFF, script=compiled),
    ]
    return {each.name: each for each in (chosen[:2] if quick else chosen)}


def measure(column: Column, place: Path, kills: int, quiet_s: float) -> Taken:
    """One job from its first node to the last kill."""
    together = column.backend == "c10d"
    if together:
        column = replace(column, environment={**column.environment, "TMPDIR": tempfile.mkdtemp(dir=place)})
    with Job(column, place, least=1, most=2) as job:
        job.segment = None if together else job.segment
        begun = start(job, 1, START_LIMIT_S)
        cold = first_steps(job, "n0")
        if column.name in ("etcd3_compiled", "etcd3_unsplit"):
            await_published(job)
        pause(quiet_s)
        joined = join(job, LIMIT_S)
        joiner = first_steps(job, "n1")
        taken, lives = [], len(joiner)
        for _ in range(kills):
            pause(quiet_s)
            taken.append(kill_worker(job, "n1", LIMIT_S).seconds if math.isfinite(joined.seconds) else math.inf)
        warm = first_steps(job, "n1")[lives:]
    first, second = (each[0] if each else NEVER for each in (cold, joiner))
    done = Taken(begun.seconds, joined.seconds, taken, first, second, warm or [NEVER])
    note(f"  {column.name}: {done}")
    return done


def await_published(job: Job) -> None:
    deadline = Deadline.after(START_LIMIT_S)
    while "compile_cache.published" not in job.log("n0") and not deadline.expired:
        pause(0.1)


def first_steps(job: Job, node: str) -> list[First]:
    """Of each life of this node's worker."""
    path = job.spec.directory / f"{node}.first"
    lines = path.read_text().splitlines() if path.exists() else []
    return [First(*map(float, line.split())) for line in lines]


def summary(found: Sequence[Taken]) -> dict[str, float]:
    """Medians over all jobs, kills and lives."""
    lives = {
        "cold": [each.cold for each in found],
        "joined": [each.joined for each in found],
        "warm": [life for each in found for life in each.warm],
    }
    return {
        "start_s": median(each.start_s for each in found),
        "join_s": median(each.join_s for each in found),
        "kill_s": median(kill for each in found for kill in each.kills_s),
        **{f"{name}_first_step_s": median(each.seconds for each in them) for name, them in lives.items()},
        **{f"{name}_first_step_cpu_s": median(each.cpu_s for each in them) for name, them in lives.items()},
        **{f"{name}_life_cpu_s": median(each.life_cpu_s for each in them) for name, them in lives.items()},
    }


def musts(medians: Mapping[str, Mapping[str, float]]) -> list[Must]:
    plain, compiled = medians["etcd3_plain"], medians["etcd3_compiled"]
    found = [
        at_most("kill to next step, compiled over uncompiled", compiled["kill_s"] / plain["kill_s"], 1.2),
        at_most(
            "a joiner's first step over a cold one",
            compiled["joined_first_step_s"] / compiled["cold_first_step_s"],
            0.1,
        ),
    ]
    if "c10d_compiled" in medians:
        peer = medians["c10d_compiled"]
        found += [
            at_most("kill to next step, compiled: etcd3 over c10d", compiled["kill_s"] / peer["kill_s"], 1.0),
            at_most(
                "a joiner's first step: etcd3 over c10d",
                compiled["joined_first_step_s"] / peer["joined_first_step_s"],
                1.0,
            ),
        ]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
