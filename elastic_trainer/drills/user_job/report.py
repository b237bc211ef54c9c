"""Write a run's summary: tables for people, ``summary.json`` for programs.

*Runs in* the local cluster's process. *Owns* the file it writes. *Fails by* StorageError when it cannot be written.
*Invariant*: the file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elastic_trainer.drills.user_job.recovery import Recovery
from elastic_trainer.drills.user_job.summary import Summary
from elastic_trainer.errors import StorageError
from elastic_trainer.local.wording import counted
from elastic_trainer.model import Phase


def write(summary: Summary, path: Path) -> None:
    """Write ``summary`` as JSON to ``path``."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(summary.as_json(), indent=2) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", hint="choose another --run-dir") from error


def show(summary: Summary, console: Console) -> None:
    """Print ``summary`` as tables and a few sentences."""
    console.print(_rounds(summary))
    if summary.faults:
        console.print(_faults(summary))
    console.print(_nodes(summary))
    for name, text in facts(summary).items():
        console.print(f"{name:>10}  {text}", markup=False, highlight=False, soft_wrap=True)


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
