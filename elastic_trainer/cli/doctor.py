"""``elastic-trainer doctor``: all checks of etcd, this machine, the run's other nodes and the network to them.

*Runs in* the main thread of the command. *Owns* one connection to the store during the checks.
*Fails by* ConfigError for options that cannot be meant; exit code 1 when a finding is bad.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic_trainer.cli.main import at_least, console, key_values, output_options, seconds, written
from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import EXIT_FAILURE, ConfigError, ElasticTrainerError, TransientError
from elastic_trainer.ipc.address import default_node_id, own_address
from elastic_trainer.model import checked_name
from elastic_trainer.preflight.child import Doing
from elastic_trainer.preflight.comparison import STORE_S, PeerComparison, endpoints, report_of, round_trip
from elastic_trainer.preflight.examination import Examination, Subject, examine
from elastic_trainer.preflight.judge import GIB, Finding, FitLimits, Status, bad
from elastic_trainer.preflight.together import measured_together
from elastic_trainer.settings import (
    DEFAULT_ENDPOINT,
    RendezvousOptions,
    StoreSettings,
    parse_endpoints,
    rendezvous_options,
)
from elastic_trainer.store import connect
from elastic_trainer.store.api import RunKeys, Store
from elastic_trainer.telemetry import logs

_STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red", "skipped": "dim"}
_EXAMPLE = (
    "example, on each of 4 nodes: elastic-trainer doctor --endpoint etcd:2379 --run-id check --peers 4 "
    "--checkpoint-dir /checkpoints"
)


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add("--endpoint", metavar="HOST:PORT,...", help="etcd, as for torchrun's --rdzv-endpoint")
    add(
        "--run-id",
        metavar="R",
        help="compare with the nodes of this run; nodes that measure together give the same name",
    )
    add(
        "--peers",
        type=int,
        metavar="N",
        help=("measure the network of N nodes in all, on each of which this command runs with the same options"),
    )
    add("--checkpoint-dir", metavar="DIR", help="measure the directory or s3://, gs:// or az:// URL for checkpoints")
    add("--min-disk", type=float, default=0.0, metavar="GIB", help="space that must be free there")
    add("--nproc-per-node", type=int, default=1, metavar="P", help="workers that will run on this node (default: 1)")
    add(
        "--compute",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure memory and matrix products, which needs seconds; --no-compute leaves them out",
    )
    add(
        "--rdzv-conf",
        default="",
        metavar="K=V,...",
        help="credentials for etcd, interface, node_id and preflight_ratio, as nodes get them",
    )
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="longest time for everything, the wait for other nodes too, 60",
    )
    output_options(parser)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Check, and print the findings; 1 if anything is bad."""
    logs.configure(level="warning")
    case = case_of(arguments)
    with _progress() as doing:
        found = consult(case, Deadline.after(seconds(arguments.timeout, "--timeout", above_zero=True)), doing)
    fit = not bad(found.findings)
    if arguments.output:
        findings = [finding.as_json() for finding in found.findings]
        values = {"node": case.node, "fit": fit, "findings": findings, "versions": found.versions}
        print(written(values, arguments.output))
    else:
        _show(found)
        print(f"{case.node} is {'fit' if fit else 'NOT fit'} to train")
    return 0 if fit else EXIT_FAILURE


def case_of(arguments: argparse.Namespace) -> Case:
    """What the options ask for."""
    options = rendezvous_options(key_values(arguments.rdzv_conf))
    count = 1 if arguments.peers is None else arguments.peers
    if arguments.peers is not None and count < 2:
        raise ConfigError(f"--peers {count} is below 2", hint="it is the number of all nodes, this one among them")
    if arguments.run_id is not None:
        checked_name(arguments.run_id, "run id (--run-id)")
    for option, given in (("--run-id", arguments.run_id), ("--peers", arguments.peers)):
        if given is not None and arguments.endpoint is None:
            raise ConfigError(f"{option} needs --endpoint", hint="nodes find each other through etcd")
    if arguments.peers is not None and arguments.run_id is None:
        raise ConfigError("--peers needs --run-id", hint="any name will do, the same on all nodes")
    return Case(
        node=checked_name(options.node_id or default_node_id(), "node id"),
        subject=_subject(arguments, options),
        store=options.store(arguments.endpoint) if arguments.endpoint is not None else None,
        run=arguments.run_id,
        count=count,
    )


