"""All that is known of how one round ended, for a post-mortem: as Markdown or JSON. Pure.

An incident goes by the number of its round, which stays the same whatever else happens to the run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_trainer.cli.wording import moment, named, number, ranges
from elastic_trainer.errors import ConfigError
from elastic_trainer.membership.documents import Incident, JournalEntry


@dataclass(frozen=True, slots=True)
class PostMortem:
    """What happened in round ``number`` of ``run``, and the transitions of that round and of the one that followed."""

    run: str
    number: int
    incidents: tuple[Incident, ...]
    transitions: tuple[JournalEntry, ...]


def report(run: str, number: int, happened: Sequence[JournalEntry | Incident]) -> PostMortem:
    """Chosen from all that ``happened``. Raises ConfigError where nothing is known of such an incident."""
    known = [each for each in happened if isinstance(each, Incident)]
    mine = tuple(each for each in known if each.round == number)
    if not mine:
        rounds = ranges(each.round for each in known)
        hint = f"there are some of rounds {rounds}" if rounds else "the run has had none"
        raise ConfigError(f"no incident of round {number} of run {run!r} is known", hint=hint)
    rounds_of = {number, *(each.next_round for each in mine)}
    told = tuple(each for each in happened if isinstance(each, JournalEntry) and each.round in rounds_of)
    return PostMortem(run, number, mine, told)


def as_json(report: PostMortem) -> str:
    """One object: ``run``, ``round``, ``incidents``, ``transitions``."""
    documents = {
        name: [each.model_dump(mode="json", exclude={"version"}) for each in found]
        for name, found in (("incidents", report.incidents), ("transitions", report.transitions))
    }
    return json.dumps({"run": report.run, "round": report.number, **documents}, indent=2)


def as_markdown(report: PostMortem, lines: Sequence[str]) -> str:
    """A page with a table for each incident; ``lines`` are what happened, one line each."""
    sections = [f"# Run {report.run}, round {report.number}"]
    for each in report.incidents:
        rows = "\n".join(f"| {name} | {text.replace('|', '/')} |" for name, text in _facts(each) if text)
        sections.append(f"## {_title(each)}\n\n| | |\n|---|---|\n{rows}")
    sections.append("## What happened when\n\n" + "\n".join(f"- {line}" for line in lines))
    sections.append(
        "## Where to read on\n\n"
        f"- `elastic-trainer events {report.run}`: the rounds before and after\n"
        f"- `elastic-trainer logs {report.run}`: what the workers of each rank wrote"
    )
    return "\n\n".join(sections)


def _title(each: Incident) -> str:
    what = str(each.cause) if each.cause is not None else each.kind
    return what.replace("_", " ").capitalize()


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
        ("next round", number(each.next_round) if followed else ""),
        ("ranks before and after", f"{each.world_before}, {each.world_after}" if followed else ""),
    ]
