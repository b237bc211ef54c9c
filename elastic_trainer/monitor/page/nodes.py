"""The nodes and ranks of a snapshot, as rows of the status page.

The snapshot is outside data: any number may be null, and a state or phase may be unknown to this version.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Final
from urllib.parse import parse_qs

from elastic_trainer.monitor.model import attention
from elastic_trainer.monitor.model.state import IN_WORDS
from elastic_trainer.monitor.page.words import (
    NONE,
    TIMES,
    ago,
    count,
    duration,
    lasting,
    listed,
    named,
    natural,
    number,
    text,
    times,
)
from elastic_trainer.telemetry.rank import GAUGES, Unit
from elastic_trainer.wording import counted

Json = Mapping[str, Any]

OPEN_RANKS: Final = 32
"""Up to this number of ranks, each node's table of ranks is initially open."""
SHOWN: Final = 24
"""Nodes with a row unless the reader requests all; with more nodes the page has a map of all ranks."""
MOST_TURNED: Final = 64
LONGEST_FIND: Final = 100
CELL: Final = 9
"""Pixels of a rank on the map, including the gap to the next."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A reader's choice of what to see, from the query of the URL."""

    turned: frozenset[str] = frozenset()
    """Nodes whose ranks are hidden or shown contrary to the default."""
    every: bool = False
    """Whether all nodes have a row."""
    find: str = ""
    """Search text: part of a node's or host's name."""

    @classmethod
    def of(cls, query: str) -> Choice:
        """The choice in a form's ``query``: ``turned`` is the previous choice, ``turn`` the node to toggle now."""
        told = parse_qs(query)
        turned = sorted(set(told.get("turned", ())) ^ set(told.get("turn", ())))[:MOST_TURNED]
        find = told.get("find", [""])[-1].strip()[:LONGEST_FIND]
        return cls(frozenset(turned), told.get("all", [""])[-1] == "1", find)


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank in the strip of its node: a color and a letter."""

    phase: str
    mark: str
    trouble: str
    """``awaited``, ``waits``, ``still``, ``slow`` or empty."""
    doing: str
    label: str


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank, in words."""

    rank: str
    local: str
    pid: str
    device: str
    phase: Mapping[str, str]
    phase_for: str
    gauges: tuple[str, ...]
    """Values in the order of the columns."""
    slowdown: str
    trouble: str
    remark: str


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node, in words. ``urgency``: 0 comes first."""

    node: str
    host: str
    state: Mapping[str, str]
    in_round: bool
    place: str
    """Its shard group and place, if groups have several nodes; otherwise empty."""
    urgency: int
    cells: tuple[Cell, ...]
    summary: str
    """The strip of cells in words, for screen readers."""
    step: str
    step_time: str
    slowdown: str
    heard: str
    metrics: str
    is_open: bool
    ranks: tuple[RankRow, ...]
    """None if they are not shown."""


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """One node on the map of a large run: a path for each kind of rank."""

    name: str
    width: int
    height: int
    paths: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NodeTable:
    """The nodes as the page shows them."""

    summary: str
    rows: tuple[NodeRow, ...]
    found: int
    """The number of nodes that match the search."""
    there: int
    choice: Choice
    blocks: tuple[NodeBlock, ...]
    kinds: tuple[tuple[str, str], ...]
    """The legend of the map: look and words of each kind of rank."""


def table(snapshot: Json, choice: Choice) -> NodeTable:
    """The nodes: first those that need attention, then by name."""
    told = snapshot.get("nodes") or ()
    small = sum(len(node.get("ranks") or ()) for node in told) <= OPEN_RANKS
    nodes = sorted((_node(node, small, choice) for node in told), key=lambda node: (node.urgency, natural(node.node)))
    wanted = choice.find.lower()
    found = [node for node in nodes if wanted in f"{node.node} {node.host}".lower()]
    rows = tuple(found if choice.every else found[:SHOWN])
    mapped = sorted(nodes, key=lambda node: natural(node.node)) if len(nodes) > SHOWN else []
    blocks = tuple(_block(node) for node in mapped)
    kinds = tuple((kind, _KINDS.get(kind) or named("phases", kind)["label"]) for kind in _met(blocks))
    return NodeTable(summary(nodes), rows, len(found), len(nodes), choice, blocks, kinds)


_KINDS: Final = {"trouble": "slow or standing still", "gone": "gone"}


def _met(blocks: Iterable[NodeBlock]) -> list[str]:
    return list(dict.fromkeys(kind for block in blocks for kind in block.paths))


def _block(node: NodeRow) -> NodeBlock:
    """Two rows of squares, or one of up to four, so that a node keeps its position."""
    many = len(node.cells)
    wide = many if many <= 4 else (many + 1) // 2
    paths: dict[str, str] = {}
    for place, cell in enumerate(node.cells):
        kind = "trouble" if cell.trouble else cell.phase
        paths[kind] = paths.get(kind, "") + square(kind, place % wide * CELL, place // wide * CELL)
    high = -(-many // wide) if many else 1
    return NodeBlock(f"{node.node}: {node.summary}", max(1, wide) * CELL, high * CELL, paths)


@cache
def square(kind: str, x: int = 0, y: int = 0) -> str:
    """The path of a mark: a square for training ranks, a lozenge for trouble, a cross for lost ranks, so that none is
    recognized by color alone."""
    side, half = CELL - 1, (CELL - 1) // 2
    if kind == "trouble":
        return f"M{x + half} {y}l{half} {half}l{-half} {half}l{-half} {-half}z"
    if kind == "gone":
        return f"M{x} {y}l{side} {side}M{x + side} {y}l{-side} {side}"
    if kind == "training":
        return f"M{x} {y}h{side}v{side}h{-side}z"
    return f"M{x} {y + half}a{half} {half} 0 1 0 {side} 0a{half} {half} 0 1 0 {-side} 0z"


def summary(nodes: Sequence[NodeRow]) -> str:
    """``512 nodes: 510 ready, 2 gone. 4,096 ranks: 4,088 training, 8 healing.``"""
    if not nodes:
        return "No node is there."
    states = _counted(node.state["label"] for node in nodes)
    doing = [cell.doing for node in nodes if node.state["key"] != "gone" for cell in node.cells]
    told = f" {counted(len(doing), 'rank')}: {_counted(doing)}." if doing else ""
    return f"{counted(len(nodes), 'node')}: {states}.{told}"


def unheard(node: Json) -> bool:
    """Whether a node's report is overdue."""
    age = number(node.get("age_s"))
    return text(node.get("state")) not in ("gone", "done") and age is not None and age > attention.UNHEARD_S


