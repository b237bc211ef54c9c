"""What a local run or a drill came to: the summary, the exit status, tables for people, JSON for programs.

*Runs in* the main thread of the command. *Owns* the ``summary.json`` that it writes: it appears whole or not at all.
*Fails by* StorageError when that cannot be written.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elastic_trainer.drills.faults import Fault, FaultKind, Injected
from elastic_trainer.drills.measure import Effect, Recovery, recovery
from elastic_trainer.errors import EXIT_FAILURE, EXIT_LEFT, StorageError
from elastic_trainer.local.ledger import Audit, Line, LineKind, audit, exit_text
from elastic_trainer.membership.documents import RoundDocument, goodput
from elastic_trainer.model import Phase
from elastic_trainer.wording import counted


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """One round as the ledger shows it. Steps are None where it committed none."""

    number: int
    world: int
    nodes: tuple[str, ...]
    first_step: int | None
    last_step: int | None
    reason: str
    """Why it ended, by the round document."""


@dataclass(frozen=True, slots=True)
class FaultSummary:
    """One fault that was carried out, and what it cost (None: the job never needed or found a later step)."""

    what: str
    node: str
    step: int
    t: float
    recovery: Recovery | None


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """How one node ended. ``struck`` nodes were killed on purpose and do not count for the exit status."""

    name: str
    exit_code: int | None
    struck: bool
    why: str
    """How it ended, and for a failure the last error in its log."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the command exits with, and why."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """All of it."""

    run: str
    entry: tuple[str, ...]
    duration_s: float
    rounds: tuple[RoundSummary, ...]
    nodes: tuple[NodeSummary, ...]
    faults: tuple[FaultSummary, ...]
    unmet: tuple[str, ...]
    audit: Audit
    checkpoints: int
    metrics: Mapping[str, float]
    """The last value of each metric."""
    loss: float | None
    """Of the last step, on rank 0."""
    verdict: Verdict
    goodput: float | None = None
    """The share of all rank seconds that went into new steps."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Rank seconds by phase (see model.Phase)."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, as written to ``summary.json``."""
        totals = {name: getattr(self.audit, name) for name in ("repeated", "missing", "unrecorded")}
        values = asdict(self)
        values["audit"] |= totals
        return values


@dataclass(frozen=True, slots=True)
class Ending:
    """How the cluster ended: exit codes of the nodes, faults that were not carried out, why it was stopped early."""

    exit_codes: Mapping[str, int | None]
    unmet: Sequence[Fault] = ()
    signal: int | None = None
    timed_out: bool = False
    errors: Mapping[str, str] = field(default_factory=dict)
    """The last error in the log of a node that failed."""


def summarize(
    run: str,
    entry: Sequence[str],
    duration_s: float,
    lines: Sequence[Line],
    documents: Mapping[int, RoundDocument],
    injected: Sequence[Injected],
    ending: Ending,
    counters: Mapping[str, float] | None = None,
) -> Summary:
    """Gather what is known at the end of a run; ``counters`` are those of all nodes (see membership.health)."""
    of_nodes = counters if counters is not None else {}
    struck = {each.node: each for each in injected if each.fault.kind is FaultKind.KILL_NODE}
    nodes = tuple(
        _node(name, code, struck.get(name), ending.errors.get(name, "")) for name, code in ending.exit_codes.items()
    )
    steps = [line for line in lines if line.event is LineKind.STEP]
    return Summary(
        run=run,
        entry=tuple(entry),
        duration_s=duration_s,
        rounds=rounds(lines, documents),
        nodes=nodes,
        faults=tuple(FaultSummary(str(each), each.node, each.step, each.t, recovery(each, lines)) for each in injected),
        unmet=tuple(map(str, ending.unmet)),
        audit=audit(lines),
        checkpoints=sum(line.event is LineKind.CHECKPOINT for line in lines),
        metrics={line.name: line.value for line in lines if line.name and line.value is not None},
        loss=next((line.loss for line in reversed(steps) if line.rank == 0 and line.loss is not None), None),
        verdict=verdict(
            nodes,
            ending,
            max((line.step for line in steps), default=0),
            entry,
            resumed=max((line.step for line in lines if line.event is LineKind.OPENED), default=None),
        ),
        goodput=goodput(of_nodes),
        seconds={str(phase): of_nodes.get(f"seconds.{phase}", 0.0) for phase in Phase} if of_nodes else {},
    )


