"""The list of runs as rows of the status page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from elastic_trainer.monitor.page.history import Json, Moment, moment, what_of
from elastic_trainer.monitor.page.words import (
    NONE,
    count,
    lasting,
    measure,
    named,
    number,
    percent,
    text,
)


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
