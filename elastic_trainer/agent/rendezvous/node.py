"""This node from its arrival in the run to its end: allowed sizes of the run, the optional check of the machine, parts.

*Runs in* torchrun's main thread. The check (``--rdzv-conf preflight=warn|refuse``) runs once, after the run has
admitted the node and before the node writes its key; its report and the incident stay in the store.
*Fails by* ConfigError if no node count is allowed, UnfitError if unfit nodes are refused. A store that does not answer
never makes a node unfit.
*Invariant*: a refused node never had a node key.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass

from elastic_trainer.agent.health.health_store import HealthStore
from elastic_trainer.agent.health.service import HealthService
from elastic_trainer.agent.suspicion import AgentPort
from elastic_trainer.agent.workers.rescue import NeighbourCopies, Rescue
from elastic_trainer.agent.workers.watchdog import Supervisor
from elastic_trainer.clock import Clock, Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError, TransientError, UnfitError
from elastic_trainer.membership.documents import Departure, Incident
from elastic_trainer.membership.member import Member
from elastic_trainer.model import PreflightMode
from elastic_trainer.preflight.comparison import STORE_S, PeerComparison, report_of, round_trip
from elastic_trainer.preflight.examination import Subject, examine
from elastic_trainer.preflight.judge import NODE_CHECKS_S, PEERS_WAIT_S, Finding, FitLimits, Status, bad, sentence
from elastic_trainer.settings import RendezvousOptions
from elastic_trainer.store.api import RunKeys, Store
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.variables import ENV_ADDRESS, ENV_COPIES_HERE, ENV_MEMORY


def allowed_sizes(options: RendezvousOptions, low: int, high: int) -> tuple[int, ...]:
    """Counts from ``low`` to ``high`` that ``sizes``, ``multiple_of``, ``shard_nodes`` allow, ascending; empty: all."""
    named = {int(size) for size in options.sizes.split(":")} if options.sizes else None
    group = options.shard_nodes
    for given, counts in ((f"--nnodes {low}:{high}", {low, high}), (f"sizes={options.sizes}", named or ())):
        if any(count % group for count in counts):
            raise ConfigError(
                f"{given} does not divide into shard groups of {group} nodes (--rdzv-conf shard_nodes={group})",
                hint=f"these numbers count nodes, not groups: use multiples of {group}",
            )
    if named is None and options.multiple_of == group == 1:
        return ()
    step = math.lcm(options.multiple_of, group)
    allowed = tuple(size for size in sorted(named or range(low, high + 1)) if low <= size <= high and size % step == 0)
    if not allowed:
        given = f"sizes={options.sizes}" if options.sizes else f"multiple_of={options.multiple_of}"
        raise ConfigError(
            f"--rdzv-conf {given} allows no node count within --nnodes {low}:{high}", hint="change one of them"
        )
    return allowed


def reserve_port(address: str) -> socket.socket:
    """Binds a free port, which the kernel assigns to no other process while a worker of this node may need it.

    The socket stays bound without listening until it is closed. Both sides set SO_REUSEADDR: then Linux lets a second
    socket bind and listen, but skips the port in its automatic choice.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


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
    logger().info("preflight.started", limit_s=NODE_CHECKS_S)
    findings = _examined(store, keys, options, candidate, clock)
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
    text, refused = f"node {candidate.node} is not fit: {sentence(unfit)}", options.preflight is PreflightMode.REFUSE
    reason = f"{text} ({'it does not join' if refused else 'it joins anyway'})"
    incident = Incident(wall=clock.wall(), by=candidate.node, kind="node_unfit", reason=reason, nodes=(candidate.node,))
    try:
        HealthStore(store, keys, candidate.node).write_incident(incident)
    except ElasticTrainerError as error:
        logger().warning("incident.not_written", error=str(error))
    if refused:
        raise UnfitError(text, hint=unfit[0].hint or "run the job on another machine")


def _examined(
    store: Store, keys: RunKeys, options: RendezvousOptions, candidate: NodeCandidate, clock: Clock
) -> list[Finding]:
    """Run the checks of this node, then compare it with the others."""
    limits = FitLimits(ratio=options.preflight_ratio)
    comparison = PeerComparison(store, keys, candidate.node, limits, clock)
    subject = Subject(
        address=candidate.address,
        directory=options.preflight_dir,
        workers=candidate.workers,
        limits=limits,
    )
    own = examine(subject, Deadline.after(NODE_CHECKS_S, clock))
    report = report_of(candidate.node, candidate.address, own.findings, own.versions, clock.wall())
    found = [*own.findings]
    try:
        found.append(round_trip(store, keys.round, limits, Deadline.after(STORE_S, clock), clock))
        comparison.publish(report, KEEP_S)
        # A job cannot start without its minimum of nodes, so waiting for their results costs little.
        others = candidate.least - 1 if candidate.least > limits.peers else 0
        found += comparison.findings(others=others, wait_s=PEERS_WAIT_S, keep_s=KEEP_S)
    except TransientError as error:
        found.append(Finding("peers", Status.SKIPPED, f"the other nodes' results are unknown: {error}"))
    return found


@dataclass(frozen=True, slots=True)
class ArrivedNode:
    """A node that the run has admitted, with all its parts, until it leaves."""

    member: Member
    port: AgentPort
    supervisor: Supervisor
    health: HealthService
    rescue: Rescue
    copies: NeighbourCopies

    def lend_memory(self, address: str) -> None:
        """Name the memory files to the workers that start next, and the ``address`` at which others reach this node."""
        os.environ[ENV_ADDRESS] = address
        os.environ[ENV_MEMORY] = self.rescue.paths
        os.environ[ENV_COPIES_HERE] = f"{address} {self.port.port} {self.copies.key}"

    def leave(self, departure: Departure | None = None) -> None:
        """Leave the run: delete this node's key. ``departure``: why, unless the run has ended."""
        try:
            self.health.close()
        except Exception:  # noqa: BLE001 - a failing health report must not keep the key that others wait for
            logger().exception("health.failed")
        last = self.member.observation().round
        self.member.leave(departure)
        self.copies.stop()
        self.rescue.close(last)
        self.copies.close()
        self.supervisor.close()
        self.port.close()
