"""All checks of ``elastic-trainer doctor``: etcd, this machine, the run's other nodes, the network to them.

*Runs in* the main thread of the command. *Owns* one connection to the store during the call.
*Fails by* findings; ConfigError for errors of the user.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError, TransientError
from elastic_trainer.preflight.child import Doing
from elastic_trainer.preflight.comparison import STORE_S, PeerComparison
from elastic_trainer.preflight.coordination import endpoints, round_trip
from elastic_trainer.preflight.examination import Examination, Subject, examine
from elastic_trainer.preflight.finding import Finding, Status
from elastic_trainer.preflight.report import report_of
from elastic_trainer.preflight.together import measured_together
from elastic_trainer.settings import StoreSettings
from elastic_trainer.store import connect
from elastic_trainer.store.api import RunKeys, Store

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
    if case.store is None:
        found = [Finding("etcd", Status.SKIPPED, "no --endpoint was given")]
    else:
        doing("checking etcd")
        found = endpoints(case.store, case.run, case.subject.limits, deadline)
        if any(each.status is not Status.BAD for each in found):
            with closing(connect(case.store)) as store:
                return _with_store(case, store, case.store.prefix, found, deadline, doing)
    own = examine(case.subject, deadline, doing)
    return Examination((*found, *own.findings), own.versions)


def _with_store(
    case: Case, store: Store, prefix: str, found: list[Finding], deadline: Deadline, doing: Doing
) -> Examination:
    limits = case.subject.limits
    root = f"{prefix}/" if case.run is None else RunKeys(prefix, case.run).root
    try:
        found.append(round_trip(store, root, limits, deadline.at_most(STORE_S)))
    except TransientError as error:
        found.append(Finding.failed("etcd.round_trip", error))
    if case.run is None:
        own = examine(case.subject, deadline, doing)
        return Examination(
            (*found, *own.findings, Finding("peers", Status.SKIPPED, "no --run-id was given")), own.versions
        )
    keys = RunKeys(prefix, case.run)
    comparison = PeerComparison(store, keys, case.node, limits)
    own = examine(case.subject, deadline, doing)
    found += own.findings
    try:
        comparison.publish(report_of(case.node, case.subject.address, found, own.versions, SYSTEM.wall()), KEEP_S)
        if case.count > 1:
            found += measured_together(
                store, keys, case.node, case.subject.address, case.count, limits, deadline, doing
            )
        doing("comparing with other nodes")
        found += comparison.findings(others=case.count - 1, wait_s=0.0, keep_s=KEEP_S)
    except ConfigError:
        raise
    except ElasticTrainerError as error:
        found.append(Finding.failed("peers", error))
    return Examination(tuple(found), own.versions)
