"""The status page: the list of runs, and one run with its nodes, curves and incidents.

What is said is decided here; the templates lay it out, and write numbers by the filters below. Pages are complete
without JavaScript; with it, ``static/page.js`` mounts later updates and draws the curves. All links are relative, so
pages work below any path: the list at ``/``, a run at ``/runs/<run>``, each with ``update`` and a run with ``stream``
below it, files at ``/static/``. A snapshot is outside data: any number may be null, and a state or cause may be
unknown to this version.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import isfinite
from pathlib import PurePosixPath
from statistics import median
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from elastic_trainer import wording
from elastic_trainer.clock import SYSTEM
from elastic_trainer.monitor.attention import UNHEARD_S, listed
from elastic_trainer.monitor.snapshot import RunSnapshot, RunSummary, gpu_busy
from elastic_trainer.monitor.state import IN_WORDS
from elastic_trainer.telemetry.families import GAUGES, Gauge, Unit
from elastic_trainer.wording import counted, fixed, how_far, ranges, whole

Json = Mapping[str, Any]
NONE: Final = "\N{EN DASH}"
"""Stands for an unknown value."""
TIMES: Final = "\N{MULTIPLICATION SIGN}"
NAMES: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = json.loads(
    files(__package__).joinpath("names.json").read_text(encoding="utf-8")
)
"""Words and looks of states, phases and causes."""

# ---- words of values, which the templates use as filters


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


def change(before: Any, after: Any) -> str:
    """``6``, or ``6 → 4``."""
    return count(before) if after is None or before == after else f"{count(before)} → {count(after)}"


def present(there: Any, least: Any, most: Any) -> str:
    """``3 of 2 to 4``: present and allowed nodes."""
    allowed = f"{count(least)} to {count(most)}" if number(least) is not None and number(most) is not None else ""
    if number(there) is None:
        return allowed or NONE
    return f"{count(there)} of {allowed}" if allowed else count(there)


def gauge_text(gauge: Gauge, rank: Json) -> str:
    """The value that a rank has of ``gauge``."""
    words = {Unit.COUNT: count, Unit.SECONDS: duration}[gauge.unit]
    return words(gauge.known(rank.get(gauge.name)))


class Share(NamedTuple):
    """A part of a time: its seconds, its share of all, and where it begins in a bar, as a share too."""

    name: str
    seconds: float
    share: float
    x: float


def shares(seconds: Mapping[str, float]) -> list[Share]:
    """The parts of a bar, in their order."""
    total, x, found = sum(seconds.values()), 0.0, []
    for name, took in seconds.items():
        share = took / total if total else 0.0
        found.append(Share(name, took, share, x))
        x += share
    return found


# ---- incidents and rounds

MOST_ROWS: Final = 100
"""Maximum rows of incidents and of rounds; the newest are shown."""
OVER: Final = ("broken", "closed")
PARTS: Final = ("before", "detect", "regroup", "resume")
"""The times of an incident: rounds without a step, to notice it, to agree on the next round, and to resume."""


def faults(snapshot: Json) -> list[Json]:
    """The incidents that are no planned changes, newest first."""
    return [each for each in snapshot["incidents"] or () if not each.get("planned")]


def what_of(each: Json) -> Mapping[str, str]:
    """The words and look of an incident: by its cause, otherwise by its kind."""
    return named("causes", each.get("cause")) if each.get("cause") else named("kinds", each.get("kind") or "round")


def verdict_words(verdict: Json) -> str:
    """``machine, likely; leave out``: what failed, how sure that is, and what to do."""
    culprit, certainty, advice = (text(verdict.get(name)) for name in ("culprit", "certainty", "advice"))
    return f"({culprit}, {certainty}; {advice.replace('_', ' ')})"


def incident_row(each: Json) -> Json:
    """An incident with its words; ``ended``: it ended a round; ``over``: and another has followed."""
    ended = text(each.get("kind")) in ("", "round")
    over = ended and not each.get("open")
    seconds = {name: number(each.get(f"{name}_s")) or 0.0 for name in PARTS}
    parts = [part for part in shares(seconds) if part.seconds or part.name != "before"] if over else []
    ranks = [count(rank) for rank in each.get("ranks") or ()]
    named_ranks = f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks, most=8)}" if ranks else ""
    nodes = listed([text(node) for node in each.get("nodes") or ()])
    who = ", ".join(part for part in (nodes, named_ranks) if part) or NONE
    return {**each, "what": what_of(each), "who": who, "ended": ended, "over": over, "parts": parts}


@dataclass(slots=True)
class Span:
    """One round, from its transitions; ``end`` is None while it lasts or if unknown."""

    first: Json
    last: Json
    end: float | None = None

    @property
    def lasts(self) -> bool:
        return text(self.last.get("state")) not in OVER and self.end is None

    @property
    def state(self) -> Mapping[str, str]:
        """How it ended, or its present state; a round with a successor is over, whatever its last record says."""
        recorded = named("rounds", self.last.get("state"))
        followed = self.end is not None and recorded["key"] in ("active", "draining")
        return named("rounds", "replaced") if followed else recorded

    def lasted(self, now: float) -> float | None:
        """Seconds; None if unknown."""
        began, until = number(self.first.get("wall")), now if self.lasts else self.end
        if began is None or until is None:
            return None
        return until - began if self.lasts or self.first is not self.last or until > began else None


def spans(snapshot: Json) -> list[Span]:
    """The rounds, oldest first, merged from the journal, which has one entry for each transition."""
    found: list[Span] = []
    for entry in snapshot["rounds"] or ():
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


# ---- nodes and ranks

OPEN_RANKS: Final = 32
"""Up to this number of ranks, each node's table of ranks is initially open."""
SHOWN_NODES: Final = 24
"""Nodes with a row unless the reader requests all; with more nodes the page has a map of all ranks."""
MOST_TURNED: Final = 64
LONGEST_FIND: Final = 100
MANY_RUNS: Final = 5
"""With more the list can be searched."""
CELL: Final = 9
"""Pixels of a rank on the map, including the gap to the next."""
_KINDS: Final = {"trouble": "slow or standing still", "gone": "gone"}
_DOING: Final = {"slow": " slowly", "still": " and standing still", "awaited": ", held up: the others wait for it"}


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
    def parse(cls, query: str) -> Choice:
        """The choice in a form's ``query``: ``turned`` is the previous choice, ``turn`` the node to toggle now."""
        told = parse_qs(query)
        turned = sorted(set(told.get("turned", ())) ^ set(told.get("turn", ())))[:MOST_TURNED]
        find = told.get("find", [""])[-1].strip()[:LONGEST_FIND]
        return cls(frozenset(turned), told.get("all", [""])[-1] == "1", find)


