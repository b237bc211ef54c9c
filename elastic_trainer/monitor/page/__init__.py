"""The status page: the list of runs, and one run with its nodes, curves and incidents.

All words and rows are written here. Pages are complete without JavaScript; with it, ``static/page.js`` mounts later
updates and draws the curves. All links are relative, so the pages work below any path: the list at ``/``, a run at
``/runs/<run>``, each with ``update`` and a run with ``stream`` below it, files at ``/static/``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from elastic_trainer.clock import SYSTEM
from elastic_trainer.monitor.page import view
from elastic_trainer.monitor.page.view import (
    NONE,
    Choice,
    Json,
    Moment,
    ago,
    count,
    duration,
    incidents,
    lasting,
    measure,
    moment,
    named,
    number,
    percent,
    rounds,
    square,
    table,
    text,
    what_of,
)
from elastic_trainer.telemetry.families import GAUGES

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
    place = _every().get(name)
    return None if place is None else (place.read_bytes(), TYPES[PurePosixPath(name).suffix])


@cache
def _every() -> dict[str, Traversable]:
    found = files(__package__).joinpath("static").iterdir()
    return {each.name: each for each in found if PurePosixPath(each.name).suffix in TYPES}


Edit = tuple[int, int, Sequence[str]]
"""A line number, the number of lines removed there, and the lines that replace them."""


@dataclass(frozen=True, slots=True)
class Update:
    """``view`` is HTML; ``course`` has a JSON value in each line, from which the curves are drawn."""

    view: tuple[str, ...]
    course: tuple[str, ...] = ()
    store: Mapping[str, Any] | None = None
    """Whether the store answers, and the age of the data."""


NOTHING: Final = Update((), ())


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
    for place, (old, new) in enumerate(zip(before, now, strict=True)):
        if old != new and start is None:
            start = place
        elif old == new and start is not None:
            yield start, place, start, place
            start = None
    if start is not None:
        yield start, len(now), start, len(now)


def _moved(before: Sequence[str], now: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    for tag, start, end, low, high in SequenceMatcher(None, before, now).get_opcodes():
        if tag != "equal":
            yield start, end, low, high


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run, in words."""

    run: str
    link: str
    state: Mapping[str, str]
    state_for: str
    needs: str
    """The concerns; empty if nothing needs attention."""
    look: str
    """The worst look of the concerns."""
    step: str
    loss: str
    ranks: str
    nodes: str
    goodput: str
    last: str
    last_when: Moment


def rows(listing: Json) -> list[RunRow]:
    """The rows, in the order of the list."""
    return [_row(each) for each in listing.get("runs") or ()]


def _row(each: Json) -> RunRow:
    run, last = text(each.get("run")), each.get("last_incident")
    concerns = each.get("attention") or ()
    return RunRow(
        run=run or NONE,
        link=f"runs/{quote(run, safe='')}",
        state=named("states", each.get("state")),
        state_for=lasting(each.get("state_s")) if number(each.get("state_s")) is not None else "",
        needs=", ".join(text(concern.get("words")) for concern in concerns),
        look=text(concerns[0].get("look")) if concerns else "",
        step=count(each.get("step")),
        loss=measure(each.get("loss")),
        ranks=count((each.get("last") or each).get("world_size")),
        nodes=_nodes(each),
        goodput=percent(each.get("goodput")),
        last=what_of(last)["label"] if last else "none",
        last_when=moment(last.get("wall") if last else None),
    )


def _nodes(each: Json) -> str:
    """``3 of 2 to 4``: present and allowed nodes."""
    least, most = number(each.get("min_nodes")), number(each.get("max_nodes"))
    there = number((each.get("last") or each).get("nodes"))  # of a run that has ended those that trained last
    allowed = f"{count(least)} to {count(most)}" if least is not None and most is not None else ""
    if there is None:
        return allowed or NONE
    return f"{count(there)} of {allowed}" if allowed else count(there)


def counted(found: list[RunRow]) -> str:
    """``3 runs: 2 training, 1 failed.``"""
    if not found:
        return "No run is in the store."
    many: dict[str, int] = {}
    for row in found:
        many[row.state["label"].lower()] = many.get(row.state["label"].lower(), 0) + 1
    told = ", ".join(f"{times} {state}" for state, times in sorted(many.items(), key=lambda item: -item[1]))
    sick = sum(1 for row in found if row.needs)
    look = f" {sick} {'needs' if sick == 1 else 'need'} attention." if sick else ""
    return f"{len(found)} {'run' if len(found) == 1 else 'runs'}: {told}.{look}"


def title(found: list[RunRow]) -> str:
    """The page title, with the number of runs that need attention."""
    sick = sum(1 for row in found if row.needs)
    return f"({sick}) Runs" if sick else "Runs"


ALL: Final = Choice()


def runs_update(listing_: Json) -> Update:
    """The update of the list of runs (``/api/runs``)."""
    found = rows(listing_)
    content = _render(
        "runs_view.html",
        now=_now(listing_),
        rows=found,
        counted=counted(found),
        title=title(found),
        stale=_stale(listing_),
        root="",
    )
    return Update(tuple(content.splitlines()), store=listing_.get("store"))


def run_update(snapshot: Json, choice: Choice = ALL) -> Update:
    """The update of one run (``/api/runs/<run>``)."""
    now = _now(snapshot)
    since, attention = view.since(snapshot, now), view.attention(snapshot)
    state, stale = named("states", snapshot.get("state")), _stale(snapshot)
    if stale:
        state = {**state, "look": "other", "label": f"{state['label']} when last seen"}
    content = _render(
        "run_view.html",
        root="../",
        now=now,
        run=text(snapshot.get("run")),
        state=state,
        state_for=None if since is None else lasting(since),
        since=moment(None if since is None else now - since),
        headline=view.headline(snapshot),
        reason=text(snapshot.get("round_reason")),
        figures=view.figures(snapshot),
        attention=attention,
        worst=view.worst(state["look"], attention),
        goodput=view.goodput(snapshot),
        calm=view.calm(snapshot),
        incidents=incidents(snapshot),
        rounds=rounds(snapshot, now),
        nodes=table(snapshot, choice),
        gauges=GAUGES,
        square=square,
        slices=view.slices(snapshot),
        checkpoint=view.checkpoint(snapshot.get("checkpoint")),
        samples=view.samples(snapshot),
    )
    return Update(tuple(content.splitlines()), view.course(snapshot, now), snapshot.get("store"))


def runs_page(listing_: Json) -> str:
    """The list as a page."""
    return _page(title(rows(listing_)), "", listing_, runs_update(listing_))


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
    environment = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["ago"] = ago
    return environment


__all__ = ["NOTHING", "Choice", "Update", "message", "run_page", "run_update", "runs_page", "runs_update", "static"]
