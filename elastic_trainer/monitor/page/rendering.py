"""Renders the pages as HTML, from the values of ``/api``.

The templates escape all inserted values. The output is also well-formed XML, which the tests use.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from elastic_trainer.clock import SYSTEM
from elastic_trainer.monitor.page import history, listing, nodes, view
from elastic_trainer.monitor.page.nodes import Choice, Json
from elastic_trainer.monitor.page.updates import Update
from elastic_trainer.monitor.page.words import ago, duration, lasting, named, number, text
from elastic_trainer.telemetry.rank import GAUGES

ALL: Final = Choice()


def runs_update(listing_: Json) -> Update:
    """The update of the list of runs (``/api/runs``)."""
    rows = listing.rows(listing_)
    content = _render(
        "runs_view.html",
        now=_now(listing_),
        rows=rows,
        counted=listing.counted(rows),
        title=listing.title(rows),
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
        since=history.moment(None if since is None else now - since),
        headline=view.headline(snapshot),
        reason=text(snapshot.get("round_reason")),
        figures=view.figures(snapshot),
        attention=attention,
        worst=view.worst(state["look"], attention),
        goodput=view.goodput(snapshot),
        calm=view.calm(snapshot),
        incidents=history.incidents(snapshot),
        rounds=history.rounds(snapshot, now),
        nodes=nodes.table(snapshot, choice),
        gauges=GAUGES,
        square=nodes.square,
        slices=view.slices(snapshot),
        checkpoint=view.checkpoint(snapshot.get("checkpoint")),
        samples=view.samples(snapshot),
    )
    return Update(tuple(content.splitlines()), view.course(snapshot, now), snapshot.get("store"))


def runs_page(listing_: Json) -> str:
    """The list as a page."""
    return _page(listing.title(listing.rows(listing_)), "", listing_, runs_update(listing_))


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
