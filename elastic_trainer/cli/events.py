"""``elastic-trainer events RUN``: what happened to a run, one line each, and what is happening; or all about one round.

*Runs in* the process of the command; with ``--follow`` changes arrive on the watches' threads and wait in a queue.
*Fails by* ConfigError for a run or round that is not there, StoreUnavailableError when etcd does not answer at the
start; later outages are waited out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from queue import Empty
from typing import Any

from elastic_trainer.cli import connection
from elastic_trainer.cli.main import at_least, output_options, written
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, StoreUnavailableError
from elastic_trainer.membership.documents import DocumentError, Incident, JournalEntry
from elastic_trainer.monitor.reading import Changes, RunFeed
from elastic_trainer.store.api import KeyValue, RunKeys, Store
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry import logs
from elastic_trainer.wording import counted, moment, named, number, ranges

DEFAULT_LIMIT = 100
KEPT = 2000
"""More than the store keeps of a run."""
_WAIT_S = 0.5

Happening = JournalEntry | Incident


def configure_events(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    connection.add_run(parser)
    add(
        "--follow",
        action="store_true",
        help="go on with what happens from now on, through outages of etcd, until interrupted",
    )
    output_options(parser)
    add("--incident", type=int, metavar="ROUND", help="all that is known of how this round ended, for a post-mortem")
    add("--limit", type=int, default=DEFAULT_LIMIT, metavar="N", help=f"newest lines (default: {DEFAULT_LIMIT})")
    connection.add_options(parser)


def run_events(arguments: argparse.Namespace) -> int:
    """Print them, the oldest first."""
    limit = at_least(1, arguments.limit, "--limit")
    if arguments.incident is not None and arguments.follow:
        raise ConfigError("--incident shows the past, --follow what happens from now on", hint="give one of them")
    logs.configure()
    with connection.opened(arguments, arguments.run) as (store, settings):
        keys = RunKeys(settings.prefix, arguments.run)
        expect = connection.await_run if arguments.follow else connection.require_run
        expect(store, settings, keys)
        show = {"json": as_json, "yaml": as_yaml, None: as_line}[arguments.output]
        if arguments.incident is not None:
            output = arguments.output
            text = report(arguments.run, arguments.incident, past(store, keys, KEPT), as_json=output is not None)
            print(written(json.loads(text), output) if output == "yaml" else text, flush=True)
            return 0
        if not arguments.follow:
            _print(map(show, past(store, keys, limit)))
            return 0
        news = News(store, keys)
        _print(map(show, in_order(news.read_first(Deadline.after(connection.CONNECT_S)))[-limit:]))
        while True:
            _print(map(show, in_order(news.take(_WAIT_S))))


def past(store: Store, keys: RunKeys, limit: int) -> list[Happening]:
    """The newest transitions and incidents, the oldest of them first."""
    feed = RunFeed(store, keys, journal=limit, incidents=limit)
    documents = feed.read_history(Deadline.after(connection.CONNECT_S))
    return in_order([*documents.journal, *documents.incidents])[-limit:]


def in_order(happened: Iterable[Happening]) -> list[Happening]:
    """By the time that each node gave; the order of what one node wrote stays."""
    return sorted(happened, key=lambda each: each.wall)


class News:
    """Follows journal and incidents."""

    def __init__(self, store: Store, keys: RunKeys) -> None:
        self._keys, self._changes = keys, Changes(store, keys.events, keys.incidents)

    def read_first(self, deadline: Deadline) -> list[Happening]:
        """All that there is; StoreUnavailableError if it does not come by the deadline."""
        found: list[Happening] = []
        complete = 0
        while complete < 2:
            try:
                item, _ = self._changes.queue.get(timeout=deadline.remaining_s())
            except Empty as error:
                raise StoreUnavailableError("etcd does not send what happened to the run") from error
            complete += item is None
            found += self._decoded(item)
        return found

    def take(self, wait_s: float) -> list[Happening]:
        """What came since, waiting at most ``wait_s`` seconds for it."""
        try:
            found = self._decoded(self._changes.queue.get(timeout=wait_s)[0])
        except Empty:
            return []
        while not self._changes.queue.empty():
            found += self._decoded(self._changes.queue.get()[0])
        return found

    def _decoded(self, item: KeyValue | None) -> list[Happening]:
        if item is None:
            return []
        kind = JournalEntry if item.key.startswith(self._keys.events) else Incident
        try:
            return [kind.decode(item.value, item.key)]
        except DocumentError as error:
            logs.logger().warning("document.refused", key=plain(item.key), error=str(error))
            return []


def as_json(each: Happening) -> str:
    """One JSON object: ``type`` and the document's fields."""
    (values,) = _values([each])
    if isinstance(each, Incident):
        return json.dumps({"type": "incident", **values, "total_s": each.total_s, "outcome": each.outcome})
    return json.dumps({"type": "transition", **values})


