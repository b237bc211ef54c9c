"""What the kubelet makes of the answers to its probes: started, ready, to be restarted. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from tests.support.kubelet.pod_spec import Container, Probe


class Kind(StrEnum):
    """What a probe is for."""

    STARTUP = "startup"
    READINESS = "readiness"
    LIVENESS = "liveness"


def probes(container: Container) -> dict[Kind, Probe]:
    """The probes that a container has."""
    found = {
        Kind.STARTUP: container.startup_probe,
        Kind.READINESS: container.readiness_probe,
        Kind.LIVENESS: container.liveness_probe,
    }
    return {kind: probe for kind, probe in found.items() if probe is not None}


@dataclass(frozen=True, slots=True)
class Health:
    """What is known about a running container. ``unfit`` says why it is to be ended; empty: it is not."""

    started: bool
    ready: bool
    unfit: str = ""
    streaks: tuple[tuple[Kind, int], ...] = ()
    """Answers in a row of one kind, by probe: above zero good ones, below zero bad ones."""

    def streak(self, kind: Kind) -> int:
        """The same for one probe."""
        return dict(self.streaks).get(kind, 0)


def at_start(container: Container) -> Health:
    """A container that was started just now."""
    kinds = probes(container)
    started = Kind.STARTUP not in kinds
    return Health(started=started, ready=started and Kind.READINESS not in kinds)


def wanted(container: Container, health: Health) -> tuple[Kind, ...]:
    """The probes that are asked now: until the container has started, only the startup probe."""
    kinds = tuple(probes(container))
    return tuple(kind for kind in kinds if (kind is Kind.STARTUP) != health.started)


def answered(container: Container, health: Health, kind: Kind, good: bool) -> Health:
    """What is known after an answer to this probe."""
    probe = probes(container)[kind]
    before = health.streak(kind)
    streak = max(before, 0) + 1 if good else min(before, 0) - 1
    streaks = tuple(sorted({**dict(health.streaks), kind: streak}.items()))
    health = replace(health, streaks=streaks)
    if streak >= probe.success_threshold:
        return _passed(container, health, kind)
    if -streak >= probe.failure_threshold:
        if kind is Kind.READINESS:
            return replace(health, ready=False)
        return replace(health, unfit=f"{kind} probe failed {-streak} times in a row")
    return health


def _passed(container: Container, health: Health, kind: Kind) -> Health:
    if kind is Kind.STARTUP:
        return replace(health, started=True, ready=Kind.READINESS not in probes(container))
    return replace(health, ready=True) if kind is Kind.READINESS else health