class Cell(NamedTuple):
    """One rank in the strip of its node: a color and a letter."""

    phase: str
    mark: str
    trouble: str
    """``awaited``, ``waits``, ``still``, ``slow`` or empty."""
    doing: str
    label: str


def node_table(snapshot: Json, choice: Choice) -> dict[str, Any]:
    """The nodes: first those that need attention, then by name; of many also a map, a path for each kind of rank."""
    told = snapshot["nodes"] or ()
    small = sum(len(node.get("ranks") or ()) for node in told) <= OPEN_RANKS
    nodes = sorted((_node(each, small, choice) for each in told), key=lambda each: (each["urgency"], each["order"]))
    wanted = choice.find.lower()
    found = [node for node in nodes if wanted in f"{node['name']} {node['host']}".lower()]
    mapped = sorted(nodes, key=lambda node: str(node["order"])) if len(nodes) > SHOWN_NODES else []
    blocks = [_block(node) for node in mapped]
    met = dict.fromkeys(kind for block in blocks for kind in block["paths"])
    return {
        "summary": summary(nodes),
        "rows": found if choice.every else found[:SHOWN_NODES],
        "found": len(found),
        "there": len(nodes),
        "gpus": any((each.get("load") or {}).get("gpus") for each in told),
        "choice": choice,
        "blocks": blocks,
        "kinds": [(kind, _KINDS.get(kind) or named("phases", kind)["label"]) for kind in met],
    }


