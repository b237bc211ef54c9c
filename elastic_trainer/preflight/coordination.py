"""Checks of etcd: whether each endpoint answers, its version and its latency.

*Runs in* the caller's thread. *Owns* one connection at a time. *Fails by* findings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.preflight.finding import Finding, Status
from elastic_trainer.preflight.limits import FitLimits
from elastic_trainer.settings import Endpoint, StoreSettings
from elastic_trainer.store import connect_checked
from elastic_trainer.store.api import Store

ENDPOINT_S, ENDPOINT_SHARE = 4.0, 0.1
"""Time limit of one endpoint, in seconds, and as a share of the time for all checks; the longer one holds."""
_TRIES = 7


def endpoints(settings: StoreSettings, run: str | None, limits: FitLimits, deadline: Deadline) -> list[Finding]:
    """One finding for each endpoint. If some work, failures of others are only warnings."""
    limit_s = max(ENDPOINT_S, ENDPOINT_SHARE * deadline.remaining_s())
    found = [_endpoint(settings, each, run, limits, deadline.at_most(limit_s)) for each in settings.endpoints]
    if all(finding.status is Status.BAD for finding in found):
        return found
    return [each.but(Status.WARN, each.hint) if each.status is Status.BAD else each for each in found]


def _endpoint(
    settings: StoreSettings, endpoint: Endpoint, run: str | None, limits: FitLimits, deadline: Deadline
) -> Finding:
    name = "etcd" if len(settings.endpoints) == 1 else f"etcd {endpoint}"
    alone = settings.model_copy(update={"endpoints": (endpoint,)})
    try:
        store = connect_checked(alone, deadline, run=run)
    except ElasticTrainerError as error:
        return Finding.failed(name, error)
    try:
        said = store.version(deadline)
    except ElasticTrainerError as error:
        return Finding(name, Status.WARN, f"{endpoint}: answers, but not with its version: {error.message}")
    finally:
        store.close()
    numbers = re.match(r"(\d+)\.(\d+)", said)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < limits.etcd_version:
        least = ".".join(map(str, limits.etcd_version))
        return Finding(name, Status.WARN, f"{endpoint}: etcd {said} is old", hint=f"use etcd {least} or newer")
    return Finding(name, Status.OK, f"{endpoint}: etcd {said}")


def round_trip(store: Store, key: str, limits: FitLimits, deadline: Deadline, clock: Clock = SYSTEM) -> Finding:
    """The median time of several linearizable reads. Raises the store's errors."""
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
        "etcd is far away or has a slow disk: recoveries will take longer" if slow else "",
    )
