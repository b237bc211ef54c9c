"""Shows a local run: a live table on a terminal, one line for each incident elsewhere.

:class:`Picture` is what is known of the run, from ledger lines, round documents, processes and faults; it is pure, and
takes what happened and when, and returns the incidents worth showing. The displays draw it.

*Runs in* the local cluster's process, its main thread. *Owns* the terminal between the first ``update`` and ``close``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic_trainer.drills.faults import FaultKind, Injected
from elastic_trainer.drills.measure import Recovery, recovery
from elastic_trainer.local.ledger import Line, LineKind, exit_text
from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.wording import counted


class NodePhase(StrEnum):
    """How a node looks from outside."""

    STARTING = "starting"
    TRAINING = "training"
    REGROUPING = "regrouping"
    """Its round is over and it does not train in the next one yet."""
    DONE = "done"
    KILLED = "killed"
    FAILED = "failed"


class IncidentKind(StrEnum):
    """What an incident is about; the view colours by it."""

    ROUND = "round"
    FAULT = "fault"
    RECOVERY = "recovery"
    NODE = "node"
    METRIC = "metric"


@dataclass(frozen=True, slots=True)
class ShownIncident:
    """One thing that happened, at ``t`` (monotonic seconds)."""

    t: float
    kind: IncidentKind
    text: str


@dataclass(slots=True)
class NodePicture:
    """One node, as last heard of."""

    name: str
    phase: NodePhase = NodePhase.STARTING
    round: int | None = None
    ranks: dict[int, int] = field(default_factory=dict)
    """Global rank by local rank."""
    step: int | None = None
    loss: float | None = None
    last_line: str = ""
    struck_in: int = -1
    """The round in which its worker was killed: lines of that one may come late."""


class Picture:
    """The state of a run and its history. Each method that takes news returns the incidents that it makes."""

    def __init__(self, run: str, started_at: float) -> None:
        self.run = run
        self.started_at = started_at
        self.nodes: dict[str, NodePicture] = {}
        self.round: int | None = None
        self.latest: RoundDocument | None = None
        """The round document as last seen; it may be ahead of the ledger."""
        self.world = 0
        self.step = 0
        """The highest step that the job has committed so far."""
        self.epoch = 0
        self.loss: float | None = None
        self.first: str | None = None
        """The node of rank 0."""
        self.incidents: list[ShownIncident] = []
        self.documents: dict[int, RoundDocument] = {}
        """The last document seen of each round."""
        self.lines: list[Line] = []
        self.injected: list[Injected] = []
        self._recovering: list[Injected] = []

    @property
    def training(self) -> list[str]:
        return [node.name for node in self.nodes.values() if node.phase is NodePhase.TRAINING]

    def can_lose_one(self, min_nodes: int, max_nodes: int) -> bool:
        """Whether the others can go on without one of those that train, or nobody is away who could come back.

        Away are those that have trained, live, and do not train now; where as many train as the job takes, it waits for
        none of them.
        """
        away = any(node.phase is NodePhase.REGROUPING for node in self.nodes.values())
        return len(self.training) > min_nodes or not away or len(self.training) >= max_nodes

    def observe(self, lines: Iterable[Line]) -> list[ShownIncident]:
        """Take in ledger lines, in the order of their times."""
        new: list[ShownIncident] = []
        read = list(lines)
        for line in read:
            self.lines.append(line)
            if line.event in (LineKind.OPENED, LineKind.STEP):
                new += self._trained(line)
        if any(line.event is LineKind.STEP for line in read):
            new += self._recoveries()
        new += _metrics(read)
        return self._note(new)

    def _trained(self, line: Line) -> list[ShownIncident]:
        node = self.nodes.setdefault(line.node, NodePicture(line.node))
        if node.round != line.round:
            node.round, node.ranks = line.round, {}
        node.ranks[line.local_rank] = line.rank
        returns = node.phase in (NodePhase.STARTING, NodePhase.REGROUPING) and line.round > node.struck_in
        if returns and self._stands(line.round):
            node.phase = NodePhase.TRAINING
        if line.event is LineKind.STEP:
            node.step, node.loss = line.step, line.loss if line.loss is not None else node.loss
        new = self._entered(line) if self.round is None or line.round > self.round else []
        if line.round == self.round:
            self.first = line.node if line.rank == 0 else self.first
            self.epoch = line.epoch
            if line.rank == 0 and line.loss is not None:
                self.loss = line.loss
        self.step = max(self.step, line.step if line.event is LineKind.STEP else 0)
        return new

    def _stands(self, number: int) -> bool:
        """Whether a round goes on, by the round document."""
        latest = self.latest
        if latest is None or number != latest.number:
            return latest is None or number > latest.number
        return latest.state is not RoundState.BROKEN

    def _entered(self, line: Line) -> list[ShownIncident]:
        self.round, self.world = line.round, line.world
        begin = line.step if line.event is LineKind.OPENED else line.step - 1
        source = f" of {line.resumed_from}" if line.resumed_from else ""
        text = f"round {line.round} trains with {counted(line.world, 'rank')} from step {begin}{source}"
        return [ShownIncident(line.t, IncidentKind.ROUND, text)]

    def _recoveries(self) -> list[ShownIncident]:
        new = []
        for injected in list(self._recovering):
            found = recovery(injected, self.lines)
            if found is not None:
                self._recovering.remove(injected)
                t = injected.t + found.recovery_s
                new.append(ShownIncident(t, IncidentKind.RECOVERY, recovery_text(injected, found)))
        return new

    def document(self, document: RoundDocument, t: float) -> list[ShownIncident]:
        """Take in the round document as it became at about ``t``."""
        before = self.documents.get(document.number)
        self.documents[document.number] = document
        self.latest = document
        for node in self.nodes.values():
            if node.phase is NodePhase.TRAINING and not self._stands(node.round or 0):
                node.phase = NodePhase.REGROUPING
        if before is not None and before.state is document.state:
            return []
        return self._note([ShownIncident(t, IncidentKind.ROUND, _round_text(document))])

    def node_started(self, name: str, t: float) -> list[ShownIncident]:
        self.nodes[name] = NodePicture(name)
        return self._note([ShownIncident(t, IncidentKind.NODE, f"node {name} started")])

    def node_said(self, name: str, text: str) -> None:
        self.nodes[name].last_line = text

    def node_ended(self, name: str, exit_code: int, t: float) -> list[ShownIncident]:
        """A node's torchrun has ended."""
        node = self.nodes[name]
        if node.phase is NodePhase.KILLED:
            return []
        node.phase = NodePhase.DONE if exit_code == 0 else NodePhase.FAILED
        return self._note([ShownIncident(t, IncidentKind.NODE, f"node {name} {exit_text(exit_code)}")])

    def fault(self, injected: Injected) -> list[ShownIncident]:
        """A fault was carried out. A join is noted by its node's start."""
        self.injected.append(injected)
        self._recovering.append(injected)
        if injected.fault.kind is FaultKind.JOIN:
            return self.node_started(injected.node, injected.t)
        whole = injected.fault.kind is FaultKind.KILL_NODE
        node = self.nodes[injected.node]
        node.phase, node.struck_in = NodePhase.KILLED if whole else NodePhase.REGROUPING, injected.round
        text = f"{injected}, at step {injected.step}"
        return self._note([ShownIncident(injected.t, IncidentKind.FAULT, text)])

    def _note(self, incidents: list[ShownIncident]) -> list[ShownIncident]:
        self.incidents += incidents
        return incidents


