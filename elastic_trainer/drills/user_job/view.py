"""Show a local run: a live table on a terminal, one line for each incident elsewhere.

*Runs in* the local cluster's process, its main thread. *Owns* the terminal between ``open`` and ``close``.
*Fails by* nothing of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic_trainer.drills.user_job.picture import IncidentKind, NodePhase, NodePicture, Picture, ShownIncident
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.wording import counted

PROGRESS_EVERY_S = 5.0
SETTLE_S = 0.5
"""A line is printed this long after what it tells of, since news of one moment come from files and etcd one by one."""
REFRESH_EVERY_S = 0.25
_SHOWN = 10
_FRAME = 7
"""Lines of the heading and of the table's frame."""
_KNOWN = {"event", "run", "node", "role", "rank", "round", "level", "timestamp"}
_PHASES = {
    NodePhase.STARTING: "yellow",
    NodePhase.TRAINING: "green",
    NodePhase.REGROUPING: "yellow",
    NodePhase.DONE: "cyan",
    NodePhase.KILLED: "red",
    NodePhase.FAILED: "red",
}
_KINDS = {
    IncidentKind.ROUND: "blue",
    IncidentKind.FAULT: "red",
    IncidentKind.RECOVERY: "green",
    IncidentKind.NODE: "",
    IncidentKind.METRIC: "magenta",
}


class Display(Protocol):
    """Where a run is shown."""

    def update(self, picture: Picture, incidents: Sequence[ShownIncident], now: float) -> None:
        """Show ``incidents``, which are new, and the present state."""
        ...

    def close(self) -> None:
        """Leave the last state visible and give the terminal back."""
        ...


def display(console: Console) -> Display:
    """The display that fits ``console``."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class PlainDisplay:
    """One line for each incident, and one with the progress every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress_at: float | None = None
        self._held: list[ShownIncident] = []
        self._started_at = 0.0

    def update(self, picture: Picture, incidents: Sequence[ShownIncident], now: float) -> None:
        """Print what is new, in the order in which it happened."""
        self._started_at = picture.started_at
        self._held += incidents
        if self._progress_at is None:
            self._progress_at = now
        elif now - self._progress_at >= PROGRESS_EVERY_S:
            self._progress_at = now
            self._held.append(ShownIncident(now, IncidentKind.METRIC, progress_line(picture)))
        self._print(now - SETTLE_S)

    def close(self) -> None:
        """Print what is held."""
        self._print(math.inf)

    def _print(self, until: float) -> None:
        self._held.sort(key=by_time)
        while self._held and self._held[0].t <= until:
            line = incident_line(self._held.pop(0), self._started_at)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A table of the nodes and the last incidents, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._drawn_at: float | None = None

    def update(self, picture: Picture, incidents: Sequence[ShownIncident], now: float) -> None:
        """Redraw, at most every quarter of a second unless something happened."""
        if self._drawn_at is None:
            self._live.start()
        elif not incidents and now - self._drawn_at < REFRESH_EVERY_S:
            return
        self._drawn_at = now
        self._live.update(render(picture, now, *self._live.console.size), refresh=True)

    def close(self) -> None:
        """Stop redrawing."""
        self._live.stop()


def by_time(incident: ShownIncident) -> float:
    """What to sort by: news of one moment arrive in any order."""
    return incident.t


def stamp(seconds: float) -> str:
    """Time since the start, in a fixed width."""
    return f"[{seconds:7.2f} s]"


def incident_line(incident: ShownIncident, started_at: float) -> str:
    """One incident as one line."""
    return f"{stamp(incident.t - started_at)} {incident.text}"


def progress_line(picture: Picture) -> str:
    """The state of the job as one line."""
    if picture.round is None:
        counts = {phase: sum(node.phase is phase for node in picture.nodes.values()) for phase in NodePhase}
        told = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        return f"no step yet ({told or 'no node'})"
    loss = f", loss {picture.loss:.4f}" if picture.loss is not None else ""
    where = f"round {picture.round}{_ahead(picture)}, {counted(picture.world, 'rank')}"
    return f"step {picture.step}, epoch {picture.epoch}{loss}, {where}"


def _ahead(picture: Picture) -> str:
    """What the round document says and the ledger does not show yet."""
    latest = picture.latest
    if latest is None or picture.round is None or latest.number < picture.round:
        return ""
    if latest.number > picture.round:
        return f" (round {latest.number} is starting)"
    return "" if latest.state is RoundState.ACTIVE else f" ({latest.state})"


def readable(line: str) -> str:
    """A line of a node's log: JSON log lines as event and values, without what the table says already."""
    if not line.startswith('{"'):
        return line
    try:
        values = json.loads(line)
    except ValueError:
        return line
    told = {name: value for name, value in values.items() if name not in _KNOWN}
    return " ".join([str(values.get("event", "")), *(f"{name}={value}" for name, value in told.items())]).strip()


def render(picture: Picture, now: float, width: int = 80, height: int = 24) -> RenderableType:
    """The whole view on a terminal of this size, with the newest incidents in full."""
    head = Text(f"run {picture.run}  {now - picture.started_at:.0f} s  {progress_line(picture)}", style="bold")
    shown = sorted(picture.incidents, key=by_time)[-_SHOWN:]
    told = [Text(incident_line(each, picture.started_at), style=_KINDS[each.kind]) for each in shown]
    room = height - len(picture.nodes) - _FRAME
    while len(told) > 1 and sum(-(-text.cell_len // (width - 10)) for text in told) > room:
        del told[0]  # what does not fit would be cut at the end, where the newest stands
    return Group(head, _nodes(picture), *told)


def _nodes(picture: Picture) -> Table:
    table = Table(expand=True)
    for column in ("node", "state", "round", "ranks", "step", "loss"):
        table.add_column(column, no_wrap=True)
    table.add_column("last line", ratio=1, no_wrap=True, overflow="ellipsis")
    for node in picture.nodes.values():
        table.add_row(*_cells(node))
    return table


def _cells(node: NodePicture) -> list[RenderableType]:
    ranks = ",".join(str(node.ranks[local]) for local in sorted(node.ranks))
    numbers = ["-" if value is None else str(value) for value in (node.round, node.step)]
    loss = "-" if node.loss is None else f"{node.loss:.4f}"
    return [
        node.name,
        Text(str(node.phase), style=_PHASES[node.phase]),
        numbers[0],
        ranks or "-",
        numbers[1],
        loss,
        Text(readable(node.last_line), style="dim"),
    ]