def as_yaml(each: Happening) -> str:
    """That as an element of a list, so that all lines are one document."""
    return written([json.loads(as_json(each))], "yaml")


def as_line(each: Happening) -> str:
    """One line: when, what, why."""
    because = f": {each.reason or 'no reason given'}"
    if isinstance(each, JournalEntry):
        size = f"{counted(len(each.nodes), 'node')}, {counted(each.world_size, 'rank')}"
        return f"{moment(each.wall)}  round {each.round} {each.state} ({size}){because}"
    nodes = f" [{named(each.nodes)}]" if each.nodes else ""
    outcome = f". {each.outcome}" if each.outcome else ""
    verdict = f" Verdict: {_judged(each)}" if each.verdict is not None and not each.planned else ""
    return f"{moment(each.wall)}  {headline(each)}{because}{nodes}{outcome}{verdict}"


def _judged(each: Incident) -> str:
    """The verdict, in words; empty where there is none."""
    found = each.verdict
    return f"{found.sentence} ({found.culprit}, {found.certainty})" if found is not None else ""


def headline(incident: Incident) -> str:
    """What happened, and what it did to training."""
    what = str(incident.cause) if incident.cause is not None else incident.kind
    if incident.kind != "round":
        return f"{what} in round {incident.round}, step {incident.step}"
    if incident.next_round is None:
        return f"{what}, round {incident.round}, {counted(incident.world_before, 'rank')}"
    size = f"{incident.world_before} -> {counted(incident.world_after, 'rank')}"
    return f"{what}, round {incident.round} -> {incident.next_round}, {size}"


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


# ---- the report of one round


def report(run: str, number: int, happened: Sequence[Happening], *, as_json: bool = False) -> str:
    """All about round ``number`` of ``run``, for a post-mortem: its incidents, and the transitions of it and of the one
    that followed. A page with a table for each incident, or one JSON object; ConfigError where no incident is known."""
    known = [each for each in happened if isinstance(each, Incident)]
    incidents = [each for each in known if each.round == number]
    if not incidents:
        rounds = ranges(each.round for each in known)
        hint = f"there are some of rounds {rounds}" if rounds else "the run has had none"
        raise ConfigError(f"no incident of round {number} of run {run!r} is known", hint=hint)
    followed = {number, *(each.next_round for each in incidents)}
    transitions = [each for each in happened if isinstance(each, JournalEntry) and each.round in followed]
    if as_json:
        told = {"incidents": _values(incidents), "transitions": _values(transitions)}
        return json.dumps({"run": run, "round": number, **told}, indent=2)
    sections = [f"# Run {run}, round {number}"]
    for each in incidents:
        what = (str(each.cause) if each.cause is not None else each.kind).replace("_", " ").capitalize()
        rows = "\n".join(f"| {name} | {text.replace('|', '/')} |" for name, text in _facts(each) if text)
        sections.append(f"## {what}\n\n| | |\n|---|---|\n{rows}")
    lines = "\n".join(f"- {as_line(each)}" for each in in_order([*incidents, *transitions]))
    sections.append(f"## What happened when\n\n{lines}")
    sections.append(
        "## Where to read on\n\n"
        f"- `elastic-trainer events {run}`: the rounds before and after\n"
        f"- `elastic-trainer logs {run}`: what the workers of each rank wrote"
    )
    return "\n\n".join(sections)


def _values(documents: Iterable[Happening]) -> list[dict[str, Any]]:
    return [each.model_dump(mode="json", exclude={"version"}) for each in documents]


def _facts(each: Incident) -> list[tuple[str, str]]:
    """What is known, in words; empty where it is not."""
    followed = each.next_round is not None
    return [
        ("began", moment(each.wall)),
        ("reason", each.reason),
        ("nodes", named(each.nodes, 20)),
        ("ranks", ranges(each.ranks)),
        ("reported by", each.by),
        ("last committed step", number(each.step)),
        ("outcome", each.outcome),
        ("verdict", _judged(each)),
        ("evidence", "; ".join(each.verdict.evidence) if each.verdict else ""),
        ("next round", number(each.next_round) if followed else ""),
        ("ranks before and after", f"{each.world_before}, {each.world_after}" if followed else ""),
    ]
