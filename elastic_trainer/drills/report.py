"""What a drill found, for people and for programs.

*Runs in* the main thread of the command. *Owns* nothing. *Fails by* nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elastic_trainer.drills.measure import Effect
from elastic_trainer.local.wording import counted


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
    table = Table(title=f"Drill {report.drill}", title_justify="left", title_style="bold")
    for column in ("fault", "recovery", "gap of survivors", "steps lost", "also"):
        table.add_column(column)
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
        console.print(f"{'problem':>10}  {problem}", markup=False, highlight=False, soft_wrap=True)
    if report.ok:
        points = counted(report.compared, "point")
        verdict = f"samples exact, parameters equal on all ranks ({points}), survivors' processes went on"
    else:
        verdict = f"not ok; everything is kept in {report.directory}"
    console.print(f"{'verdict':>10}  {verdict}", markup=False, highlight=False, soft_wrap=True)
