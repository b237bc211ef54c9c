"""The contents of one run's page, from its snapshot.

The snapshot is outside data: any number may be null, and a state or cause may be unknown to this version.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.monitor.model.attention import OVERDUE
from elastic_trainer.monitor.page import history, nodes
from elastic_trainer.monitor.page.nodes import Json
from elastic_trainer.monitor.page.words import (
    NAMES,
    NONE,
    ago,
    count,
    duration,
    listed,
    measure,
    named,
    number,
    percent,
    size,
    text,
)
from elastic_trainer.wording import counted, fixed

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
        _lost(history.faults(snapshot)),
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
    """What needs attention now, the worst first; empty once the run has ended."""
    if text(snapshot.get("state")) in ENDED:
        return []
    every = snapshot.get("nodes") or ()
    found = [*_missing(snapshot, every), *_slow(every), *_late(snapshot.get("checkpoint") or {})]
    found += [*_judged(snapshot), *_unreadable(snapshot), *_aside(every)]
    order = {"bad": 0, "warn": 1, "busy": 2}
    return sorted(found, key=lambda note: order[note.look])


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


def _missing(snapshot: Json, every: Sequence[Json]) -> list[Note]:
    there = sum(1 for node in every if text(node.get("state")) not in ("gone", "done"))
    least = number(snapshot.get("min_nodes"))
    found = []
    if least is not None and there < least:
        found.append(Note("bad", f"{counted(there, 'node is', 'nodes are')} present, training needs {count(least)}."))
    left = snapshot.get("departure")
    if left and text(snapshot.get("state")) == "abandoned":
        why = f"{text(left.get('reason'))} (exit code {count(left.get('exit_code'))})"
        found.append(
            Note("bad", f"Node {text(left.get('node'))} was the last and gave up: {why}. Start nodes to continue.")
        )
    lost = [text(name) for name in snapshot.get("lost") or () if text(name) not in {n.get("node") for n in every}]
    if lost:
        found.append(
            Note("warn", f"{counted(len(lost), 'node was', 'nodes were')} lost and not replaced: {listed(lost)}.")
        )
    gone = [node for node in every if text(node.get("state")) == "gone"]
    if gone:
        look = "bad" if any(node.get("in_round") for node in gone) else "warn"
        found.append(Note(look, f"{counted(len(gone), 'node is', 'nodes are')} gone: {listed(_heard(gone))}."))
    silent = [node for node in every if nodes.unheard(node)]
    if silent:
        found.append(Note("warn", f"{counted(len(silent), 'node is', 'nodes are')} silent: {listed(_heard(silent))}."))
    return found


def _heard(of: Sequence[Json]) -> list[str]:
    return [f"{text(node.get('node'))} (heard {ago(node.get('age_s'))})" for node in of]


def _slow(every: Sequence[Json]) -> list[Note]:
    ranks = [
        (text(node.get("node")), rank)
        for node in every
        if text(node.get("state")) != "gone"
        for rank in node.get("ranks") or ()
    ]
    found = []
    for stall, one, many in (
        (
            "awaited",
            "rank makes no progress, the others wait for it",
            "ranks make no progress, the others wait for them",
        ),
        ("still", "rank makes no progress", "ranks make no progress"),
    ):
        told = [
            f"rank {count(rank.get('rank'))} on {node} ({named('phases', rank.get('phase'))['label']}, for"
            f" {duration(rank.get('still_s'))})"
            for node, rank in ranks
            if text(rank.get("stall")) == stall
        ]
        if told:
            found.append(Note("bad", f"{counted(len(told), one, many)}: {listed(told)}."))
    slow = [(node, rank) for node, rank in ranks if rank.get("straggler") and not rank.get("stall")]
    if slow:
        told = [f"rank {count(r.get('rank'))} on {node}{_ratio(r)}" for node, r in slow]
        found.append(Note("warn", f"{counted(len(slow), 'rank is', 'ranks are')} slow: {listed(told)}."))
    return found


def _ratio(rank: Json) -> str:
    slowdown = number(rank.get("slowdown"))
    return "" if slowdown is None else f" ({fixed(slowdown, 1)} times as long)"


def _late(saved: Json) -> list[Note]:
    age, every = number(saved.get("age_s")), number(saved.get("interval_s"))
    if age is None or not every or age <= OVERDUE * every:
        return []
    return [Note("warn", f"The last checkpoint is {duration(age)} old; one is due every {duration(every)}.")]


def _judged(snapshot: Json) -> list[Note]:
    """What the list of runs says as well, in the same words."""
    told = (
        (each.get("look"), text(each.get("words"))) for each in snapshot.get("attention") or () if each.get("whole")
    )
    return [
        Note(look if look in ("bad", "warn") else "warn", f"{words[:1].upper()}{words[1:]}.") for look, words in told
    ]


def _unreadable(snapshot: Json) -> list[Note]:
    keys = [text(key) for key in snapshot.get("unreadable") or ()]
    if not keys:
        return []
    return [Note("warn", f"{counted(len(keys), 'document is', 'documents are')} of another version: {listed(keys)}.")]


def _aside(every: Sequence[Json]) -> list[Note]:
    """Nodes that are joining or leaving, or that wait."""
    found = []
    for state in ("warming", "draining", "finishing"):
        of = [text(node.get("node")) for node in every if text(node.get("state")) == state]
        if of:
            verb = "is" if len(of) == 1 else "are"
            found.append(Note("busy", f"{listed(of)} {verb} {NAMES['nodes'][state]['label']}."))
    idle = [n for n in every if text(n.get("state")) == "ready" and not n.get("in_round")]
    waiting = [text(n.get("node")) + (f" ({place})" if (place := nodes.group_and_place(n)) else "") for n in idle]
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
            history.moment(walls[place]),
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
        for span in history.spans(snapshot)
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
    what, took, reason = history.what_of(each), number(each.get("total_s")) or 0, text(each.get("reason"))
    words = f"{what['label']}{f', {duration(took)}' if took else ''}{f': {reason}' if reason else ''}"
    noticed = sum(number(each.get(name)) or 0 for name in ("before_s", "detect_s")) if took else 0
    return {"wall": each["wall"] - noticed, "took": took, "look": what["look"], "words": words}


def _at(curves: Json, name: str, place: int) -> Any:
    values = curves.get(name) or []
    return values[place] if place < len(values) else None
