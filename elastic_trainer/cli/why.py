"""``elastic-trainer why RUN``: the verdict on the newest incident of a run, its evidence, and what came before.

*Runs in* the process of the command. *Owns* nothing.
*Fails by* ConfigError for a run or an incident that is not there, StoreUnavailableError when etcd does not answer.
"""

from __future__ import annotations

import argparse
from textwrap import fill
from typing import Any

from elastic_trainer.cli import connection
from elastic_trainer.cli.main import output_options, written
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.membership.documents import Incident, MachineFault, Verdict
from elastic_trainer.membership.forgetting import faults_of
from elastic_trainer.membership.verdict import Case, batch_words, clues_of, judge
from elastic_trainer.monitor.reading import RunFeed
from elastic_trainer.monitor.state import RunDocuments
from elastic_trainer.store.api import RunKeys, Store
from elastic_trainer.telemetry import logs
from elastic_trainer.wording import counted, moment, named, ranges

WIDTH = 80
BEFORE = 5
"""Earlier verdicts that are shown."""


def configure_why(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    connection.add_run(parser)
    output_options(parser)
    parser.add_argument("--incident", type=int, metavar="ROUND", help="of this round instead of the newest")
    connection.add_options(parser)


def run_why(arguments: argparse.Namespace) -> int:
    """Print it."""
    logs.configure()
    with connection.opened(arguments, arguments.run) as (store, settings):
        keys = RunKeys(settings.prefix, arguments.run)
        connection.require_run(store, settings, keys)
        documents = RunFeed(store, keys).read(Deadline.after(connection.CONNECT_S))
        faults = [each for each in documents.happened if not each.planned]
        if arguments.incident is not None:
            at = next((number for number, each in enumerate(faults) if each.round == arguments.incident), None)
            if at is None:
                known = ranges(sorted({each.round for each in faults}))
                hint = f"there are some of rounds {known}" if known else "the run has had none"
                raise ConfigError(f"no incident of round {arguments.incident} is known", hint=hint)
            faults = faults[at:]
        judged = [(each, verdict_on(each, documents)) for each in faults[: BEFORE + 1]]
        machines = machine_faults_of(store, settings.prefix, documents, judged[0][1]) if judged else {}
    if arguments.output is not None:
        print(written(as_values(arguments.run, judged, machines), arguments.output))
    else:
        print(as_text(arguments.run, judged, machines))
    return 0


def verdict_on(incident: Incident, documents: RunDocuments) -> Verdict:
    """Its verdict; of an incident that nobody was left to judge, by what is known."""
    if incident.verdict is not None:
        return incident.verdict
    before = [each for each in documents.happened if each.wall < incident.wall]
    members = documents.round.members if documents.round is not None else ()
    nodes = sorted({*incident.nodes, *(member.node for member in members)})
    clues, older = clues_of(incident, documents.health)
    return judge(Case(incident, clues, before, nodes, older, documents.health))


def machine_faults_of(
    store: Store, prefix: str, documents: RunDocuments, verdict: Verdict
) -> dict[str, list[MachineFault]]:
    """The records of the machines on which the nodes of ``verdict`` run; none where they may not be read."""
    found = {}
    for node in verdict.nodes:
        health = documents.health.get(node)
        if health is None or not health.machine:
            continue
        try:
            known = faults_of(store, prefix, health.machine, Deadline.after(connection.CONNECT_S))
        except ElasticTrainerError:
            continue
        if known:
            found[health.machine] = known
    return found


def as_values(
    run: str, judged: list[tuple[Incident, Verdict]], machines: dict[str, list[MachineFault]]
) -> dict[str, Any]:
    """For programs: the verdict on the newest incident first."""
    return {
        "run": run,
        "verdicts": [
            {
                **verdict.model_dump(mode="json"),
                "incident": each.model_dump(mode="json", exclude={"version", "verdict"}) | {"outcome": each.outcome},
            }
            for each, verdict in judged
        ],
        "machines": {
            name: [each.model_dump(mode="json", exclude={"version"}) for each in known]
            for name, known in machines.items()
        },
    }


def as_text(run: str, judged: list[tuple[Incident, Verdict]], machines: dict[str, list[MachineFault]]) -> str:
    """For people, in 80 columns: one sentence, then what it rests on."""
    if not judged:
        return f"Nothing has gone wrong in run {run}."
    (incident, verdict), *before = judged
    parts = [fill(verdict.sentence, WIDTH), "", *map(_row, _facts(incident, verdict)), ""]
    if verdict.evidence:
        parts += ["Evidence:", *(_item(each) for each in verdict.evidence), ""]
    for name, known in machines.items():
        parts += [f"Machine {name}, {counted(len(known), 'fault')} on record:"]
        parts += [_item(f"{moment(each.wall)}, run {each.run}: {each.sentence}") for each in known[-BEFORE:]] + [""]
    if before:
        parts += ["Before:"]
        parts += [_item(f"{moment(each.wall)}, round {each.round}: {told.sentence}") for each, told in before] + [""]
    parts.append(f"More: elastic-trainer events {run} --incident {incident.round}; elastic-trainer logs {run}")
    return "\n".join(parts)


def _facts(incident: Incident, verdict: Verdict) -> list[tuple[str, str]]:
    culprit = f"{verdict.culprit} ({verdict.certainty})"
    where = [*(f"node {each}" for each in verdict.nodes[:6])]
    if verdict.ranks:
        where.append(f"{'rank' if len(verdict.ranks) == 1 else 'ranks'} {ranges(verdict.ranks)}")
    if verdict.batch is not None:
        where.append(batch_words(verdict.batch))
    followed = f" -> {incident.next_round}" if incident.next_round is not None else ""
    when = f"{moment(incident.wall)}, round {incident.round}{followed}, after step {incident.step}"
    facts = [
        ("what failed", culprit),
        ("where", named(where, 8)),
        ("what to do", str(verdict.advice).replace("_", " ")),
    ]
    return [*facts, ("when", when), *([("effect", incident.outcome)] if incident.outcome else [])]


def _row(fact: tuple[str, str]) -> str:
    name, text = fact
    return fill(f"{name + ':':13}{text or 'not known'}", WIDTH, subsequent_indent=" " * 13)


def _item(text: str) -> str:
    return fill(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False)