def rounds(lines: Sequence[Line], documents: Mapping[int, RoundDocument]) -> tuple[RoundSummary, ...]:
    """The rounds that the ledger or the store knows, in order."""
    by_round: dict[int, list[Line]] = {number: [] for number in documents if documents[number].members}
    for line in lines:
        if line.event in (LineKind.OPENED, LineKind.STEP):
            by_round.setdefault(line.round, []).append(line)
    return tuple(_round(number, by_round[number], documents.get(number)) for number in sorted(by_round))


def _round(number: int, lines: Sequence[Line], document: RoundDocument | None) -> RoundSummary:
    steps = [line.step for line in lines if line.event is LineKind.STEP]
    members = {member.node for member in document.members} if document is not None else set()
    return RoundSummary(
        number=number,
        world=max([line.world for line in lines] or [document.world_size if document is not None else 0]),
        nodes=tuple(sorted(members or {line.node for line in lines})),
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        reason=document.reason if document is not None else "",
    )


def _node(name: str, exit_code: int | None, struck: Injected | None, error: str) -> NodeSummary:
    if struck is not None:
        why = f"killed on purpose at step {struck.step}"
    elif exit_code is None:
        why = "did not end"
    elif exit_code == EXIT_LEFT:
        why = f"left as it was asked to ({EXIT_LEFT})"
    else:
        why = exit_text(exit_code) + (f": {error}" if error else "")
    return NodeSummary(name, exit_code, struck is not None, why)


def verdict(
    nodes: Sequence[NodeSummary], ending: Ending, last_step: int, entry: Sequence[str], *, resumed: int | None
) -> Verdict:
    """The exit status: 0 only if every node that was not killed on purpose exited 0 and every fault happened.

    ``resumed``: the last step at which a rank began a life; None if the job opened no Session.
    """
    survivors = [node for node in nodes if not node.struck]
    failed = [node for node in survivors if node.exit_code != 0]
    if ending.signal is not None:
        return Verdict(128 + ending.signal, f"stopped by {signal.Signals(ending.signal).name}")
    if ending.timed_out:
        return Verdict(EXIT_FAILURE, "the job did not end within --timeout")
    if failed and all(node.exit_code == EXIT_LEFT for node in failed):
        return Verdict(EXIT_LEFT, "the run was stopped as it was asked to")
    if failed:
        code = failed[0].exit_code
        return Verdict(code if code is not None and 0 < code < 128 else EXIT_FAILURE, _failures(failed))
    if not survivors:
        return Verdict(EXIT_FAILURE, "no node survived")
    if ending.unmet and not last_step:
        what = " ".join(entry[: 2 if entry[0] == "-m" else 1])
        why = f"{what} opens no Session, so it has no steps"
        if resumed is not None:
            why = f"{what} made no step after step {resumed}; for a new run give it another checkpoint directory"
        return Verdict(EXIT_FAILURE, f"{ending.unmet[0]} never came: {why}")
    if ending.unmet:
        few = ": too few nodes trained, until the job was over"
        waited = (few * (fault.chooses and fault.step <= last_step) for fault in ending.unmet)
        told = (f"{fault} was never carried out{why}" for fault, why in zip(ending.unmet, waited, strict=True))
        return Verdict(EXIT_FAILURE, "; ".join(told))
    return Verdict(0, f"{counted(len(survivors), 'node')} finished the job")


def _failures(failed: Sequence[NodeSummary]) -> str:
    """Nodes that failed alike are named together."""
    alike: dict[str, list[str]] = {}
    for node in failed:
        alike.setdefault(node.why, []).append(node.name)
    return "; ".join(f"node{'s' * (len(names) > 1)} {' and '.join(names)} {why}" for why, names in alike.items())


# ---- drills


@dataclass(frozen=True, slots=True)
class Report:
    """The effects of all repeats and everything that was wrong; ``compared``: points at which ranks' states were."""

    drill: str
    repeats: tuple[Effect, ...]
    problems: tuple[str, ...]
    compared: int
    directory: Path

    @property
    def ok(self) -> bool:
        """Whether the job came through as it must."""
        return bool(self.repeats) and not self.problems

    def median(self) -> dict[str, float] | None:
        """The medians over the repeats; None without any."""
        if not self.repeats:
            return None
        return {
            "recovery_s": round(median(each.recovery_s for each in self.repeats), 4),
            "gap_s": round(median(each.gap_s for each in self.repeats), 4),
            "steps_lost": median(each.steps_lost for each in self.repeats),
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "drill": self.drill,
            "repeats": [
                {
                    "what": each.what,
                    "recovery_s": round(each.recovery_s, 4),
                    "gap_s": round(each.gap_s, 4),
                    "steps_lost": each.steps_lost,
                    **{name: round(value, 4) for name, value in each.details.items()},
                }
                for each in self.repeats
            ],
            "median": self.median(),
            "compared": self.compared,
            "problems": list(self.problems),
            "ok": self.ok,
        }


