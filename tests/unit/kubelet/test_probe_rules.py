"""What the stand-in makes of answers to probes."""

from __future__ import annotations

from typing import Any

from tests.support.kubelet.pod_spec import Container
from tests.support.kubelet.probe_rules import Health, Kind, answered, at_start, wanted

ASK = {"tcpSocket": {"port": 1}}


def container(**probes: Any) -> Container:
    """One with these probes."""
    return Container.model_validate({"name": "c", "image": "i", **probes})


def heard(of: Container, health: Health, kind: Kind, *answers: bool) -> Health:
    """After these answers."""
    for good in answers:
        health = answered(of, health, kind, good)
    return health


def test_without_probes_a_container_is_ready_at_once() -> None:
    """Nothing is asked."""
    health = at_start(container())
    assert (health.started, health.ready, wanted(container(), health)) == (True, True, ())


def test_until_it_has_started_nothing_else_is_asked() -> None:
    """Then the startup probe is never asked again."""
    it = container(startupProbe=ASK, readinessProbe=ASK, livenessProbe=ASK)
    health = at_start(it)
    assert (health.ready, wanted(it, health)) == (False, (Kind.STARTUP,))
    health = heard(it, health, Kind.STARTUP, False, False, True)
    assert (health.ready, health.unfit, set(wanted(it, health))) == (False, "", {Kind.READINESS, Kind.LIVENESS})


def test_a_container_that_does_not_start_is_unfit() -> None:
    """After as many bad answers in a row as its threshold says."""
    it = container(startupProbe={**ASK, "failureThreshold": 2})
    assert not heard(it, at_start(it), Kind.STARTUP, False).unfit
    assert heard(it, at_start(it), Kind.STARTUP, False, False).unfit == "startup probe failed 2 times in a row"


def test_readiness_comes_and_goes() -> None:
    """It never ends the container."""
    it = container(readinessProbe={**ASK, "failureThreshold": 2, "successThreshold": 2})
    ready = heard(it, at_start(it), Kind.READINESS, True, True)
    assert not heard(it, at_start(it), Kind.READINESS, True).ready
    assert ready.ready
    assert heard(it, ready, Kind.READINESS, False).ready
    gone = heard(it, ready, Kind.READINESS, False, False, False, False)
    assert (gone.ready, gone.unfit) == (False, "")


def test_liveness_ends_a_container_after_failures_in_a_row() -> None:
    """A good answer between them begins the count anew."""
    it = container(livenessProbe={**ASK, "failureThreshold": 3})
    assert not heard(it, at_start(it), Kind.LIVENESS, False, False, True, False, False).unfit
    assert heard(it, at_start(it), Kind.LIVENESS, False, False, False).unfit == "liveness probe failed 3 times in a row"
