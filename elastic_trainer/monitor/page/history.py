"""Rounds and incidents of a snapshot as rows of the status page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.monitor.page.words import NONE, count, duration, listed, named, number, stamp, text
from elastic_trainer.wording import fixed

Json = Mapping[str, Any]

SHOWN: Final = 100
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
    return [_incident(each) for each in faults(snapshot)[:SHOWN]]


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
    return [_round(each, now) for each in spans(snapshot)][::-1][:SHOWN]


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
