"""The contents of one run's page, from its snapshot.

The snapshot is outside data: any number may be null, and a state or cause may be unknown to this version.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from math import isfinite
from statistics import median
from typing import Any, Final
from urllib.parse import parse_qs

from elastic_trainer import wording
from elastic_trainer.monitor.attention import UNHEARD_S, listed
from elastic_trainer.monitor.state import IN_WORDS
from elastic_trainer.telemetry.families import GAUGES, Unit
from elastic_trainer.wording import counted, fixed, whole

NONE: Final = "\N{EN DASH}"
"""Stands for an unknown value."""
TIMES: Final = "\N{MULTIPLICATION SIGN}"

NAMES: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = json.loads(
    files(__package__).joinpath("names.json").read_text(encoding="utf-8")
)
"""Words and looks of states, phases and causes."""


def number(value: Any) -> float | None:
    """``value`` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return value


def text(value: Any) -> str:
    """``value`` as text; empty for null."""
    return "" if value is None else str(value)


def count(value: Any) -> str:
    """A whole number with commas: ``48,210``."""
    known = number(value)
    return NONE if known is None else f"{whole(known):,}"


def duration(value: Any) -> str:
    """Seconds in the two largest units that matter."""
    seconds = number(value)
    return NONE if seconds is None else wording.duration(seconds)


def lasting(value: Any) -> str:
    """The age of something that continues; below a minute in whole seconds, to avoid flicker at each update."""
    age = number(value)
    return duration(age) if age is None or age >= 59.5 else f"{whole(max(0.0, age))} s"


def ago(value: Any) -> str:
    """An age in words."""
    return NONE if number(value) is None else f"{lasting(value)} ago"


def measure(value: Any) -> str:
    """A loss, with about four significant digits."""
    known = number(value)
    if known is None:
        return NONE
    size = abs(known)
    if size >= 100000 or (size and size < 0.0001):
        return f"{known:.2e}".replace("e-0", "e-").replace("e+0", "e+")
    return fixed(known, 1 if size >= 100 else 3 if size >= 1 else 4)


def percent(value: Any) -> str:
    """A share of 1: ``96.8 %``."""
    known = number(value)
    return NONE if known is None else f"{fixed(known * 100, 1)} %"


def times(value: Any) -> str:
    """A ratio: ``2.31`` and the sign of multiplication."""
    known = number(value)
    return NONE if known is None else f"{fixed(known, 2 if known < 10 else 0)}{TIMES}"


def size(value: Any) -> str:
    """Bytes in decimal units: ``1.2 GB``."""
    known = number(value)
    if known is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if known < 999.5:
            return f"{fixed(known, 0 if unit == 'B' or known >= 99.5 else 1)} {unit}"
        known /= 1000
    return f"{fixed(known, 1)} TB"


def named(kind: str, value: Any) -> Mapping[str, str]:
    """Words and look of a state, phase or cause; an unknown one is shown by its own name."""
    key = text(value)
    known = NAMES[kind].get(key)
    if known is None:
        return {"key": "other", "label": key.replace("_", " ") or "not known", "look": "other", "mark": "?"}
    return {"key": key, **known}


def natural(name: str) -> str:
    """A key that sorts ``node-2`` before ``node-10``."""
    return re.sub(r"[0-9]+", lambda digits: digits.group().zfill(12), name)


def stamp(wall: Any) -> tuple[str, str]:
    """A Unix time for ``<time>``: machine-readable and human-readable form; both empty if it is not a time."""
    known = number(wall)
    try:
        when = datetime.fromtimestamp(known, UTC) if known is not None else None
    except (ValueError, OverflowError, OSError):
        when = None
    if when is None:
        return "", ""
    return when.strftime("%Y-%m-%dT%H:%M:%SZ"), when.strftime("%Y-%m-%d %H:%M:%S UTC")


Json = Mapping[str, Any]

MOST_ROWS: Final = 100
"""Maximum rows of incidents and of rounds; the newest are shown."""
OVER: Final = ("broken", "closed")
PARTS: Final = ("before", "detect", "regroup", "resume")