def _node(node: Json, small: bool, choice: Choice) -> dict[str, Any]:
    """A node with its words; ``urgency``: 0 comes first; ``summary``: the strip of cells, for screen readers."""
    ranks, name = node.get("ranks") or (), text(node.get("node")) or NONE
    state = named("nodes", node.get("state"))
    cells = [_cell(rank, state["key"] == "gone") for rank in ranks]
    steps, paces, slow = (
        [known for rank in ranks if (known := number(rank.get(each))) is not None]
        for each in ("step", "step_s", "slowdown")
    )
    paces = [pace for pace in paces if pace]
    metrics = text(node.get("metrics"))
    return {
        **node,
        "name": name,
        "order": natural(name),
        "host": text(node.get("host")),
        "state": state,
        "where": group_and_place(node),
        "urgency": _urgency(node, cells),
        "cells": cells,
        "summary": _summary(cells),
        "step": min(steps, default=None),
        "pace": median(paces) if paces else None,
        "slowest": max(slow, default=None),
        "metrics": f"{metrics}/metrics" if re.match(r"https?://[^/]", metrics) else "",
        "loads": loads(node.get("load") or {}),
        "tails": tails(node.get("tails")),
        "opened": bool(ranks) and small != (name in choice.turned),
    }


def loads(load: Json) -> list[dict[str, str]]:
    """The CPUs and GPUs of a node in words, each with what belongs beside it; for GPUs the mean and the sums."""
    gpus = load.get("gpus") or ()

    def memory(parts: Sequence[Json]) -> str:
        used, total = (sum(each.get(name) or 0 for each in parts) for name in ("used_bytes", "total_bytes"))
        return f"{size(used)} of {size(total)}" if total else ""

    return [
        {"busy": percent(load.get("cpu")), "memory": memory([load]), "of": f"{count(load.get('cpus'))} CPUs"},
        {
            "busy": percent(gpu_busy(load)),
            "memory": memory(gpus),
            "of": ", ".join(f"GPU {each['index']}: {percent(each.get('busy'))}, {memory([each])}" for each in gpus),
        },
    ]


def tails(told: Sequence[Json] | None) -> list[Json]:
    """The last lines of logs, with whose they are."""

    def of(numbers: Sequence[int]) -> str:
        return f"{'rank' if len(numbers) == 1 else 'ranks'} {ranges(numbers)}" if numbers else "workers without a rank"

    return [{**each, "of": of(each.get("ranks") or ())} for each in told or ()]


