"""``elastic-trainer status [RUN]``: shows one run or all of them, once or continuously.

*Runs in* the process of the command, its main thread. *Owns* the terminal while it watches.
*Fails by* ConfigError for a run that is not there, StoreUnavailableError when etcd does not answer at the start; while
watching, the run is waited for and an outage is shown.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic_trainer.cli import connection
from elastic_trainer.cli.events import as_line
from elastic_trainer.cli.main import console, output_options, written
from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.membership.documents import Incident
from elastic_trainer.monitor.attention import UNHEARD_S
from elastic_trainer.monitor.reading import Pacing, Reader, StoreReading
from elastic_trainer.monitor.snapshot import (
    Listing,
    NodeStatus,
    RankStatus,
    RunSnapshot,
    StoreStatus,
    as_json,
    gpu_busy,
    listing,
    snapshot,
    summary,
)
from elastic_trainer.monitor.state import IN_WORDS
from elastic_trainer.store.api import RunKeys
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry import logs
from elastic_trainer.telemetry.families import GAUGES, Unit
from elastic_trainer.wording import UNKNOWN, counted, duration, how_far, moment, named, number, percent, ranges

_REPRINT_EVERY_S = 5.0
"""Where nothing can be redrawn in place, at most so often."""


def configure_status(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    connection.add_run(parser, "; without it all runs are listed", optional=True)
    add(
        "--watch",
        action="store_true",
        help=("go on until the run is over or the command is interrupted; a run that is not there yet is waited for"),
    )
    output_options(parser, "wide", "name")
    connection.add_options(parser)


def run_status(arguments: argparse.Namespace) -> int:
    """Show it."""
    logs.configure()
    with connection.opened(arguments, arguments.run) as (store, settings):
        if arguments.run is not None:
            expect = connection.await_run if arguments.watch else connection.require_run
            expect(store, settings, RunKeys(settings.prefix, arguments.run))
        reader = Reader(store, settings.prefix, only=arguments.run)
        reading = reader.poll(connection.CONNECT_S)
        if not reading.store.connected:
            raise StoreUnavailableError(reading.problem)
        if arguments.run is not None and arguments.run not in reading.runs:
            raise connection.no_run(store, settings, arguments.run)
        show(arguments, _readings(reader, reading, arguments.run) if arguments.watch else [(reading, True)])
    return 0


Shown = Iterable[tuple[StoreReading, bool]]
"""What is to be shown, and whether it is the last."""


def _readings(reader: Reader, reading: StoreReading, name: str | None) -> Iterator[tuple[StoreReading, bool]]:
    pacing, over = Pacing(), False
    while not over:
        over = name is not None and (name not in reading.runs or reading.runs[name].documents.closed)
        yield reading, over
        if not over:
            began = SYSTEM.monotonic()
            reading = reader.poll()
            pause(pacing.pause_s(SYSTEM.monotonic() - began, reading.store.connected))


def show(arguments: argparse.Namespace, readings: Shown) -> None:
    """In the way that the options and the terminal ask for."""
    out, wide = console(140), arguments.output == "wide"
    if arguments.output == "name":
        show_names(readings)
    elif arguments.output in ("json", "yaml"):
        show_data(arguments.run, readings, arguments.output)
    elif arguments.watch and out.is_terminal and not out.is_dumb_terminal and not wide:
        show_live(out, arguments.run, readings)
    else:
        show_plain(out, arguments.run, readings, wide=wide)


def value_of(reading: StoreReading, name: str | None) -> RunSnapshot | Listing | None:
    """What is to be shown: the run, or the list of all; None if the run is gone."""
    if name is None:
        rows = [summary(each.documents, each.seen) for each in reading.runs.values()]
        return listing(rows, reading.store, reading.wall)
    found = reading.runs.get(name)
    return None if found is None else snapshot(found.documents, found.seen, reading.store)


def _mark(reading: StoreReading) -> tuple[object, ...]:
    return (reading.store.connected, *((run, each.documents.serial) for run, each in reading.runs.items()))


def show_names(readings: Shown) -> None:
    """The runs, one a line, once."""
    reading, _ = next(iter(readings))
    for name in reading.runs:
        print(plain(name))


def show_data(name: str | None, readings: Shown, output: str) -> None:
    """A line of JSON, or a document of YAML, whenever something is new."""
    shown: tuple[object, ...] | None = None
    for reading, last in readings:
        mark, value = _mark(reading), value_of(reading, name)
        if value is not None and (last or mark != shown):
            shown = mark
            text = as_json(value).decode()
            print(text if output == "json" else f"---\n{written(json.loads(text), output)}", flush=True)


def show_plain(out: Console, name: str | None, readings: Shown, *, wide: bool = False) -> None:
    """The whole view, again when something is new but not often."""
    shown: tuple[object, ...] | None = None
    shown_at = -math.inf
    for reading, last in readings:
        now, mark = SYSTEM.monotonic(), _mark(reading)
        if last or (mark != shown and now - shown_at >= _REPRINT_EVERY_S):
            if shown is not None:
                out.print()
            shown, shown_at = mark, now
            out.print(view_of(reading, name, wide=wide), crop=not wide)


def show_live(out: Console, name: str | None, readings: Shown) -> None:
    """Redrawn in place."""
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        for reading, _ in readings:
            live.update(view_of(reading, name), refresh=True)


def view_of(reading: StoreReading, name: str | None, *, wide: bool = False) -> RenderableType:
    """The view of a reading for people."""
    value = value_of(reading, name)
    if value is None:
        return f"run {name} is gone"
    return run_view(value, wide=wide) if isinstance(value, RunSnapshot) else list_view(value, wide=wide)


# ---- tables

MOST_RANKS = 40
"""With more, a node is one row."""
MOST_INCIDENTS = 5
LEAST_WRAPPED = 20
"""Characters that a column takes at least whose texts may wrap."""
_WORDS: Mapping[Unit, Callable[[float | None], str]] = {Unit.COUNT: number, Unit.SECONDS: duration}
STYLES = {
    "gathering": "yellow",
    "training": "green",
    "changing": "cyan",
    "recovering": "red",
    "stopped": "cyan",
    "abandoned": "bold red",
    "succeeded": "bold green",
    "failed": "bold red",
    "gone": "red",
    "ready": "green",
    "warming": "yellow",
    "draining": "cyan",
}


@dataclass(frozen=True, slots=True)
class Column:
    """``spare``: where there is no room, columns with the highest go first; those with 0 stay.

    ``wraps``: whether its texts may take several lines, broken between words; where even that has no room, they stand
    below the table, behind the ``key`` of their row.
    """

    name: str
    spare: int = 0
    wraps: bool = False
    right: bool = False
    key: bool = False


class Fitted:
    """A table without the columns for which there is no room; nothing is broken inside a word.

    With ``wide`` it has all, however long its lines are.
    """

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[Text]], *, wide: bool) -> None:
        self._columns, self._rows, self._wide = columns, rows, wide

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(range(len(self._columns)))
        if not self._wide:
            while self._width(shown) > options.max_width and (spare := self._most_spare(shown)) is not None:
                shown.remove(spare)
        wrapped = [index for index in shown if self._columns[index].wraps]
        below = wrapped if not self._wide and self._width(shown) > options.max_width else []
        shown = [index for index in shown if index not in below]
        table = Table()
        for column in (self._columns[index] for index in shown):
            justify: JustifyMethod = "right" if column.right else "left"
            table.add_column(column.name, justify=justify, no_wrap=self._wide or not column.wraps)
        for row in self._rows:
            table.add_row(*(row[index] for index in shown))
        yield from console.render(
            table, options.update(width=self._width(shown, least=False)) if self._wide else options
        )
        for row in self._rows:
            for text in (row[index] for index in below if row[index].plain):
                yield Text.assemble(f"{self._key(row)}: ", text)
        hidden = [column.name for index, column in enumerate(self._columns) if index not in (*shown, *below)]
        if hidden:
            yield Text(f"no room for: {', '.join(hidden)} (-o wide shows all)", style="dim")

    def _key(self, row: Sequence[Text]) -> str:
        told = ((column.name, text.plain) for column, text in zip(self._columns, row, strict=True) if column.key)
        return ", ".join(text if name in ("node", "run") else f"{name} {text}" for name, text in told if text)

    def _most_spare(self, shown: Sequence[int]) -> int | None:
        most = max(shown, key=lambda index: self._columns[index].spare)
        return most if self._columns[most].spare else None

    def _width(self, shown: Sequence[int], *, least: bool = True) -> int:
        """Of the table, frame included; ``least``: with wrapped columns as narrow as can be."""
        return 1 + sum(3 + self._needs(index, least) for index in shown)

    def _needs(self, index: int, least: bool) -> int:
        texts = [self._columns[index].name, *(row[index].plain for row in self._rows)]
        widest = max(map(cell_len, texts))
        if not (least and self._columns[index].wraps):
            return widest
        return min(widest, max(LEAST_WRAPPED, *(cell_len(word) for text in texts for word in text.split(" "))))


def run_view(run: RunSnapshot, *, wide: bool = False) -> RenderableType:
    """All of a run that fits on a screen."""
    parts: list[RenderableType] = [*_store(run.store), *_head(run)]
    if run.nodes:
        parts.append(_ranks(run, wide))
    if faults := [each for each in run.incidents if not each["planned"]]:
        parts.append(Text("incidents, the newest first", style="bold"))
        parts += [Text(as_line(Incident.model_validate(each))) for each in faults[:MOST_INCIDENTS]]
    elif run.rounds:
        last = run.rounds[-1]
        parts.append(Text(f"{moment(last.wall)}  round {last.number} {last.state}: {last.reason}"))
    if run.unreadable:
        parts.append(Text(f"cannot be read by this version: {named(run.unreadable)}", style="red"))
    return Group(*parts)


def list_view(listing: Listing, *, wide: bool = False) -> RenderableType:
    """All runs, one row each."""
    if not listing.runs:
        return Group(*_store(listing.store), Text("there are no runs"))
    rows = []
    for each in listing.runs:
        needs = Text(", ".join(concern.words for concern in each.attention))
        needs.style = "bold red" if each.attention and each.attention[0].look == "bad" else "yellow"
        ranks, nodes = (each.last.world_size, each.last.nodes) if each.last else (each.world_size, each.nodes)
        limits = f"{nodes} of {_limits(each.min_nodes, each.max_nodes)}"
        numbers = (number(each.step), needs.copy(), number(each.round), str(ranks), limits, number(each.loss))
        state, rate = Text(each.state, style=STYLES.get(each.state, "")), number(each.samples_per_s)
        texts = (each if isinstance(each, Text) else Text(each) for each in (*numbers, rate, percent(each.goodput)))
        rows.append([Text(each.run), state, *texts])
    return Group(*_store(listing.store), Fitted(_RUNS, rows, wide=wide))


_RUNS = (
    *(Column("run", key=True), Column("state"), Column("step", right=True), Column("needs attention", wraps=True)),
    *(Column("round", 6, right=True), Column("ranks", 3, right=True), Column("nodes", 2)),
    *(Column("loss", 1, right=True), Column("samples/s", 4, right=True), Column("goodput", 5, right=True)),
)


def _store(store: StoreStatus) -> list[RenderableType]:
    if store.connected:
        return []
    return [Text(f"etcd does not answer; this was read {duration(store.age_s)} ago", style="bold red")]


def _head(run: RunSnapshot) -> list[RenderableType]:
    since = f" for {duration(run.state_s)}" if run.state_s is not None else ""
    because = f": {run.round_reason}" if run.round_reason else ""
    round_ = "no round yet" if run.round is None else f"round {run.round}{because}"
    state = run.state, STYLES.get(run.state, "")
    head: list[RenderableType] = [Text.assemble(("run ", "bold"), (run.run, "bold"), "  ", state, since, f"  {round_}")]
    if run.attention:
        head.append(Text(f"needs attention: {', '.join(each.words for each in run.attention)}", style="bold red"))
    if (left := run.departure) is not None:
        how = "left on request" if left["planned"] else "gave up"
        head.append(Text(f"node {left['node']}, the last, {how} at {moment(left['wall'])}: {left['reason']}"))
    present, ranks = sum(node.state != "gone" for node in run.nodes), run.world_size
    if run.last is not None:
        present, ranks = run.last.nodes, run.last.world_size
    nodes = f"{counted(ranks, 'rank')}, {counted(present, 'node')} of {_limits(run.min_nodes, run.max_nodes)}"
    if run.last is not None:
        took = f", ended, {duration(run.last.duration_s)} after the first" if run.last.duration_s is not None else ""
        nodes = f"last round: {nodes}{took}"
    if (run.shard_nodes or 1) > 1:
        nodes += f", {run.shard_groups} shard groups of {run.shard_nodes}"
    nodes += f", recovery {run.recovery or UNKNOWN}"
    return [*head, Text(nodes), Text(_progress(run)), Text(_checkpoint(run))]


def _progress(run: RunSnapshot) -> str:
    rate = run.steps_per_s if run.steps_per_s is not None else 1 / run.step_s if run.step_s else None
    rates = ((rate, "steps/s"), (run.samples_per_s, "samples/s"))
    known = [f"{number(value)} {name}" for value, name in rates if value is not None]
    loss = [f"loss {number(run.loss)}"] if run.loss is not None else []
    lr = run.progress["lr"] if run.progress is not None else None
    loss += [f"learning rate {number(lr)}"] if lr is not None else []
    far = f"step {number(run.step)}" + (f" ({text})" if (text := how_far(run.progress)) else "")
    return ", ".join([far, *known, *loss, f"goodput {percent(run.goodput)}"])


def _checkpoint(run: RunSnapshot) -> str:
    saved = run.checkpoint
    if saved is None:
        return "no checkpoint yet"
    last = f"checkpoint of step {saved.step}, {duration(saved.age_s)} ago, {number(saved.bytes / 2**20, 'MiB')}"
    failed = f", {saved.failed} failed" if saved.failed else ""
    every = f", one every {duration(saved.interval_s)}" if saved.interval_s else ""
    return f"{last} in {duration(saved.duration_s)}; {saved.saved} saved{failed}{every}"


def _limits(low: int | None, high: int | None) -> str:
    return UNKNOWN if low is None else f"{low}:{high}"


def _ranks(run: RunSnapshot, wide: bool) -> Fitted:
    many = sum(len(node.ranks) for node in run.nodes) > MOST_RANKS
    columns = [
        *(Column("node", key=True), Column("host", 9), Column("state", 1)),
        *(Column("ranks" if many else "rank", key=True), Column("phase")),
        *(Column(gauge.title.lower(), _SPARE.get(gauge.name, 8), right=True) for gauge in GAUGES),
        *(Column(name, 10, right=True) for name in ("cpu", "gpu")),
        Column("", wraps=True),
    ]
    rows = []
    for node in run.nodes:
        load = _load(node)
        found = [_node_cells(node)] if many else [_rank_cells(rank) for rank in node.ranks]
        for position, (cells, marks) in enumerate(found):
            silent = [f"silent for {duration(node.age_s)}"] if position == 0 and (node.age_s or 0) > UNHEARD_S else []
            who = (node.node, node.host, _state(node)) if position == 0 else ("", "", "")
            cells += load if position == 0 else ["", ""]
            style = STYLES.get(node.state, "")
            texts = [Text(cell) for cell in (*who, *cells)]  # written by others: no markup
            texts[2].style = style
            rows.append([*texts, Text(", ".join([*marks, *silent]), style="bold red")])
    if not any(row[-1].plain for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Fitted(columns, rows, wide=wide)


_SPARE = {"step": 0, "step_s": 2, "compute_s": 6}
"""Of the gauges' columns; others go before these."""