@dataclass(frozen=True, slots=True)
class Moment:
    """A time for ``<time>``: Unix time, machine-readable form, human-readable form."""

    wall: float | None
    iso: str
    people: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an incident's duration; ``x`` and ``width`` in percent."""

    name: str
    time: str
    x: str
    width: str


@dataclass(frozen=True, slots=True)
class IncidentRow:
    """One incident, in words."""

    when: Moment
    what: str
    look: str
    who: str
    rounds: str
    world: str
    lost: str
    total: str
    parts: tuple[Part, ...]
    reason: str
    sentence: str
    """The outcome, for the top of the page."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round, in words."""

    number: str
    state: Mapping[str, str]
    when: Moment
    lasted: str
    world: str
    nodes: str
    reason: str
    ended: str
    """What ended it, if known."""


def moment(wall: Any) -> Moment:
    """The three forms of a Unix time."""
    return Moment(number(wall), *stamp(wall))


def incidents(snapshot: Json) -> list[IncidentRow]:
    """Newest first, without planned changes, which are among the rounds."""
    return [_incident(each) for each in faults(snapshot)[:MOST_ROWS]]


def faults(snapshot: Json) -> list[Json]:
    """The incidents that are no planned changes."""
    return [each for each in snapshot.get("incidents") or () if not each.get("planned")]


def what_of(each: Json) -> Mapping[str, str]:
    """The words and look of an incident: by its cause, otherwise by its kind."""
    return named("causes", each.get("cause")) if each.get("cause") else named("kinds", each.get("kind") or "round")


def _incident(each: Json) -> IncidentRow:
    ended = text(each.get("kind")) in ("", "round")
    what = what_of(each)
    lost = number(each.get("steps_lost"))
    return IncidentRow(
        when=moment(each.get("wall")),
        what=what["label"],
        look=what["look"],
        who=_who(each),
        rounds=_change(each.get("round"), each.get("next_round")) if ended else count(each.get("round")),
        world=_change(each.get("world_before"), each.get("world_after")) if ended else NONE,
        lost=count(lost) if ended and not each.get("open") else NONE,
        total=duration(each.get("total_s")) if ended and not each.get("open") else NONE,
        parts=_parts(each) if ended and not each.get("open") else (),
        reason=text(each.get("reason")),
        sentence=text(each.get("outcome")),
    )


def _who(each: Json) -> str:
    ranks = [count(rank) for rank in each.get("ranks") or ()]
    named_ranks = f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks, 8)}" if ranks else ""
    nodes = listed([text(node) for node in each.get("nodes") or ()])
    return ", ".join(part for part in (nodes, named_ranks) if part) or NONE


def _change(before: Any, after: Any) -> str:
    return count(before) if after is None or before == after else f"{count(before)} → {count(after)}"


def _parts(each: Json) -> tuple[Part, ...]:
    """The times in rounds without a step, to notice it, to agree on the next round, and to resume."""
    seconds = {name: number(each.get(f"{name}_s")) or 0.0 for name in PARTS}
    total, x, parts = sum(seconds.values()), 0.0, []
    for name, took in seconds.items():
        share = took / total if total else 0.0
        if took or name != "before":
            parts.append(Part(name, duration(took), f"{fixed(x * 100, 2)}%", f"{fixed(share * 100, 2)}%"))
        x += share
    return tuple(parts)


def rounds(snapshot: Json, now: float) -> list[RoundRow]:
    """Newest first."""
    return [_round(each, now) for each in spans(snapshot)][::-1][:MOST_ROWS]


@dataclass(slots=True)
class Span:
    """One round, from its transitions; ``end`` is None while it lasts or if unknown."""

    first: Json
    last: Json
    end: float | None = None

    @property
    def lasts(self) -> bool:
        """Whether it is in effect."""
        return text(self.last.get("state")) not in OVER and self.end is None

    @property
    def state(self) -> Mapping[str, str]:
        """How it ended, or its present state; a round with a successor is over, whatever its last record says."""
        recorded = named("rounds", self.last.get("state"))
        followed = self.end is not None and recorded["key"] in ("active", "draining")
        return named("rounds", "replaced") if followed else recorded


