"""Draws a run: loss over steps, evaluations, and below them the number of ranks with each change of it.

*Fails by* ConfigError where matplotlib is not installed or the file's name has no known ending, StorageError.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.training.curves import TrainingCurves

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
        _evaluations(axes[1], curves)
    _worlds(axes[-1], curves)
    _changes(axes, curves)
    axes[-1].set_xlabel("step")
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


def _evaluations(axes: Any, curves: TrainingCurves) -> None:
    for name, points in sorted(curves.evaluations.items()):
        axes.plot(list(points), list(points.values()), marker="o", markersize=3, linewidth=1, label=f"test {name}")
    axes.set_ylabel("test")
    axes.legend(loc="best", fontsize="small")
    axes.grid(alpha=0.25)


def _worlds(axes: Any, curves: TrainingCurves) -> None:
    steps, worlds = list(curves.worlds), list(curves.worlds.values())
    last = max([*curves.losses, *steps], default=0)
    axes.step([*steps, last], [*worlds, *worlds[-1:]], where="post", color=LINE)
    axes.set_ylim(0, max(worlds, default=1) + 1)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("ranks")


def _changes(axes: list[Any], curves: TrainingCurves) -> None:
    """A line through all for each change: red for a failure, blue for a plan, with words while there is room."""
    changes = [change for change in curves.changes if not change.begins]
    for change in changes:
        colour = _PLANNED if change.planned else FAULT
        for each in axes:
            each.axvline(change.step, color=colour, linestyle=":" if change.planned else "-", linewidth=1, alpha=0.8)
        if len(changes) <= _MOST_NAMED:
            place = {"xy": (change.step, 0.98), "xycoords": ("data", "axes fraction"), "rotation": 90}
            axes[0].annotate(
                change.label, **place, va="top", ha="right", fontsize="x-small", color=colour, bbox=_BEHIND
            )