def _state(node: NodeStatus) -> str:
    """With the group and place of a node that holds a part of a model: ``ready 1.0``; of a spare ``ready -.0``."""
    if node.place is None:
        return node.state
    return f"{node.state} {'-' if node.group is None else node.group}.{node.place}"


def _load(node: NodeStatus) -> list[str]:
    """How busy its CPUs and GPUs are."""
    load = node.load or {}
    return [percent(load.get("cpu")), percent(gpu_busy(load))]


def _rank_cells(rank: RankStatus) -> tuple[list[str], list[str]]:
    """The cells of a rank, and what is odd about it."""
    marks = [f"straggler x{rank['slowdown']:.2g}"] if rank["straggler"] and rank["slowdown"] else []
    if rank["stall"] is not None:
        marks.append(IN_WORDS[rank["stall"]].format(duration(rank["still_s"])))
    phase = UNKNOWN if rank["phase"] is None else f"{rank['phase']} {duration(rank['phase_s'])}"
    return [number(rank["rank"]), phase, *(_WORDS[gauge.unit](rank[gauge.name]) for gauge in GAUGES)], marks


def _node_cells(node: NodeStatus) -> tuple[list[str], list[str]]:
    """All ranks of a node in one row."""
    phases = Counter(_known(node, "phase"))
    slow = [rank["rank"] for rank in node.ranks if rank["straggler"] and rank["rank"] is not None]
    marks = [f"straggler {ranges(slow)}"] if slow else []
    for stall, words in IN_WORDS.items():
        held = [rank for rank in node.ranks if rank["stall"] == stall]
        if held:
            still = words.format(duration(max(rank["still_s"] for rank in held)))
            marks.append(f"{ranges(rank['rank'] for rank in held)}: {still}")
    doing = ", ".join(f"{count} {phase}" for phase, count in phases.most_common()) or UNKNOWN
    of_all = ((gauge, _known(node, gauge.name)) for gauge in GAUGES)
    cells = [_WORDS[gauge.unit](gauge.of_node(values) if values else None) for gauge, values in of_all]
    return [ranges(_known(node, "rank")) or UNKNOWN, doing, *cells], marks


def _known(node: NodeStatus, name: str) -> list[Any]:
    return [rank[name] for rank in node.ranks if rank[name] is not None]