def _block(node: Json) -> dict[str, Any]:
    """Two rows of squares, or one of up to four, so that a node keeps its position."""
    many = len(node["cells"])
    wide = many if many <= 4 else (many + 1) // 2
    paths: dict[str, str] = {}
    for number, cell in enumerate(node["cells"]):
        kind = "trouble" if cell.trouble else cell.phase
        paths[kind] = paths.get(kind, "") + square(kind, number % wide * CELL, number // wide * CELL)
    high = -(-many // wide) if many else 1
    label = f"{node['name']}: {node['summary']}"
    return {"name": label, "width": max(1, wide) * CELL, "height": high * CELL, "paths": paths}


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


def summary(nodes: Sequence[Json]) -> str:
    """``512 nodes: 510 ready, 2 gone. 4,096 ranks: 4,088 training, 8 healing.``"""
    if not nodes:
        return "No node is there."
    states = _counted(node["state"]["label"] for node in nodes)
    doing = [cell.doing for node in nodes if node["state"]["key"] != "gone" for cell in node["cells"]]
    told = f" {counted(len(doing), 'rank')}: {_counted(doing)}." if doing else ""
    return f"{counted(len(nodes), 'node')}: {states}.{told}"


def _counted(words: Iterable[str]) -> str:
    """``7 training, 1 starting``: most frequent first; ties in order of appearance."""
    return ", ".join(f"{count(many)} {word}" for word, many in Counter(words).most_common())


def group_and_place(node: Json) -> str:
    """``group 1, place 0``; without a group ``place 0``."""
    known = ((name, number(node.get(name))) for name in ("group", "place"))
    return ", ".join(f"{name} {count(value)}" for name, value in known if value is not None)


def _urgency(node: Json, cells: Sequence[Cell]) -> int:
    state, age = text(node.get("state")), number(node.get("age_s"))
    tests = (
        state == "gone",
        any(cell.trouble in ("awaited", "still") for cell in cells),
        any(cell.trouble == "slow" for cell in cells),
        state not in ("gone", "done") and age is not None and age > UNHEARD_S,
        state not in ("ready", "done"),
        not node.get("in_round"),
    )
    return next((index for index, true in enumerate(tests) if true), len(tests))


def trouble(rank: Json) -> str:
    """How a rank stalls (a state.Stall), ``slow``, or empty."""
    if (stall := text(rank.get("stall"))) in IN_WORDS:
        return stall
    return "slow" if rank.get("straggler") else ""


def remark(rank: Json) -> str:
    """What is said of the trouble in a rank's row."""
    kind = trouble(rank)
    return IN_WORDS.get(kind, kind).format(duration(rank.get("still_s")))


def _cell(rank: Json, gone: bool) -> Cell:
    phase, kind = named("phases", rank.get("phase")), trouble(rank)
    name = f"rank {count(rank.get('rank'))}"
    if gone:
        return Cell("gone", TIMES, "", "gone", f"{name} gone")
    if kind == "waits":
        return Cell(phase["key"], "W", "", "waiting for others", f"{name} waiting for others")
    doing = phase["label"] + _DOING.get(kind, "")
    return Cell(phase["key"], "!" if kind else phase["mark"], kind, doing, f"{name} {doing}")


def _summary(cells: Sequence[Cell]) -> str:
    """Counts ranks in equal states, and names those in trouble."""
    if not cells:
        return "no ranks"
    calm = _counted(cell.doing for cell in cells if not cell.trouble)
    troubled = listed([cell.label for cell in cells if cell.trouble])
    return f"{counted(len(cells), 'rank')}: {'; '.join(part for part in (calm, troubled) if part)}"


# ---- the sentences of one run

ENDED: Final = ("stopped", "succeeded", "failed")
MOST_SAMPLES: Final = 12
"""Rows of the table of curves."""


def headline(snapshot: Json) -> str:
    """Round, ranks, nodes and their limits in one sentence."""
    size_now = number(snapshot["world_size"])
    least, most = number(snapshot["min_nodes"]), number(snapshot["max_nodes"])
    allowed = ""
    if least is not None and most is not None:
        allowed = f", {count(least)} to {count(most)} nodes allowed"
        allowed = f", {counted(int(most), 'node')} needed" if least == most else allowed
    if (size := number(snapshot["shard_nodes"]) or 1) > 1:
        allowed += f" in shard groups of {count(size)}"
    if last := snapshot["last"]:
        took = number(last.get("duration_s"))
        after = f" It took {duration(took)} from the first round to the end." if took else ""
        ranks, nodes = (int(number(last.get(name)) or 0) for name in ("world_size", "nodes"))
        there = f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}"
        return f"Round {count(last.get('number'))} was the last: {there}{allowed}.{after}"
    if not size_now:
        return f"No round at present{allowed}."
    where = f"Round {count(snapshot['round'])}: " if number(snapshot["round"]) is not None else ""
    return f"{where}{counted(int(size_now), 'rank')} on {counted(within(snapshot), 'node')}{allowed}."


def within(snapshot: Json) -> int:
    """The number of nodes in the round."""
    return sum(1 for node in snapshot["nodes"] or () if node.get("in_round"))


def since(snapshot: Json, now: float) -> float | None:
    """Seconds that the run has been in its state. A monitor that started later uses the journal."""
    seconds = number(snapshot["state_s"])
    if seconds is not None:
        return seconds
    journal = snapshot["rounds"] or ()
    wall = number(journal[-1].get("wall")) if journal else None
    return None if wall is None else max(0.0, now - wall)


def attention(snapshot: Json) -> list[dict[str, str]]:
    """What needs attention now, the worst first, and then which nodes come, leave or wait; look: bad, warn or busy."""
    told = [
        (each.get("look"), text(each.get("sentence")) or text(each.get("words")))
        for each in snapshot["attention"] or ()
    ]
    found = [(look if look in ("bad", "warn") else "warn", words) for look, words in told]
    every = snapshot["nodes"] or () if text(snapshot["state"]) not in ENDED else ()
    for state in ("warming", "draining", "finishing"):
        of = [text(node.get("node")) for node in every if text(node.get("state")) == state]
        if of:
            found.append(("busy", f"{listed(of)} {'is' if len(of) == 1 else 'are'} {NAMES['nodes'][state]['label']}."))
    idle = [n for n in every if text(n.get("state")) == "ready" and not n.get("in_round")]
    waiting = [text(n.get("node")) + (f" ({place})" if (place := group_and_place(n)) else "") for n in idle]
    if waiting:
        verb = "is" if len(waiting) == 1 else "are"
        found.append(("busy", f"{listed(waiting)} {verb} ready and not in the round."))
    return [{"look": look, "words": words} for look, words in found]


def calm(snapshot: Json) -> str:
    """The text if nothing needs attention; states only known facts."""
    state, left = text(snapshot["state"]), snapshot["departure"] or {}
    if not (snapshot["store"] or {}).get("connected", True):
        return "Unknown: the monitor cannot reach the store."
    if state == "stopped":
        return f"Stopped on request ({text(left.get('reason')) or 'by its nodes'}). It continues when nodes join."
    if state in ENDED:
        return "The run has ended."
    if state in ("training", "changing"):
        return "Nothing: no node is missing, no rank is slow."
    return "Nothing yet: nodes are joining." if state == "gathering" else "Nothing: the next round is forming."


def worst(look: str, attention: Sequence[Json]) -> str:
    """The look of the page: that of the state, or of a worse note."""
    first = attention[0]["look"] if attention else look
    return first if first == "bad" or (first == "warn" and look != "bad") else look


def slices(snapshot: Json) -> list[Share]:
    """The time of all ranks by phase, in the order of ``names.json``, unknown phases last."""
    seconds = {text(k): s for k, v in (snapshot["seconds"] or {}).items() if (s := number(v)) and s > 0}
    order = [*(name for name in NAMES["phases"] if name in seconds), *(n for n in seconds if n not in NAMES["phases"])]
    return shares({name: seconds[name] for name in order})


# ---- the curves

_CURVES: Final = ("step", "loss", "step_s", "world_size")


def points(snapshot: Json) -> list[list[Any]]:
    """The points of all curves, oldest first: when, step, loss, step time, ranks."""
    curves = snapshot["curves"] or {}
    columns = [curves.get(name) or [] for name in _CURVES]
    return [
        [wall, *(column[index] if index < len(column) else None for column in columns)]
        for index, wall in enumerate(curves.get("wall") or [])
    ]


def samples(snapshot: Json) -> list[list[Any]]:
    """Some of the points for a short table, newest first."""
    every = points(snapshot)
    apart = 1
    while len(every) > apart * (MOST_SAMPLES - 1):
        apart *= 2  # so that rows do not change as points arrive
    return [*every[: len(every) - 1 : apart], every[-1]][::-1] if every else []


def course(snapshot: Json, now: float) -> tuple[str, ...]:
    """The data of the curves, one JSON value per line: first the rest, then the points, oldest first."""
    rounds = [
        [count(span.first.get("number")), begun, span.end, number(span.first.get("world_size")) or 0, span.lasts]
        for span in spans(snapshot)
        if (begun := number(span.first.get("wall"))) is not None
    ]
    incidents = [_mark(each) for each in reversed(snapshot["incidents"] or ()) if number(each.get("wall"))]
    store = snapshot["store"] or {}
    known_at = now if store.get("connected", True) else now - (number(store.get("age_s")) or 0.0)
    head = {"now": known_at, "ended": text(snapshot["state"]) in ENDED}
    drawn = ([_short(wall, 11), *map(_short, values)] for wall, *values in points(snapshot))
    known = [point for point in drawn if point[0] is not None]
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


# ---- pages and their updates

Edit = tuple[int, int, Sequence[str]]
"""A line number, the number of lines removed there, and the lines that replace them."""


@dataclass(frozen=True, slots=True)
class Update:
    """``view`` is HTML; ``course`` has a JSON value in each line, from which the curves are drawn."""

    view: tuple[str, ...]
    course: tuple[str, ...] = ()
    store: Json | None = None
    """Whether the store answers, and the age of the data."""


NOTHING: Final = Update((), ())
ALL: Final = Choice()


def message(now: Update, before: Update = NOTHING) -> bytes:
    """The JSON that turns ``before`` into ``now``."""
    found: dict[str, Any] = {"view": edits(before.view, now.view), "course": edits(before.course, now.course)}
    if before is NOTHING:
        found["full"] = True
    return json.dumps({**found, "store": now.store}, ensure_ascii=False, separators=(",", ":")).encode()


def edits(before: Sequence[str], now: Sequence[str]) -> list[Edit]:
    """The edits from the last line to the first, so that the remaining line numbers stay valid."""
    same = _matching if len(before) == len(now) else _moved
    return [(start, end - start, now[low:high]) for start, end, low, high in same(before, now)][::-1]


def _matching(before: Sequence[str], now: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    start = None
    for index, (old, new) in enumerate(zip(before, now, strict=True)):
        if old != new and start is None:
            start = index
        elif old == new and start is not None:
            yield start, index, start, index
            start = None
    if start is not None:
        yield start, len(now), start, len(now)


def _moved(before: Sequence[str], now: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    for tag, start, end, low, high in SequenceMatcher(None, before, now).get_opcodes():
        if tag != "equal":
            yield start, end, low, high


def runs_update(listing: Json, choice: Choice = ALL) -> Update:
    """The update of the list of runs (``/api/runs``): of those in whose name, state or needs ``choice.find`` stands."""
    runs = _runs(listing)
    shown = [each for each in runs if choice.find.lower() in _said_of(each)]
    states = Counter(named("states", each["state"])["label"].lower() for each in runs)
    told = ", ".join(f"{many} {state}" for state, many in states.most_common())
    sick = sum(1 for each in runs if each["attention"])
    look = f" {sick} {'needs' if sick == 1 else 'need'} attention." if sick else ""
    content = _render(
        "runs_view.html",
        now=_now(listing),
        runs=shown,
        many=len(runs) > MANY_RUNS,
        find=choice.find,
        counted_runs=counted(len(shown), "run"),
        counted=f"{counted(len(runs), 'run')}: {told}.{look}" if runs else "No run is in the store.",
        title=_title(runs),
        stale=_stale(listing),
        root="",
    )
    return Update(tuple(content.splitlines()), store=listing.get("store"))


def _said_of(run: Json) -> str:
    needs = (text(each.get("words")) for each in run["attention"] or ())
    return " ".join((text(run["run"]), named("states", run["state"])["label"], *needs)).lower()


def _runs(listing: Json) -> list[Json]:
    return [_nothing(RunSummary) | dict(each) for each in listing.get("runs") or ()]


@cache
def _nothing(kind: type[RunSummary] | type[RunSnapshot]) -> dict[str, Any]:
    return dict.fromkeys(each.name for each in fields(kind))


def _title(runs: Sequence[Json]) -> str:
    sick = sum(1 for each in runs if each["attention"])
    return f"({sick}) Runs" if sick else "Runs"


def run_update(snapshot: Json, choice: Choice = ALL) -> Update:
    """The update of one run (``/api/runs/<run>``)."""
    snapshot, now = _nothing(RunSnapshot) | dict(snapshot), _now(snapshot)
    lasted, notes = since(snapshot, now), attention(snapshot)
    state, stale = named("states", snapshot["state"]), _stale(snapshot)
    if stale:
        state = {**state, "look": "other", "label": f"{state['label']} when last seen"}
    happened = faults(snapshot)
    content = _render(
        "run_view.html",
        root="../",
        now=now,
        s=snapshot,
        run=text(snapshot["run"]),
        state=state,
        since=lasted,
        headline=headline(snapshot),
        attention=notes,
        worst=worst(state["look"], notes),
        calm=calm(snapshot),
        last_lines=tails(snapshot["last_lines"]),
        incidents=[incident_row(each) for each in happened[:MOST_ROWS]],
        steps_lost=[steps for each in happened if (steps := number(each.get("steps_lost")))],
        faults=len(happened),
        within=within(snapshot),
        rounds=spans(snapshot)[::-1][:MOST_ROWS],
        nodes=node_table(snapshot, choice),
        slices=slices(snapshot),
        samples=samples(snapshot),
    )
    return Update(tuple(content.splitlines()), course(snapshot, now), snapshot["store"])


def runs_page(listing: Json, choice: Choice = ALL) -> str:
    """The list as a page."""
    return _page(_title(_runs(listing)), "", listing, runs_update(listing, choice))


def run_page(snapshot: Json, choice: Choice = ALL) -> str:
    """One run as a page."""
    run = text(snapshot.get("run"))
    title = f"{named('states', snapshot.get('state'))['label']}: {run}"
    return _page(title, run, snapshot, run_update(snapshot, choice))


def _page(title: str, run: str, told: Json, update: Update) -> str:
    root, content = "../" if run else "", "\n".join(update.view)
    return _render("page.html", title=title, root=root, run=run, content=content, stale=_stale(told))


def _now(told: Json) -> float:
    wall = number(told.get("wall"))
    return SYSTEM.wall() if wall is None else wall


def _stale(told: Json) -> str:
    """A sentence if the store does not answer, otherwise empty."""
    store = told.get("store") or {}
    if store.get("connected", True):
        return ""
    return f"The monitor cannot reach the store: this page is {duration(store.get('age_s'))} old."


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    loader = PackageLoader(__package__, "templates")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {each.__name__: each for each in (ago, count, duration, lasting, measure, number, percent, size)}
    made.filters |= {"times": times, "stamp": stamp, "share": lambda share: f"{fixed(share * 100, 3)}%"}
    made.filters |= {"quoted": lambda run: quote(text(run), safe="")}
    made.globals |= {each.__name__: each for each in (change, counted, gauge_text, how_far, named, present, remark)}
    made.globals |= {
        "square": square,
        "trouble": trouble,
        "what_of": what_of,
        "verdict_words": verdict_words,
        "gauges": GAUGES,
        "none_known": NONE,
    }
    return made


# ---- files

TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


def static(name: str) -> tuple[bytes, str] | None:
    """The content and the content type of ``name`` (``page.css``); None if there is no such file.

    Serves only names found in the package, so no name can escape it.
    """
    path = _every().get(name)
    return None if path is None else (path.read_bytes(), TYPES[PurePosixPath(name).suffix])


@cache
def _every() -> dict[str, Traversable]:
    found = files(__package__).joinpath("static").iterdir()
    return {each.name: each for each in found if PurePosixPath(each.name).suffix in TYPES}
