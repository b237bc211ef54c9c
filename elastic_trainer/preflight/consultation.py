"""Everything that ``elastic-trainer doctor`` looks at: etcd, this machine, the run's other nodes, the network to them.

*Runs in* the main thread of the command. *Owns* one connection to the store for the time of the call.
*Fails by* findings; ConfigError for what the user must correct.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError, TransientError
from elastic_trainer.preflight.child import Doing
from elastic_trainer.preflight.comparison import STORE_S, PeerComparison
from elastic_trainer.preflight.coordination import endpoints, round_trip
from elastic_trainer.preflight.examination import Subject, examine
from elastic_trainer.preflight.finding import Finding, Status, bad
from elastic_trainer.preflight.report import report_of
from elastic_trainer.preflight.together import measured_together
from elastic_trainer.settings import StoreSettings
from elastic_trainer.store import connect
from elastic_trainer.store.api import Store
from elastic_trainer.store.keys import RunKeys

KEEP_S = 600.0
"""How long what a doctor found is there for others to be compared with."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be looked at. ``count``: so many nodes, this one among them, measure their network together."""

    node: str
    subject: Subject
    store: StoreSettings | None = None
    run: str | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about ``node``, and its versions."""

    node: str
    findings: tuple[Finding, ...]
    versions: dict[str, str]

    @property
    def fit(self) -> bool:
        """Whether nothing is bad."""
        return not bad(self.findings)


def consult(case: Case, deadline: Deadline, doing: Doing) -> Diagnosis:
    """Look at all that the case asks for, until ``deadline``."""
    if case.store is None:
        own = examine(case.subject, deadline, doing)
        none = Finding("etcd", Status.SKIPPED, "no --endpoint was given")
        return Diagnosis(case.node, (none, *own.findings), own.versions)
    doing("asking etcd")
    found = endpoints(case.store, case.run, case.subject.limits, deadline)
    if all(each.status is Status.BAD for each in found):
        own = examine(case.subject, deadline, doing)
        return Diagnosis(case.node, (*found, *own.findings), own.versions)
    with _connected(case.store) as store:
        return _with_store(case, store, case.store.prefix, found, deadline, doing)


@contextmanager
def _connected(settings: StoreSettings) -> Iterator[Store]:
    store = connect(settings)
    try:
        yield store
    finally:
        store.close()


def _with_store(
    case: Case, store: Store, prefix: str, found: list[Finding], deadline: Deadline, doing: Doing
) -> Diagnosis:
    limits = case.subject.limits
    root = f"{prefix}/" if case.run is None else RunKeys(prefix, case.run).root
    try:
        found.append(round_trip(store, root, limits, deadline.at_most(STORE_S)))
    except TransientError as error:
        found.append(Finding("etcd.round_trip", Status.BAD, error.message, hint=error.hint or ""))
    if case.run is None:
        own = examine(case.subject, deadline, doing)
        none = Finding("peers", Status.SKIPPED, "no --run-id was given")
        return Diagnosis(case.node, (*found, *own.findings, none), own.versions)
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
        found.append(Finding("peers", Status.BAD, error.message, hint=error.hint or ""))
    return Diagnosis(case.node, tuple(found), own.versions)
