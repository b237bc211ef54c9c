"""What a drill or a user's job came to: tables for people, JSON for programs.

*Runs in* the main thread of the command. *Owns* the ``summary.json`` that it writes: it appears whole or not at all.
*Fails by* StorageError when that cannot be written.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elastic_trainer.drills.measure import Effect, Recovery
from elastic_trainer.drills.user_job.summary import Summary
from elastic_trainer.errors import StorageError
from elastic_trainer.model import Phase
from elastic_trainer.wording import counted


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
        """Plain values."""
        return {
            "drill": self.drill,
            "repeats": [_plain(each) for each in self.repeats],
            "median": self.median(),
            "compared": self.compared,
            "problems": list(self.problems),
            "ok": self.ok,
        }


def _plain(effect: Effect) -> dict[str, Any]:
    return {
        "what": effect.what,
        "recovery_s": round(effect.recovery_s, 4),
        "gap_s": round(effect.gap_s, 4),
        "steps_lost": effect.steps_lost,
        **{name: round(value, 4) for name, value in effect.details.items()},
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
    console.print(_rounds(summary))
    if summary.faults:
        console.print(_faults(summary))
    console.print(_nodes(summary))
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


def _rounds(summary: Summary) -> Table:
    table = _table("Rounds", "round", "ranks", "nodes", "steps", "reason")
    for each in summary.rounds:
        steps = "none" if each.first_step is None else f"{each.first_step} to {each.last_step}"
        table.add_row(str(each.number), str(each.world), " ".join(each.nodes), steps, escape(each.reason))
    return table


def _faults(summary: Summary) -> Table:
    table = _table("Faults", "at step", "what", "recovery", "pause", "repeated", "back at")
    for each in summary.faults:
        table.add_row(str(each.step), escape(each.what), *_cells(each.recovery))
    return table


def _cells(found: Recovery | None) -> tuple[str, str, str, str]:
    if found is None:
        return "no later step", "-", "-", "-"
    back = f"step {found.step} of round {found.round}"
    return f"{found.recovery_s:.2f} s", f"{found.pause_s:.2f} s", counted(found.steps_repeated, "step"), back


def _nodes(summary: Summary) -> Table:
    table = _table("Nodes", "node", "how it ended")
    for each in summary.nodes:
        table.add_row(each.name, escape(each.why))
    return table