def _node(node: Json, small: bool, choice: Choice) -> NodeRow:
    ranks = node.get("ranks") or ()
    state = named("nodes", node.get("state"))
    gone = state["key"] == "gone"
    cells = tuple(_cell(rank, gone) for rank in ranks)
    steps = [known for rank in ranks if (known := number(rank.get("step"))) is not None]
    paces = [known for rank in ranks if (known := number(rank.get("step_s")))]
    slow = [known for rank in ranks if (known := number(rank.get("slowdown"))) is not None]
    metrics, name = text(node.get("metrics")), text(node.get("node")) or NONE
    is_open = bool(ranks) and small != (name in choice.turned)
    return NodeRow(
        node=name,
        host=text(node.get("host")),
        state=state,
        in_round=bool(node.get("in_round")),
        place=group_and_place(node),
        urgency=_urgency(node, cells),
        cells=cells,
        summary=_summary(cells),
        step=count(min(steps, default=None)),
        step_time=duration(median(paces) if paces else None),
        slowdown=times(max(slow, default=None)),
        heard=ago(node.get("age_s")),
        metrics=f"{metrics}/metrics" if re.match(r"https?://[^/]", metrics) else "",
        is_open=is_open,
        ranks=tuple(_rank(rank) for rank in ranks) if is_open else (),
    )


def group_and_place(node: Json) -> str:
    """``group 1, place 0``; without a group ``place 0``."""
    known = ((name, number(node.get(name))) for name in ("group", "place"))
    return ", ".join(f"{name} {count(value)}" for name, value in known if value is not None)


def _urgency(node: Json, cells: Sequence[Cell]) -> int:
    state = text(node.get("state"))
    tests = (
        state == "gone",
        any(cell.trouble in ("awaited", "still") for cell in cells),
        any(cell.trouble == "slow" for cell in cells),
        unheard(node),
        state not in ("ready", "done"),
        not node.get("in_round"),
    )
    return next((place for place, true in enumerate(tests) if true), len(tests))


def _trouble(rank: Json) -> str:
    if (stall := text(rank.get("stall"))) in IN_WORDS:
        return stall
    return "slow" if rank.get("straggler") else ""


def _cell(rank: Json, gone: bool) -> Cell:
    phase, trouble = named("phases", rank.get("phase")), _trouble(rank)
    name = f"rank {count(rank.get('rank'))}"
    if gone:
        return Cell("gone", TIMES, "", "gone", f"{name} gone")
    if trouble == "waits":
        return Cell(phase["key"], "W", "", "waiting for others", f"{name} waiting for others")
    doing = phase["label"] + _DOING.get(trouble, "")
    return Cell(phase["key"], "!" if trouble else phase["mark"], trouble, doing, f"{name} {doing}")


def _summary(cells: Sequence[Cell]) -> str:
    """Counts ranks in equal states, and names those in trouble."""
    if not cells:
        return "no ranks"
    calm = _counted(cell.doing for cell in cells if not cell.trouble)
    troubled = listed([cell.label for cell in cells if cell.trouble])
    return f"{counted(len(cells), 'rank')}: {'; '.join(part for part in (calm, troubled) if part)}"


_WORDS: Final = {Unit.COUNT: count, Unit.SECONDS: duration}
_DOING: Final = {"slow": " slowly", "still": " and standing still", "awaited": ", held up: the others wait for it"}


def _rank(rank: Json) -> RankRow:
    trouble = _trouble(rank)
    remark = IN_WORDS.get(trouble, trouble).format(duration(rank.get("still_s")))
    return RankRow(
        rank=count(rank.get("rank")),
        local=count(rank.get("local_rank")),
        pid=NONE if number(rank.get("pid")) is None else str(int(rank["pid"])),
        device=text(rank.get("device")) or NONE,
        phase=named("phases", rank.get("phase")),
        phase_for=lasting(rank.get("phase_s")) if (number(rank.get("phase_s")) or 0) >= 1 else "",
        gauges=tuple(_WORDS[gauge.unit](gauge.known(rank.get(gauge.name))) for gauge in GAUGES),
        slowdown=times(rank.get("slowdown")),
        trouble=trouble,
        remark=remark,
    )


def _counted(words: Iterable[str]) -> str:
    """``7 training, 1 starting``: most frequent first; ties in order of appearance."""
    return ", ".join(f"{count(many)} {word}" for word, many in Counter(words).most_common())