def _subject(arguments: argparse.Namespace, options: RendezvousOptions) -> Subject:
    if not (math.isfinite(arguments.min_disk) and arguments.min_disk >= 0):
        raise ConfigError(f"--min-disk {arguments.min_disk} is not a number of GiB", hint="give for example 50")
    etcd = parse_endpoints(arguments.endpoint or DEFAULT_ENDPOINT)[0]
    return Subject(
        address=options.interface or own_address(etcd.host, etcd.port),
        directory=arguments.checkpoint_dir or options.preflight_dir,
        workers=at_least(1, arguments.nproc_per_node, "--nproc-per-node"),
        compute=arguments.compute,
        limits=FitLimits(ratio=options.preflight_ratio, disk_bytes=int(arguments.min_disk * GIB)),
    )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows on standard error what is being done: in place on a terminal, else a line each."""
    console = Console(stderr=True)
    if not console.is_terminal:
        said = list[str]()

        def line(what: str) -> None:
            if what not in said[-1:]:
                said.append(what)
                print(f"doctor: {what}", file=sys.stderr, flush=True)

        yield line
        return
    with console.status("") as status:
        yield status.update


def _show(found: Examination) -> None:
    table = Table()
    for column in ("check", "status", "finding"):
        table.add_column(column, overflow="fold")
    for finding in found.findings:
        table.add_row(finding.name, Text(finding.status, style=_STYLES[finding.status]), Text(finding.text))
    console(160).print(table)
    for finding in found.findings:
        if finding.hint and finding.status in ("warn", "bad"):
            print(f"{finding.name}: {finding.hint}")
    if found.versions:
        print(f"versions: {', '.join(f'{name} {version}' for name, version in sorted(found.versions.items()))}")


# ---- the checks

KEEP_S = 600.0
"""Seconds that a doctor's report stays in the store for comparison."""


@dataclass(frozen=True, slots=True)
class Case:
    """What to check. ``count`` nodes, including this one, measure their network together."""

    node: str
    subject: Subject
    store: StoreSettings | None = None
    run: str | None = None
    count: int = 1


def consult(case: Case, deadline: Deadline, doing: Doing) -> Examination:
    """Run all checks of the case, until ``deadline``."""
    limits = case.subject.limits
    if case.store is None:
        found = [Finding("etcd", Status.SKIPPED, "no --endpoint was given")]
    else:
        doing("checking etcd")
        found = endpoints(case.store, case.run, limits, deadline)
    if case.store is None or all(each.status is Status.BAD for each in found):
        own = examine(case.subject, deadline, doing)
        return Examination((*found, *own.findings), own.versions)
    prefix = case.store.prefix
    with closing(connect(case.store)) as store:
        root = f"{prefix}/" if case.run is None else RunKeys(prefix, case.run).root
        try:
            found.append(round_trip(store, root, limits, deadline.at_most(STORE_S)))
        except TransientError as error:
            found.append(Finding.of_error("etcd.round_trip", error))
        own = examine(case.subject, deadline, doing)
        found += own.findings
        if case.run is None:
            found.append(Finding("peers", Status.SKIPPED, "no --run-id was given"))
        else:
            _compare(case, store, RunKeys(prefix, case.run), found, own, deadline, doing)
        return Examination(tuple(found), own.versions)


def _compare(
    case: Case, store: Store, keys: RunKeys, found: list[Finding], own: Examination, deadline: Deadline, doing: Doing
) -> None:
    """Add what the run's other nodes have found to ``found``."""
    limits, address = case.subject.limits, case.subject.address
    comparison = PeerComparison(store, keys, case.node, limits)
    try:
        comparison.publish(report_of(case.node, address, found, own.versions, SYSTEM.wall()), KEEP_S)
        if case.count > 1:
            found += measured_together(store, keys, case.node, address, case.count, limits, deadline, doing)
        doing("comparing with other nodes")
        found += comparison.findings(others=case.count - 1, wait_s=0.0, keep_s=KEEP_S)
    except ConfigError:
        raise
    except ElasticTrainerError as error:
        found.append(Finding.of_error("peers", error))