def spans(snapshot: Json) -> list[Span]:
    """The rounds, oldest first, merged from the journal, which has one entry for each transition."""
    found: list[Span] = []
    for entry in snapshot.get("rounds") or ():
        wall = number(entry.get("wall"))
        if found and found[-1].first.get("number") == entry.get("number"):
            found[-1].last = entry
        else:
            if found and found[-1].end is None:
                found[-1].end = wall
            found.append(Span(entry, entry))
        if text(entry.get("state")) in OVER:
            found[-1].end = wall
    return found


def _round(span: Span, now: float) -> RoundRow:
    began, members = number(span.first.get("wall")), span.first.get("nodes")
    until = now if span.lasts else span.end
    known = began is not None and until is not None and (span.lasts or span.first is not span.last or until > began)
    end = text(span.last.get("reason")) if span.last is not span.first else ""
    return RoundRow(
        number=count(span.first.get("number")),
        state=span.state,
        when=moment(began),
        lasted=duration(until - began) if known and began is not None and until is not None else NONE,
        world=count(span.first.get("world_size")),
        nodes=count(len(members)) if isinstance(members, list | tuple) and members else NONE,
        reason=text(span.first.get("reason")),
        ended=end,
    )


OPEN_RANKS: Final = 32
"""Up to this number of ranks, each node's table of ranks is initially open."""
SHOWN_NODES: Final = 24
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
    rows = tuple(found if choice.every else found[:SHOWN_NODES])
    mapped = sorted(nodes, key=lambda node: natural(node.node)) if len(nodes) > SHOWN_NODES else []
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
    return text(node.get("state")) not in ("gone", "done") and age is not None and age > UNHEARD_S


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


ENDED: Final = ("stopped", "succeeded", "failed")
MOST_SAMPLES: Final = 12
"""Rows of the table of curves."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number at the top of the page."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """One thing that needs attention; ``look``: bad, warn or busy."""

    look: str
    words: str


@dataclass(frozen=True, slots=True)
class Slice:
    """One phase's share of the time of all ranks; ``x`` and ``width`` in percent."""

    phase: str
    name: str
    time: str
    share: str
    x: str
    width: str


def headline(snapshot: Json) -> str:
    """Round, ranks, nodes and their limits in one sentence."""
    size_now = number(snapshot.get("world_size"))
    within = sum(1 for node in snapshot.get("nodes") or () if node.get("in_round"))
    least, most = number(snapshot.get("min_nodes")), number(snapshot.get("max_nodes"))
    allowed = ""
    if least is not None and most is not None:
        allowed = f", {count(least)} to {count(most)} nodes allowed"
        allowed = f", {counted(int(most), 'node')} needed" if least == most else allowed
    if (size := number(snapshot.get("shard_nodes")) or 1) > 1:
        allowed += f" in shard groups of {count(size)}"
    if last := snapshot.get("last"):
        took = number(last.get("duration_s"))
        after = f" It took {duration(took)} from the first round to the end." if took else ""
        return f"Round {count(last.get('number'))} was the last: {_size(last)}{allowed}.{after}"
    if not size_now:
        return f"No round at present{allowed}."
    where = f"Round {count(snapshot.get('round'))}: " if number(snapshot.get("round")) is not None else ""
    return f"{where}{counted(int(size_now), 'rank')} on {counted(within, 'node')}{allowed}."


def _size(last: Json) -> str:
    known = (int(number(last.get(name)) or 0) for name in ("world_size", "nodes"))
    return " on ".join(counted(value, one) for value, one in zip(known, ("rank", "node"), strict=True))


def since(snapshot: Json, now: float) -> float | None:
    """Seconds that the run has been in its state. A monitor that started later uses the journal."""
    seconds = number(snapshot.get("state_s"))
    if seconds is not None:
        return seconds
    journal = snapshot.get("rounds") or ()
    wall = number(journal[-1].get("wall")) if journal else None
    return None if wall is None else max(0.0, now - wall)


