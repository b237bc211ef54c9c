"""All checks of one node that need no other node, from quick to slow.

*Runs in* the caller's thread; checks that may hang run in child processes. *Owns* these during the call.
*Fails by* findings only.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from elastic_trainer.clock import Deadline
from elastic_trainer.preflight import gpu, machine, network
from elastic_trainer.preflight.child import Doing, findings_of
from elastic_trainer.preflight.finding import Finding, Status
from elastic_trainer.preflight.limits import FitLimits
from elastic_trainer.settings import worker_threads

DIRECTORY_S = 60.0
"""Seconds for all checks of the directory or URL; one that needs longer counts as dead."""
GPU_S, GPU_SHARE = 10.0, 0.25
"""Seconds, and share of what is left, in which the driver must answer; the longer one holds. Without persistence mode
it initializes each device first."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What to examine. ``address`` is this node's address for others."""

    address: str
    directory: str | None = None
    """A path or URL."""
    workers: int = 1
    compute: bool = True
    limits: FitLimits = field(default_factory=FitLimits)


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings, and the versions that nodes should agree on."""

    findings: tuple[Finding, ...]
    versions: dict[str, str]


def examine(subject: Subject, deadline: Deadline, doing: Doing = lambda _: None) -> Examination:
    """Examine this node; checks that are unfinished at ``deadline`` are bad."""
    limits, versions = subject.limits, dict[str, str]()
    doing("checking this machine")
    found = [
        network.host_name(socket.gethostname(), subject.address),
        network.listening(subject.address),
        machine.shared_memory(limits),
        machine.processors(subject.workers, worker_threads()),
        machine.open_files(limits),
    ]
    found += _directory(subject, deadline, doing, versions)
    found += gpu.devices(deadline.at_most(max(GPU_S, GPU_SHARE * deadline.remaining_s())), versions)
    found += _compute(subject, deadline, doing, versions)
    return Examination(tuple(found), versions)


def _directory(subject: Subject, deadline: Deadline, doing: Doing, versions: dict[str, str]) -> list[Finding]:
    if subject.directory is None:
        return [Finding("disk", Status.SKIPPED, "no checkpoint directory was given")]
    limit = deadline.at_most(min(DIRECTORY_S, deadline.remaining_s() / 2))  # leaves time for the other checks
    words = [subject.directory, str(subject.limits.disk_bytes), f"{limit.remaining_s():.3f}"]
    return findings_of("disk", "elastic_trainer.preflight.directory", words, limit, doing, versions)


def _compute(subject: Subject, deadline: Deadline, doing: Doing, versions: dict[str, str]) -> list[Finding]:
    if not subject.compute:
        return [Finding("compute", Status.SKIPPED, "not requested")]
    words = [f"{deadline.remaining_s():.3f}"]
    return findings_of("compute", "elastic_trainer.preflight.compute", words, deadline, doing, versions)