def show(report: Report, console: Console) -> None:
    """Print a table and the verdict."""
    table = _table(f"Drill {report.drill}", "fault", "recovery", "gap of survivors", "steps lost", "also")
    for each in report.repeats:
        also = ", ".join(f"{name} {value:.4g}" for name, value in each.details.items())
        times = f"{each.recovery_s:.3f} s", f"{each.gap_s:.3f} s"
        table.add_row(escape(each.what), *times, str(each.steps_lost), escape(also))
    middle = report.median()
    if middle is not None and len(report.repeats) > 1:
        times = f"{middle['recovery_s']:.3f} s", f"{middle['gap_s']:.3f} s"
        table.add_row("median", *times, f"{middle['steps_lost']:g}", "", style="bold")
    console.print(table)
    for problem in report.problems:
        say("problem", problem, console)
    if report.ok:
        points = counted(report.compared, "point")
        equal = f"parameters equal on all ranks ({points}), survivors' processes went on"
        verdict = f"samples exact, {equal if report.compared else 'nothing lost that was saved'}"
    else:
        verdict = f"not ok; everything is kept in {report.directory}"
    say("verdict", verdict, console)


def say(heading: str, text: str, console: Console) -> None:
    """One line below the tables."""
    console.print(f"{heading:>10}  {text}", markup=False, highlight=False, soft_wrap=True)


def write(summary: Summary, path: Path) -> None:
    """Write ``summary`` as JSON to ``path``."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(summary.as_json(), indent=2) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", hint="choose another --run-dir") from error


def show_summary(summary: Summary, console: Console) -> None:
    """Print ``summary`` as tables and a few sentences."""
    rounds = _table("Rounds", "round", "ranks", "nodes", "steps", "reason")
    for each in summary.rounds:
        steps = "none" if each.first_step is None else f"{each.first_step} to {each.last_step}"
        rounds.add_row(str(each.number), str(each.world), " ".join(each.nodes), steps, escape(each.reason))
    console.print(rounds)
    faults = _table("Faults", "at step", "what", "recovery", "pause", "repeated", "back at")
    for fault in summary.faults:
        cells, found = ("no later step", "-", "-", "-"), fault.recovery
        if found is not None:
            back = f"step {found.step} of round {found.round}"
            repeated = counted(found.steps_repeated, "step")
            cells = f"{found.recovery_s:.2f} s", f"{found.pause_s:.2f} s", repeated, back
        faults.add_row(str(fault.step), escape(fault.what), *cells)
    if summary.faults:
        console.print(faults)
    nodes = _table("Nodes", "node", "how it ended")
    for node in summary.nodes:
        nodes.add_row(node.name, escape(node.why))
    console.print(nodes)
    for name, text in facts(summary).items():
        say(name, text, console)


def facts(summary: Summary) -> dict[str, str]:
    """The sentences below the tables, by their heading."""
    audit = summary.audit
    rolled = f"{audit.steps_rolled_back} rolled back and repeated" if audit.steps_rolled_back else "none repeated"
    told = {"steps": f"{audit.steps} committed, {rolled}; {counted(summary.checkpoints, 'checkpoint')}"}
    told["data"] = ("exact: " if audit.exact else "NOT exact: " if audit.steps else "") + audit.reason
    if audit.unrecorded:
        told["data"] += f" ({audit.unrecorded} by count: their rank died before it could record them)"
    if summary.metrics or summary.loss is not None:
        values = {"training loss": summary.loss} if summary.loss is not None else {}
        told["result"] = ", ".join(f"{name} {value:.4g}" for name, value in {**values, **summary.metrics}.items())
    if summary.goodput is not None:
        spent = sorted(summary.seconds.items(), key=lambda each: -each[1])
        rest = ", ".join(f"{phase} {s:.1f} s" for phase, s in spent if phase != Phase.TRAINING and s >= 0.05)
        total = sum(summary.seconds.values())
        told["goodput"] = f"{summary.goodput:.0%} of {total:.1f} rank seconds; the rest: {rest or 'nothing'}"
    told["exit"] = f"{summary.verdict.exit_code} after {summary.duration_s:.1f} s: {summary.verdict.reason}"
    return told


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column)
    return table
