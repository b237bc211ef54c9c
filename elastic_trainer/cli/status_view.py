"""A run, and the list of all, as tables for a terminal. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic_trainer.cli.events import as_line
from elastic_trainer.cli.wording import UNKNOWN, duration, moment, named, number, percent, ranges
from elastic_trainer.membership.health import Incident
from elastic_trainer.monitor.model.snapshot import Listing, NodeStatus, RankStatus, RunSnapshot, StoreStatus
from elastic_trainer.monitor.model.state import IN_WORDS
from elastic_trainer.telemetry.rank import GAUGES, Unit

MOST_RANKS = 40
"""With more, a node is one row."""
MOST_INCIDENTS = 5
SILENT_S = 20.0
"""So is a node that wrote nothing for this long: it writes every five seconds."""
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


def run_view(run: RunSnapshot) -> RenderableType:
    """All of a run that fits on a screen."""
    parts: list[RenderableType] = [*_store(run.store), *_head(run), _ranks(run)]
    if run.incidents:
        parts.append(Text("incidents, the newest first", style="bold"))
        parts += [Text(as_line(Incident.model_validate(each))) for each in run.incidents[:MOST_INCIDENTS]]
    elif run.rounds:
        last = run.rounds[-1]
        parts.append(Text(f"{moment(last.wall)}  round {last.number} {last.state}: {last.reason}"))
    if run.unreadable:
        parts.append(Text(f"cannot be read by this version: {named(run.unreadable)}", style="red"))
    return Group(*parts)


def list_view(listing: Listing) -> RenderableType:
    """All runs, one row each."""
    if not listing.runs:
        return Group(*_store(listing.store), Text("there are no runs"))
    table = Table()
    for column in (
        "run",
        "state",
        "round",
        "ranks",
        "nodes",
        "step",
        "loss",
        "samples/s",
        "goodput",
        "needs attention",
    ):
        table.add_column(column, overflow="fold")
    for each in listing.runs:
        limits = f"{each.nodes} of {_limits(each.min_nodes, each.max_nodes)}"
        rate, needs = number(each.samples_per_s), Text(", ".join(concern.words for concern in each.attention))
        needs.style = "bold red" if each.attention and each.attention[0].look == "bad" else "yellow"
        numbers = (number(each.round), str(each.world_size), limits, number(each.step), number(each.loss), rate)
        state = Text(each.state, style=STYLES.get(each.state, ""))
        table.add_row(Text(each.run), state, *map(Text, numbers), percent(each.goodput), needs)
    return Group(*_store(listing.store), table)


def _store(store: StoreStatus) -> list[RenderableType]:
    if store.connected:
        return []
    return [Text(f"etcd does not answer; this was read {duration(store.age_s)} ago", style="bold red")]


def _head(run: RunSnapshot) -> list[RenderableType]:
    since = f" for {duration(run.state_s)}" if run.state_s is not None else ""
    first = Text.assemble(
        ("run ", "bold"), (run.run, "bold"), "  ", (run.state, STYLES.get(run.state, "")), since, f"  {_round(run)}"
    )
    present = sum(node.state != "gone" for node in run.nodes)
    nodes = f"{run.world_size} ranks, {present} nodes of {_limits(run.min_nodes, run.max_nodes)}"
    needs = [Text(f"needs attention: {', '.join(each.words for each in run.attention)}", style="bold red")]
    head = [first, *(needs if run.attention else []), *_left(run)]
    groups = f", {run.shard_groups} shard groups of {run.shard_nodes}" if (run.shard_nodes or 1) > 1 else ""
    nodes += f"{groups}, recovery {run.recovery or UNKNOWN}"
    return [*head, Text(nodes), Text(_progress(run)), Text(_checkpoint(run))]


def _left(run: RunSnapshot) -> list[RenderableType]:
    """How the last node left."""
    if (left := run.departure) is None:
        return []
    how = "left on request" if left["planned"] else "gave up"
    return [Text(f"node {left['node']}, the last, {how} at {moment(left['wall'])}: {left['reason']}")]


def _round(run: RunSnapshot) -> str:
    if run.round is None:
        return "no round yet"
    return f"round {run.round}" + (f": {run.round_reason}" if run.round_reason else "")


def _progress(run: RunSnapshot) -> str:
    parts = [f"step {number(run.step)}"]
    for name, value in (
        ("steps/s", run.steps_per_s if run.steps_per_s is not None else 1 / run.step_s if run.step_s else None),
        ("samples/s", run.samples_per_s),
    ):
        if value is not None:
            parts.append(f"{number(value)} {name}")
    if run.loss is not None:
        parts.append(f"loss {number(run.loss)}")
    return ", ".join([*parts, f"goodput {percent(run.goodput)}"])


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


def _ranks(run: RunSnapshot) -> Table:
    many = sum(len(node.ranks) for node in run.nodes) > MOST_RANKS
    table = Table()
    for column in ("node", "host", "state", "ranks" if many else "rank", "phase"):
        table.add_column(column, overflow="fold")
    for gauge in GAUGES:
        table.add_column(gauge.title.lower(), overflow="fold", justify="right")
    table.add_column("", overflow="fold")
    for node in run.nodes:
        rows = [_node_cells(node)] if many else [_rank_cells(rank) for rank in node.ranks]
        for position, (cells, marks) in enumerate(rows):
            silent = [f"silent for {duration(node.age_s)}"] if position == 0 and (node.age_s or 0) > SILENT_S else []
            who = (node.node, node.host, _state(node)) if position == 0 else ("", "", "")
            style = STYLES.get(node.state, "")
            texts = (Text(cell) for cell in cells)  # written by others: no markup
            table.add_row(Text(who[0]), Text(who[1]), Text(who[2], style=style), *texts, _marks([*marks, *silent]))
    return table


def _state(node: NodeStatus) -> str:
    """With the group and place of a node that holds a part of a model: ``ready 1.0``; of a spare ``ready -.0``."""
    if node.place is None:
        return node.state
    return f"{node.state} {'-' if node.group is None else node.group}.{node.place}"


def _marks(marks: list[str]) -> Text:
    return Text(", ".join(marks), style="bold red")


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
