"""The nodes and ranks of a snapshot as rows of the status page; ``static/nodes.js`` does the same in the browser.

Outside data: any number may be null, and a state or phase may be one that this version does not know.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

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
    plural,
    text,
    times,
)

Json = Mapping[str, Any]

AT_WORK: Final = ("training", "repeated", "data")
"""Phases in which a rank gets on every few seconds."""
STILL_S: Final = 30.0
STILL_STEPS: Final = 10.0
"""A rank at work stands still when it has not got on for so many seconds and for so many of its own steps."""
UNHEARD_S: Final = 30.0
"""A node that has told nothing for so long is worth a look."""
OPEN_RANKS: Final = 32
"""A run of at most so many ranks shows the table of each node's ranks from the start."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank in the strip of its node: a color and a letter."""

    phase: str
    mark: str
    trouble: str
    """``slow``, ``still`` or empty."""
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
    step: str
    step_time: str
    compute: str
    slowdown: str
    trouble: str
    remark: str


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node, in words. ``urgency``: 0 is looked at first."""

    node: str
    host: str
    state: Mapping[str, str]
    in_round: bool
    urgency: int
    cells: tuple[Cell, ...]
    summary: str
    """The strip of cells for those who do not see it."""
    step: str
    step_time: str
    slowdown: str
    heard: str
    metrics: str
    ranks: tuple[RankRow, ...]
    """Of a large run none: its cells have to do."""


def rows(snapshot: Json) -> tuple[NodeRow, ...]:
    """All nodes, those that need a look first, then by name."""
    told = snapshot.get("nodes") or ()
    small = sum(len(node.get("ranks") or ()) for node in told) <= OPEN_RANKS
    return tuple(sorted((_node(node, small) for node in told), key=lambda node: (node.urgency, natural(node.node))))


def summary(nodes: Sequence[NodeRow]) -> str:
    """``512 nodes: 510 ready, 2 gone. 4,096 ranks: 4,088 training, 8 healing.``"""
    if not nodes:
        return "No node is there."
    states = _counted(node.state["label"] for node in nodes)
    doing = [cell.doing for node in nodes if node.state["key"] != "gone" for cell in node.cells]
    told = f" {plural(len(doing), 'rank')}: {_counted(doing)}." if doing else ""
    return f"{plural(len(nodes), 'node')}: {states}.{told}"


def standing_still(rank: Json) -> bool:
    """Whether it works and does not get on."""
    still, step = number(rank.get("still_s")), number(rank.get("step_s"))
    return text(rank.get("phase")) in AT_WORK and still is not None and still > max(STILL_S, STILL_STEPS * (step or 0))


def unheard(node: Json) -> bool:
    """Whether it should have told of itself by now."""
    age = number(node.get("age_s"))
    return text(node.get("state")) not in ("gone", "done") and age is not None and age > UNHEARD_S


def _node(node: Json, small: bool) -> NodeRow:
    ranks = node.get("ranks") or ()
    state = named("nodes", node.get("state"))
    gone = state["key"] == "gone"
    cells = tuple(_cell(rank, gone) for rank in ranks)
    steps = [known for rank in ranks if (known := number(rank.get("step"))) is not None]
    paces = [known for rank in ranks if (known := number(rank.get("step_s")))]
    slow = [known for rank in ranks if (known := number(rank.get("slowdown"))) is not None]
    metrics = text(node.get("metrics"))
    return NodeRow(
        node=text(node.get("node")) or NONE,
        host=text(node.get("host")),
        state=state,
        in_round=bool(node.get("in_round")),
        urgency=_urgency(node, cells),
        cells=cells,
        summary=_summary(cells),
        step=count(min(steps, default=None)),
        step_time=duration(median(paces) if paces else None),
        slowdown=times(max(slow, default=None)),
        heard=ago(node.get("age_s")),
        metrics=f"{metrics}/metrics" if re.match(r"https?://[^/]", metrics) else "",
        ranks=tuple(_rank(rank) for rank in ranks) if small else (),
    )


def _urgency(node: Json, cells: Sequence[Cell]) -> int:
    state = text(node.get("state"))
    tests = (
        state == "gone",
        any(cell.trouble == "still" for cell in cells),
        any(cell.trouble == "slow" for cell in cells),
        unheard(node),
        state not in ("ready", "done"),
        not node.get("in_round"),
    )
    return next((place for place, true in enumerate(tests) if true), len(tests))


def _trouble(rank: Json) -> str:
    if standing_still(rank):
        return "still"
    return "slow" if rank.get("straggler") else ""


def _cell(rank: Json, gone: bool) -> Cell:
    phase, trouble = named("phases", rank.get("phase")), _trouble(rank)
    name = f"rank {count(rank.get('rank'))}"
    if gone:
        return Cell("gone", TIMES, "", "gone", f"{name} gone")
    doing = phase["label"] + {"slow": " slowly", "still": " and standing still", "": ""}[trouble]
    return Cell(phase["key"], "!" if trouble else phase["mark"], trouble, doing, f"{name} {doing}")


def _summary(cells: Sequence[Cell]) -> str:
    """What is alike is counted, what is in trouble is named."""
    if not cells:
        return "no ranks"
    calm = _counted(cell.doing for cell in cells if not cell.trouble)
    troubled = listed([cell.label for cell in cells if cell.trouble])
    return f"{plural(len(cells), 'rank')}: {'; '.join(part for part in (calm, troubled) if part)}"


def _rank(rank: Json) -> RankRow:
    trouble = _trouble(rank)
    remark = {"slow": "slow", "still": f"no step for {duration(rank.get('still_s'))}", "": ""}[trouble]
    return RankRow(
        rank=count(rank.get("rank")),
        local=count(rank.get("local_rank")),
        pid=NONE if number(rank.get("pid")) is None else str(int(rank["pid"])),
        device=text(rank.get("device")) or NONE,
        phase=named("phases", rank.get("phase")),
        phase_for=lasting(rank.get("phase_s")) if (number(rank.get("phase_s")) or 0) >= 1 else "",
        step=count(rank.get("step")),
        step_time=duration(rank.get("step_s") or None),
        compute=duration(rank.get("compute_s") or None),
        slowdown=times(rank.get("slowdown")),
        trouble=trouble,
        remark=remark,
    )


def _counted(words: Iterable[str]) -> str:
    """``7 training, 1 starting``: the most frequent first, of equals the first met."""
    return ", ".join(f"{count(many)} {word}" for word, many in Counter(words).most_common())
