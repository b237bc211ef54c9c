"""The optional check before a node joins (``--rdzv-conf preflight=warn|refuse``): whether this machine is fit.

*Runs in* torchrun's main thread, once, after the run has admitted the node and before the node writes its key.
*Owns* nothing: its report and the incident stay in the store.
*Fails by* UnfitError if unfit nodes are refused. A store that does not answer never makes a node unfit.
*Invariant*: a refused node never had a node key.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.agent.health.health_store import HealthStore
from elastic_trainer.clock import Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError, TransientError, UnfitError
from elastic_trainer.membership.health import Incident
from elastic_trainer.model import PreflightMode
from elastic_trainer.preflight.comparison import STORE_S, PeerComparison
from elastic_trainer.preflight.coordination import round_trip
from elastic_trainer.preflight.examination import Subject, examine
from elastic_trainer.preflight.finding import Finding, Status, bad, sentence
from elastic_trainer.preflight.limits import GIB, FitLimits
from elastic_trainer.preflight.report import report_of
from elastic_trainer.settings import RendezvousOptions
from elastic_trainer.store.api import Store
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.telemetry.logs import logger

KEEP_S = 7 * 24 * 3600.0
"""How long a report stays for comparison with newcomers; it outlives its node, for the node's successor."""


@dataclass(frozen=True, slots=True)
class NodeCandidate:
    """A node that wants to join a job of at least ``least`` nodes."""

    node: str
    address: str
    workers: int
    least: int


def ensure_fit(store: Store, keys: RunKeys, options: RendezvousOptions, candidate: NodeCandidate, clock: Clock) -> None:
    """Check this node. Bad findings become an incident, and refuse the node if the options say so."""
    begun = clock.monotonic()
    logger().info("preflight.started", limit_s=options.preflight_timeout)
    findings = examined(store, keys, options, candidate, clock)
    for finding in findings:
        if finding.status is Status.WARN:
            logger().warning("preflight.warned", check=finding.name, text=finding.text, hint=finding.hint)
    unfit = bad(findings)
    took_s = round(clock.monotonic() - begun, 3)
    logger().info("preflight.finished", fit=not unfit, checks=len(findings), duration_s=took_s)
    if not unfit:
        return
    for finding in unfit:
        logger().warning("node.unfit", check=finding.name, text=finding.text, hint=finding.hint)
    text = f"node {candidate.node} is not fit: {sentence(unfit)}"
    refused = options.preflight is PreflightMode.REFUSE
    outcome = "it does not join" if refused else "it joins anyway"
    _write_incident(store, keys, candidate.node, f"{text} ({outcome})", clock)
    if refused:
        raise UnfitError(text, hint=unfit[0].hint or "run the job on another machine")


def examined(
    store: Store, keys: RunKeys, options: RendezvousOptions, candidate: NodeCandidate, clock: Clock
) -> list[Finding]:
    """Run the checks of this node, then compare it with the others."""
    limits = limits_of(options)
    comparison = PeerComparison(store, keys, candidate.node, limits, clock)
    subject = Subject(
        address=candidate.address,
        directory=options.preflight_dir,
        workers=candidate.workers,
        compute=options.preflight_compute,
        limits=limits,
    )
    own = examine(subject, Deadline.after(options.preflight_timeout, clock))
    report = report_of(candidate.node, candidate.address, own.findings, own.versions, clock.wall())
    found = [*own.findings]
    try:
        found.append(round_trip(store, keys.round, limits, Deadline.after(STORE_S, clock), clock))
        comparison.publish(report, KEEP_S)
        # A job cannot start without its minimum of nodes, so waiting for their results costs little.
        others = candidate.least - 1 if candidate.least > limits.peers else 0
        found += comparison.findings(others=others, wait_s=options.preflight_wait, keep_s=KEEP_S)
    except TransientError as error:
        found.append(Finding("peers", Status.SKIPPED, f"the other nodes' results are unknown: {error}"))
    return found


def limits_of(options: RendezvousOptions) -> FitLimits:
    """The limits that the options set."""
    return FitLimits(ratio=options.preflight_ratio, disk_bytes=int(options.preflight_min_disk * GIB))


def _write_incident(store: Store, keys: RunKeys, node: str, text: str, clock: Clock) -> None:
    incident = Incident(wall=clock.wall(), by=node, kind="node_unfit", reason=text, nodes=(node,))
    try:
        HealthStore(store, keys, node).write_incident(incident)
    except ElasticTrainerError as error:
        logger().warning("incident.not_written", error=str(error))
