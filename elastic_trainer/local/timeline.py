"""Draws a local run over time: when each node trained, in which round, the faults, and the committed steps.

*Fails by* StorageError if the run's files cannot be read or the picture cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic_trainer.errors import StorageError
from elastic_trainer.jobs.curves import FAULT, LINE, save
from elastic_trainer.local.ledger import LedgerTail, Line, LineKind, lineage

_MOST_WORDS = 8
"""Of more faults than these none is named: the words would lie upon each other."""
_ROUNDS, _STARTING, _JOIN = ("#2e86c1", "#85c1e9"), "#d5d8dc", "#1e8449"


@dataclass(frozen=True, slots=True)
class Bar:
    """One worker in one round, in seconds since the run's first line; round 0 is the start before its first step."""

    node: str
    pid: int
    round: int
    begin_s: float
    end_s: float


def has_timeline(directory: Path) -> bool:
    """Whether ``directory`` holds a local run."""
    return (directory / "ledger").is_dir() and (directory / "summary.json").is_file()


def draw(directory: Path, output: Path) -> None:
    """Draw the run of ``directory`` into ``output`` (.png, .svg or .pdf); needs matplotlib."""
    try:
        lines = LedgerTail(directory / "ledger").read()
        faults = json.loads((directory / "summary.json").read_text())["faults"]
    except (OSError, ValueError, KeyError) as error:
        raise StorageError(
            f"{directory}: no local run can be read there: {error}", hint="pass its --run-dir"
        ) from error
    if not lines:
        raise StorageError(f"{directory}: its ledger is empty", hint="draw a run whose script opens a Session")
    save(_figure(lines, faults), output)


def bars(lines: Iterable[Line]) -> tuple[Bar, ...]:
    """From each process's ledger lines: one bar until its first step, then one for each of its rounds."""
    by_process: dict[tuple[str, int], list[Line]] = {}
    began: float | None = None
    for line in sorted(lines, key=lambda each: each.t):
        began = line.t if began is None else began
        by_process.setdefault((line.node, line.pid), []).append(line)
    found, start = [], began or 0.0
    for key, mine in by_process.items():
        number, begin = 0, mine[0].t
        for before, line in pairwise(mine):
            if line.event is LineKind.STEP and line.round != number:
                end = before.t if number else line.t  # no node trains between two rounds
                found.append(Bar(*key, number, begin - start, end - start))
                number, begin = line.round, line.t
        found.append(Bar(*key, number, begin - start, mine[-1].t - start))
    return tuple(found)


def _figure(lines: Sequence[Line], faults: Sequence[dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    nodes = sorted({line.node for line in lines} | {fault["node"] for fault in faults} - {""})  # none of an outage
    figure = Figure(figsize=(10, 2.6 + 0.4 * len(nodes)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [0.4 * len(nodes) + 0.5, 1.2]})
    for bar in bars(lines):
        colour = _ROUNDS[bar.round % 2] if bar.round else _STARTING
        span = [(bar.begin_s, bar.end_s - bar.begin_s)]
        above.broken_barh(span, (nodes.index(bar.node) - 0.3, 0.6), facecolor=colour, edgecolor="none")
    for index, fault in enumerate(sorted(faults, key=lambda each: float(each["t"]))):
        words_at = -0.65 - 0.45 * (index % 2) if len(faults) <= _MOST_WORDS else None
        row = nodes.index(fault["node"]) if fault["node"] else None
        _mark(above, below, fault, fault["t"] - lines[0].t, row, words_at)
    above.set_yticks(range(len(nodes)), nodes)
    above.set_ylim(len(nodes) - 0.3, -1.5)
    patches = [Patch(color=_ROUNDS[1], label="trains"), Patch(color=_ROUNDS[0], label="trains, in the next round")]
    figure.legend(
        handles=[*patches, Patch(color=_STARTING, label="starts")], loc="outside upper right", ncols=3, fontsize="small"
    )
    committed = lineage(lines)
    below.plot([each.t - lines[0].t for each in committed], [each.step for each in committed], color=LINE)
    below.set_ylabel("committed steps")
    below.set_xlabel("seconds")
    below.set_xlim(0, lines[-1].t - lines[0].t)
    below.grid(alpha=0.25)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _mark(above: Any, below: Any, fault: dict[str, Any], t_s: float, row: int | None, words_at: float | None) -> None:
    text = fault["what"].partition(" (")[0]
    joins = text.endswith("started")
    colour = _JOIN if joins else FAULT
    for axes in (above, below):
        axes.axvline(t_s, color=colour, linewidth=1, linestyle=":" if joins else "-")
    if row is not None:
        above.plot([t_s], [row], marker=">" if joins else "X", color=colour, markersize=9, clip_on=False)
    if words_at is None:
        return
    if fault["recovery"] is not None and not joins:
        text += f": next step after {fault['recovery']['recovery_s']:.2f} s"
    above.annotate(text, (t_s, words_at), xytext=(4, 0), textcoords="offset points", color=colour, fontsize=8)
