"""Checks of etcd: does each endpoint answer, which version, how fast?

*Runs in* the thread that asks. *Owns* one connection at a time. *Fails by* findings, where nothing else is said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.preflight.finding import Finding, Status
from elastic_trainer.preflight.limits import FitLimits
from elastic_trainer.settings import StoreSettings
from elastic_trainer.store import connect_checked
from elastic_trainer.store.api import Store

ENDPOINT_S = 4.0
"""How long one endpoint may take."""
_TRIES = 7


def endpoints(settings: StoreSettings, run: str | None, limits: FitLimits, deadline: Deadline) -> list[Finding]:
    """One finding for each endpoint. With some that work, the others are but a warning."""
    found = [
        _endpoint(settings, index, run, limits, deadline.at_most(ENDPOINT_S))
        for index in range(len(settings.endpoints))
    ]
    if all(finding.status is Status.BAD for finding in found):
        return found
    return [_lessened(finding) if finding.status is Status.BAD else finding for finding in found]


def _lessened(finding: Finding) -> Finding:
    return Finding(finding.name, Status.WARN, finding.text, hint=finding.hint)


def _endpoint(settings: StoreSettings, index: int, run: str | None, limits: FitLimits, deadline: Deadline) -> Finding:
    endpoint = settings.endpoints[index]
    name = "etcd" if len(settings.endpoints) == 1 else f"etcd {endpoint}"
    alone = settings.model_copy(update={"endpoints": (endpoint,)})
    try:
        store = connect_checked(alone, deadline, run=run)
    except ElasticTrainerError as error:
        return Finding(name, Status.BAD, error.message, hint=error.hint or "")
    try:
        return version(store, f"{endpoint}: ", limits, deadline, name)
    finally:
        store.close()


def version(store: Store, where: str, limits: FitLimits, deadline: Deadline, name: str = "etcd") -> Finding:
    """Which etcd it is."""
    try:
        said = store.version(deadline)
    except ElasticTrainerError as error:
        return Finding(name, Status.WARN, f"{where}answers, but not with its version: {error.message}")
    numbers = re.match(r"(\d+)\.(\d+)", said)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < limits.etcd_version:
        least = ".".join(map(str, limits.etcd_version))
        return Finding(name, Status.WARN, f"{where}etcd {said} is old", hint=f"use etcd {least} or newer")
    return Finding(name, Status.OK, f"{where}etcd {said}")


def round_trip(store: Store, key: str, limits: FitLimits, deadline: Deadline, clock: Clock = SYSTEM) -> Finding:
    """How long a read that asks a quorum takes; the middle of several. Raises the store's errors."""
    times = list[float]()
    for _ in range(_TRIES):
        begun = clock.monotonic()
        store.get(key, deadline)
        times.append(clock.monotonic() - begun)
    return judged_round_trip(times, limits)


def judged_round_trip(times: Sequence[float], limits: FitLimits) -> Finding:
    """The finding for these times. Pure."""
    value_ms, limit_ms = median(times) * 1e3, limits.etcd_round_trip_s * 1e3
    slow = value_ms > limit_ms
    return Finding(
        "etcd.round_trip",
        Status.WARN if slow else Status.OK,
        f"{value_ms:.3g} ms",
        value_ms,
        "ms",
        limit_ms,
        "etcd is far away, or its disk is slow: recoveries will take longer" if slow else "",
    )
