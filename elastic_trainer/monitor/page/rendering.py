"""The pages as HTML, from the JSON that the browser also gets.

The templates escape all that they insert. The output is well-formed XML too, which the tests use.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from elastic_trainer.clock import SYSTEM
from elastic_trainer.monitor.page import history, listing, nodes, view
from elastic_trainer.monitor.page.nodes import Json
from elastic_trainer.monitor.page.words import ago, duration, lasting, named, number, text


def runs_page(listing_: Json) -> str:
    """The list of all runs (``/api/runs``)."""
    now = _now(listing_)
    found = listing.rows(listing_)
    return _render("runs.html", now=now, rows=found, counted=listing.counted(found), stale=_stale(listing_))


def run_page(snapshot: Json) -> str:
    """One run (``/api/runs/<run>``)."""
    now, rows = _now(snapshot), nodes.rows(snapshot)
    since, attention = view.since(snapshot, now), view.attention(snapshot)
    state = named("states", snapshot.get("state"))
    return _render(
        "run.html",
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
        ended=text(snapshot.get("state")) in view.ENDED,
        incidents=history.incidents(snapshot),
        rounds=history.rounds(snapshot, now),
        nodes=rows,
        nodes_summary=nodes.summary(rows),
        slices=view.slices(snapshot),
        checkpoint=view.checkpoint(snapshot.get("checkpoint")),
        samples=view.samples(snapshot),
        stale=_stale(snapshot),
    )


def _now(told: Json) -> float:
    wall = number(told.get("wall"))
    return SYSTEM.wall() if wall is None else wall


def _stale(told: Json) -> str:
    """The sentence for a store that does not answer, else nothing."""
    store = told.get("store") or {}
    if store.get("connected", True):
        return ""
    return f"The monitor does not reach the store: what you see is {duration(store.get('age_s'))} old."


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