def _metrics(lines: Iterable[Line]) -> list[ShownIncident]:
    """One incident for all metrics of one step."""
    values: dict[tuple[int, int], list[Line]] = {}
    for line in lines:
        if line.event is LineKind.METRIC and line.value is not None:
            values.setdefault((line.epoch, line.step), []).append(line)
    told = {key: ", ".join(f"{line.name} {line.value:.4g}" for line in group) for key, group in values.items()}
    return [
        ShownIncident(group[0].t, IncidentKind.METRIC, f"epoch {key[0]}, step {key[1]}: {told[key]}")
        for key, group in values.items()
    ]


def recovery_text(injected: Injected, found: Recovery) -> str:
    """One sentence on a recovery."""
    repeated = f"{counted(found.steps_repeated, 'step')} repeated"
    if injected.fault.kind is FaultKind.JOIN:
        what = f"{injected.node} takes part {found.recovery_s:.2f} s after its start, pause {found.pause_s:.2f} s"
    else:
        what = f"recovered {found.recovery_s:.2f} s after {injected.fault.kind} of {injected.node}"
    return f"{what}: step {found.step} in round {found.round} with {counted(found.world, 'rank')}, {repeated}"


def _round_text(document: RoundDocument) -> str:
    because = f": {document.reason}" if document.reason else ""
    match document.state:
        case RoundState.ACTIVE:
            names = " ".join(member.node for member in document.members)
            return f"round {document.number} formed of {names} ({counted(document.world_size, 'rank')}){because}"
        case RoundState.BROKEN:
            return f"round {document.number} broken{because}"
        case RoundState.DRAINING:
            return f"round {document.number} ends by plan{because}"
        case RoundState.CLOSED:
            return f"run closed, {document.result or 'without a result'}{because}"


# ---- views

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
        self._held.sort(key=BY_TIME)
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


BY_TIME = attrgetter("t")
"""What to sort by: news of one moment arrive in any order."""


def incident_line(incident: ShownIncident, started_at: float) -> str:
    """One incident as one line, with the time since the start in a fixed width."""
    return f"[{incident.t - started_at:7.2f} s] {incident.text}"


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


Display = PlainDisplay | LiveDisplay
"""Where a run is shown."""


def display(console: Console) -> Display:
    """The display that fits ``console``."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def render(picture: Picture, now: float, width: int = 80, height: int = 24) -> RenderableType:
    """The whole view on a terminal of this size, with the newest incidents in full."""
    head = Text(f"run {picture.run}  {now - picture.started_at:.0f} s  {progress_line(picture)}", style="bold")
    shown = sorted(picture.incidents, key=BY_TIME)[-_SHOWN:]
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
        ranks = ",".join(str(node.ranks[local]) for local in sorted(node.ranks))
        round_, step = ("-" if value is None else str(value) for value in (node.round, node.step))
        loss = "-" if node.loss is None else f"{node.loss:.4f}"
        state, said = Text(str(node.phase), style=_PHASES[node.phase]), Text(readable(node.last_line), style="dim")
        table.add_row(node.name, state, round_, ranks or "-", step, loss, said)
    return table