def figures(snapshot: Json) -> list[Figure]:
    """The figures in large type: progress, speed, size, and losses."""
    samples, last = number(snapshot.get("samples")), snapshot.get("last")
    within = sum(1 for node in snapshot.get("nodes") or () if node.get("in_round"))
    return [
        Figure("Step", count(snapshot.get("step"))),
        Figure("Loss", measure(snapshot.get("loss"))),
        Figure("Step time", duration(snapshot.get("step_s"))),
        Figure(
            "Samples per second",
            count(snapshot.get("samples_per_s")),
            f"{count(samples)} in all" if samples is not None else "",
        ),
        Figure(
            "Ranks",
            count((last or snapshot).get("world_size")),
            "at the end" if last else f"on {counted(within, 'node')}" if snapshot.get("world_size") else "",
        ),
        Figure("Goodput", percent(snapshot.get("goodput")), "time in new steps"),
        _checkpoint_figure(snapshot.get("checkpoint")),
        _lost(faults(snapshot)),
    ]


def _checkpoint_figure(saved: Json | None) -> Figure:
    if not saved or number(saved.get("step")) is None:
        return Figure("Checkpoint", NONE, "none saved")
    return Figure("Checkpoint", f"step {count(saved.get('step'))}", ago(saved.get("age_s")))


def _lost(incidents: Sequence[Json]) -> Figure:
    lost = [steps for each in incidents if (steps := number(each.get("steps_lost")))]
    total = sum(lost)
    note = f"in {counted(len(lost), 'incident')}" if lost else f"{counted(len(incidents), 'incident')} known"
    return Figure("Steps lost", count(total), note)


def attention(snapshot: Json) -> list[Note]:
    """What needs attention now, the worst first, and then which nodes come, leave or wait."""
    told = [
        (each.get("look"), text(each.get("sentence")) or text(each.get("words")))
        for each in snapshot.get("attention") or ()
    ]
    found = [Note(look if look in ("bad", "warn") else "warn", words) for look, words in told]
    return found if text(snapshot.get("state")) in ENDED else found + _aside(snapshot.get("nodes") or ())


def calm(snapshot: Json) -> str:
    """The text if nothing needs attention; states only known facts."""
    state, left = text(snapshot.get("state")), snapshot.get("departure") or {}
    if not (snapshot.get("store") or {}).get("connected", True):
        return "Unknown: the monitor cannot reach the store."
    if state == "stopped":
        return f"Stopped on request ({text(left.get('reason')) or 'by its nodes'}). It continues when nodes join."
    if state in ENDED:
        return "The run has ended."
    if state in ("training", "changing"):
        return "Nothing: no node is missing, no rank is slow."
    return "Nothing yet: nodes are joining." if state == "gathering" else "Nothing: the next round is forming."


def worst(look: str, attention: Sequence[Note]) -> str:
    """The look of the page: that of the state, or of a worse note."""
    first = attention[0].look if attention else look
    return first if first == "bad" or (first == "warn" and look != "bad") else look


def goodput(snapshot: Json) -> str:
    """The share of time in new steps; empty if unknown."""
    return "" if number(snapshot.get("goodput")) is None else percent(snapshot.get("goodput"))


def _aside(every: Sequence[Json]) -> list[Note]:
    """Nodes that are joining or leaving, or that wait."""
    found = []
    for state in ("warming", "draining", "finishing"):
        of = [text(node.get("node")) for node in every if text(node.get("state")) == state]
        if of:
            verb = "is" if len(of) == 1 else "are"
            found.append(Note("busy", f"{listed(of)} {verb} {NAMES['nodes'][state]['label']}."))
    idle = [n for n in every if text(n.get("state")) == "ready" and not n.get("in_round")]
    waiting = [text(n.get("node")) + (f" ({place})" if (place := group_and_place(n)) else "") for n in idle]
    if waiting:
        verb = "is" if len(waiting) == 1 else "are"
        found.append(Note("busy", f"{listed(waiting)} {verb} ready and not in the round."))
    return found


