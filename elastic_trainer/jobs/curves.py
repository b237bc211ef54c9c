"""Draws a run from ``steps.jsonl``: the course of the loss, evaluations, and each change of the ranks.

*Fails by* ConfigError for a directory that holds no run, or nothing to show yet, and where matplotlib is not installed
or the file's name has no known ending; StorageError. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.jobs.files import STEPS_FILE

_PLANNED_WORDS = (" join", " leave", " drain")


@dataclass(frozen=True, slots=True)
class Change:
    """From ``step`` on there were ``world_size`` ranks; ``before``: how many until then, None at the beginning."""

    step: int
    round: int
    world_size: int
    before: int | None
    reason: str

    @property
    def begins(self) -> bool:
        """Whether this is the beginning of a life of the run rather than a change in one."""
        return self.before is None

    @property
    def planned(self) -> bool:
        """Whether it was agreed on, rather than forced by a failure."""
        return self.begins or any(word in f" {self.reason}" for word in _PLANNED_WORDS)

    @property
    def label(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        if self.before is not None and self.before != self.world_size:
            ranks = f"{self.before} to {ranks}"
        return f"round {self.round}{': ' * bool(self.reason)}{self.reason} ({ranks})"


@dataclass(slots=True)
class TrainingCurves:
    """Points by step, in the order of the steps; of a step that was done twice the later one."""

    losses: dict[int, float] = field(default_factory=dict)
    repeated: list[list[tuple[int, float]]] = field(default_factory=list)
    """Losses of steps that a fall back to a checkpoint has made void, a list for each."""
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    worlds: dict[int, int] = field(default_factory=dict)
    """The number of ranks, by the first step with it."""


def read_curves(directory: Path) -> TrainingCurves:
    """The curves of the run in ``directory``."""
    path = directory / STEPS_FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError as error:
        hint = "name the checkpoint.directory of a job; a script with a Session writes one with RunLog(session, DIR)"
        raise ConfigError(f"{directory} holds no {STEPS_FILE}", hint=hint) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", hint="check the path") from error
    curves = curves_of(lines)
    if not curves.losses and not curves.evaluations:
        raise ConfigError(f"{path}: nothing to draw yet", hint="wait for the first steps")
    return curves


def curves_of(lines: Iterable[str]) -> TrainingCurves:
    """The curves in the ``lines`` of a log; what is no line of it is passed over.

    So is what a rank 0 that was cut off, or stood still, has written of its round after another had taken over.
    """
    curves = TrainingCurves()
    present = 0
    for record in filter(None, map(_parsed, lines)):
        told_in = record.get("round", present)
        if record["kind"] == "round":
            present = told_in
        elif told_in < present:
            continue
        _fall_back(curves, record["step"])
        if record["kind"] == "loss" and _is_number(record.get("loss")):
            curves.losses[record["step"]] = float(record["loss"])
        elif record["kind"] == "evaluation" and isinstance(record.get("metrics"), dict):
            for name, value in record["metrics"].items():
                if _is_number(value):
                    curves.evaluations.setdefault(str(name), {})[record["step"]] = float(value)
        elif record["kind"] == "round" and isinstance(world := record.get("world_size"), int):
            before = curves.changes[-1].world_size if curves.changes else None
            reason = str(record.get("reason", ""))
            curves.changes.append(Change(record["step"], record.get("round", 0), world, before, reason))
            curves.worlds[record["step"]] = world
    return curves


def _fall_back(curves: TrainingCurves, step: int) -> None:
    """The run stands at ``step``: what it did behind that before does not count."""
    void = [(each, curves.losses[each]) for each in _behind(curves.losses, step)]
    if void:
        curves.repeated.append(void)
    every: list[dict[int, Any]] = [curves.losses, curves.worlds, *curves.evaluations.values()]
    for points in every:
        for each in _behind(points, step):
            del points[each]


def _behind(points: dict[int, Any], step: int) -> list[int]:
    """The steps behind ``step``. Points lie in order, so a look at the last one is enough nearly always."""
    return list(takewhile(lambda each: each > step, reversed(points)))[::-1]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "kind" not in record:
        return None
    return record if isinstance(record.get("step"), int) and isinstance(record.get("round", 0), int) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


ENDINGS = (".png", ".svg", ".pdf")
FAULT, _PLANNED, LINE, _VOID = "#c0392b", "#2471a3", "#1c2833", "#aeb6bf"
_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0}
_MOST_NAMED = 12
"""More changes than that are drawn without words."""


def check_drawable(output: Path) -> None:
    """ConfigError unless ``output`` can be drawn here."""
    if output.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--output {output}: not {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}", hint="say for one")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "drawing needs the package matplotlib, which is not installed", hint="pip install 'elastic-trainer[plot]'"
        )


def draw(curves: TrainingCurves, title: str, output: Path) -> None:
    """Draw ``curves`` into ``output``."""
    from matplotlib.figure import Figure

    rows = 2 + bool(curves.evaluations)
    figure = Figure(figsize=(10, 2.2 + 2.2 * rows), layout="constrained")
    heights = [3.0, 2.0, 1.2] if rows == 3 else [3.0, 1.2]
    axes = list(figure.subplots(rows, 1, sharex=True, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0])
    figure.suptitle(title)
    _losses(axes[0], curves)
    if curves.evaluations:
        for name, points in sorted(curves.evaluations.items()):
            axes[1].plot(
                list(points), list(points.values()), marker="o", markersize=3, linewidth=1, label=f"test {name}"
            )
        axes[1].set_ylabel("test")
        axes[1].legend(loc="best", fontsize="small")
        axes[1].grid(alpha=0.25)
    steps, worlds = list(curves.worlds), list(curves.worlds.values())
    last = max([*curves.losses, *steps], default=0)
    axes[-1].step([*steps, last], [*worlds, *worlds[-1:]], where="post", color=LINE)
    axes[-1].set_ylim(0, max(worlds, default=1) + 1)
    axes[-1].yaxis.get_major_locator().set_params(integer=True)
    axes[-1].set(ylabel="ranks", xlabel="step")
    _changes(axes, curves)
    save(figure, output)


def save(figure: Any, output: Path) -> None:
    """Write a matplotlib ``figure``. Raises StorageError."""
    try:
        figure.savefig(output, dpi=120)
    except OSError as error:
        raise StorageError(f"{output}: cannot be written: {error.strerror}", hint="choose another --output") from error


def _losses(axes: Any, curves: TrainingCurves) -> None:
    for void in curves.repeated:
        axes.plot(*zip(*void, strict=True), color=_VOID, linewidth=1, label="done again")
    axes.plot(list(curves.losses), list(curves.losses.values()), color=LINE, linewidth=1.2, label="training loss")
    values = list(curves.losses.values())
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.25)


def _changes(axes: list[Any], curves: TrainingCurves) -> None:
    """A line through all for each change: red for a failure, blue for a plan, with words while there is room."""
    changes = [change for change in curves.changes if not change.begins]
    for change in changes:
        colour = _PLANNED if change.planned else FAULT
        for each in axes:
            each.axvline(change.step, color=colour, linestyle=":" if change.planned else "-", linewidth=1, alpha=0.8)
        if len(changes) <= _MOST_NAMED:
            anchor = {"xy": (change.step, 0.98), "xycoords": ("data", "axes fraction"), "rotation": 90}
            axes[0].annotate(
                change.label, **anchor, va="top", ha="right", fontsize="x-small", color=colour, bbox=_BEHIND
            )
