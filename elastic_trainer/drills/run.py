"""Play one drill from an empty directory to a verdict.

*Runs in* the main thread of the command or test.
*Owns* the directory, which is removed after a success unless it is to be kept; all processes are gone at the return.
*Fails by* ConfigError for a drill that cannot be played here; a drill that goes wrong is a report that is not ok.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.drills.checks import compared, round_problems, sample_problems, state_problems
from elastic_trainer.drills.harness import new_directory
from elastic_trainer.drills.job import Sharded
from elastic_trainer.drills.measure import Effect
from elastic_trainer.drills.report import Report
from elastic_trainer.drills.stage import Stage, staged
from elastic_trainer.drills.table import Drill, named
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.local.hosts import Segment, current, lacks
from elastic_trainer.local.interrupts import Interrupts

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """What to play. ``slack_s`` is what a recovery may take beyond its limit, on a machine that is busy."""

    name: str
    repeats: int = 1
    seconds: float = 60.0
    slack_s: float = 0.0
    directory: Path | None = None
    keep: bool = False


def run_drill(options: DrillOptions, say: Say = lambda _: None) -> Report:
    """Play it; ``say`` receives a line for each thing that happens."""
    drill = named(options.name)
    default = Path(tempfile.gettempdir()) / f"elastic-trainer-drill-{secrets.token_hex(4)}"
    directory = new_directory(default if options.directory is None else options.directory.absolute())
    with Interrupts() as interrupts, ExitStack() as stack:
        if current() is None and (lacking := lacks()) is None:
            stack.enter_context(Segment())
        elif current() is None:
            say(f"{drill.name}: nodes share this machine's network and processes: hosts of their own need {lacking}")
        effects, problems, points = _play(drill, options, directory, interrupts, say)
    report = Report(drill.name, tuple(effects), (*problems, *unmet(drill, options, effects)), points, directory)
    if report.ok and options.directory is None and not options.keep:
        shutil.rmtree(directory, ignore_errors=True)
    return report


def _play(
    drill: Drill,
    options: DrillOptions,
    directory: Path,
    interrupts: Interrupts,
    say: Say,
) -> tuple[list[Effect], list[str], int]:
    """The effects of all repeats, what was wrong, and at how many points the ranks' states were compared."""
    effects: list[Effect] = []
    try:
        with staged(drill.setting, directory, interrupts=interrupts) as stage:
            say(f"{drill.name}: {drill.summary}; {drill.setting.nodes} nodes start")
            try:
                for repeat in range(options.repeats):
                    effects.append(drill.act(stage, repeat, options.seconds))
                    say(f"{repeat + 1} of {options.repeats}: {effects[-1].what}")
                return effects, conclusions(stage), compared(stage.digests())
            except ElasticTrainerError as error:
                return effects, [str(error), *stage.log_tails()], 0
    except ElasticTrainerError as error:  # the stage itself: no etcd, no network
        return effects, [str(error)], 0


def conclusions(stage: Stage) -> list[str]:
    """End the job of ``stage``; everything that is wrong with what it leaves behind."""
    members = sorted(stage.settled().nodes)
    problems = stage.finish()
    digests = stage.digests()
    problems += sample_problems(stage.book.lines, stage.setting.samples)
    problems += state_problems(digests, members)
    problems += round_problems(stage.history)
    if not compared(digests) and stage.setting.sharded is not Sharded.JOB:  # which has one replica
        problems.append("the states of ranks were never compared")
    return problems


def unmet(drill: Drill, options: DrillOptions, effects: list[Effect]) -> list[str]:
    """What the single repeats did not keep to."""
    problems = []
    limit_s = drill.limit_s + options.slack_s if drill.limit_s is not None else None
    for number, effect in enumerate(effects, 1):
        problems += [f"repeat {number}: {problem}" for problem in effect.problems]
        if effect.steps_lost:
            problems.append(f"repeat {number}: survivors committed {effect.steps_lost} steps again")
        if limit_s is not None and effect.recovery_s > limit_s:
            problems.append(f"repeat {number}: recovery took {effect.recovery_s:.2f} s, more than {limit_s:g} s")
    return problems