def slices(snapshot: Json) -> list[Slice]:
    """The time of all ranks by phase, in the order of ``names.json``, unknown phases last."""
    seconds = {text(k): s for k, v in (snapshot.get("seconds") or {}).items() if (s := number(v)) and s > 0}
    total = sum(seconds.values())
    order = [*(name for name in NAMES["phases"] if name in seconds), *(n for n in seconds if n not in NAMES["phases"])]
    found, x = [], 0.0
    for name in order:
        share, phase = seconds[name] / total, named("phases", name)
        found.append(
            Slice(phase["key"], phase["label"], duration(seconds[name]), percent(share), _percent(x), _percent(share))
        )
        x += share
    return found


def _percent(share: float) -> str:
    return f"{fixed(share * 100, 3)}%"


def checkpoint(saved: Json | None) -> list[Figure]:
    """The figures of the checkpoints."""
    if not saved:
        return []
    every, done, failed = number(saved.get("interval_s")), number(saved.get("saved")), number(saved.get("failed"))
    return [
        Figure("Last", f"step {count(saved.get('step'))}", ago(saved.get("age_s"))),
        Figure("Size", size(saved.get("bytes"))),
        Figure("Took", duration(saved.get("duration_s"))),
        Figure("Due every", duration(every) if every else "not by time"),
        Figure("Saved", count(done)),
        Figure("Failed", count(failed)),
    ]


def samples(snapshot: Json) -> list[list[Any]]:
    """The curves as a short table, newest first: when, step, loss, step time, ranks."""
    curves = snapshot.get("curves") or {}
    walls = curves.get("wall") or []
    apart = 1
    while len(walls) > apart * (MOST_SAMPLES - 1):
        apart *= 2  # so that rows do not change as points arrive
    places = [*range(0, len(walls) - 1, apart), len(walls) - 1] if walls else []
    return [
        [
            moment(walls[place]),
            count(_at(curves, "step", place)),
            measure(_at(curves, "loss", place)),
            duration(_at(curves, "step_s", place)),
            count(_at(curves, "world_size", place)),
        ]
        for place in reversed(places)
    ]


def course(snapshot: Json, now: float) -> tuple[str, ...]:
    """The data of the curves, one JSON value per line: first the rest, then the points, oldest first."""
    curves = snapshot.get("curves") or {}
    walls = curves.get("wall") or []
    names = ("step", "loss", "step_s", "world_size")
    points = [
        [_short(wall, 11), *(_short(_at(curves, name, place)) for name in names)] for place, wall in enumerate(walls)
    ]
    rounds = [
        [count(span.first.get("number")), begun, span.end, number(span.first.get("world_size")) or 0, span.lasts]
        for span in spans(snapshot)
        if (begun := number(span.first.get("wall"))) is not None
    ]
    incidents = [_mark(each) for each in reversed(snapshot.get("incidents") or ()) if number(each.get("wall"))]
    store = snapshot.get("store") or {}
    away = not store.get("connected", True)
    known_at = now - (number(store.get("age_s")) or 0.0) if away else now
    head = {"now": known_at, "ended": text(snapshot.get("state")) in ENDED}
    known = [point for point in points if point[0] is not None]
    return tuple(json.dumps(each, separators=(",", ":")) for each in (head, rounds, incidents, *known))


def _short(value: Any, digits: int = 6) -> float | None:
    """``value`` rounded to as many digits as a drawing shows."""
    known = number(value)
    return known if known is None or isinstance(known, int) else float(f"{known:.{digits}g}")


def _mark(each: Json) -> Json:
    what, took, reason = what_of(each), number(each.get("total_s")) or 0, text(each.get("reason"))
    words = f"{what['label']}{f', {duration(took)}' if took else ''}{f': {reason}' if reason else ''}"
    noticed = sum(number(each.get(name)) or 0 for name in ("before_s", "detect_s")) if took else 0
    return {"wall": each["wall"] - noticed, "took": took, "look": what["look"], "words": words}


def _at(curves: Json, name: str, place: int) -> Any:
    values = curves.get(name) or []
    return values[place] if place < len(values) else None
