"""Opens the store of the settings, or explains in one sentence why that fails.

*Runs in* the main thread of an agent or command, at its start.
*Owns* nothing: the returned store belongs to the caller.
*Fails by* ConfigError (wrong endpoint, TLS, credentials) at once, StoreUnavailableError at the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import ConfigError, CredentialsError, StoreUnavailableError
from elastic_trainer.settings import Endpoint, StoreSettings
from elastic_trainer.store.api import Store
from elastic_trainer.store.diagnosis import START_HINT, StoreFault, examine
from elastic_trainer.store.handshake import refusal
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.retry import within
from elastic_trainer.telemetry.logs import logger

FIRST_TRY_S = 2.0
"""How long etcd may take to answer before its endpoints are examined."""
EXAMINE_S = 1.0
REFUSED_PAUSE_S = 1.0
"""Seconds between two attempts with refused credentials."""
_UNTRUSTED = "certificate_verify_failed"  # as failures.reason() has it


def connect(settings: StoreSettings) -> Store:
    """The store at the endpoints of ``settings``. Sends nothing before the first call; imports grpc."""
    store: Store = import_module("elastic_trainer.store.etcd").EtcdStore(settings)
    return store


def connect_checked(settings: StoreSettings, deadline: Deadline, *, run: str | None = None) -> Store:
    """A store that has answered a read of the prefix, or of ``run``'s keys, which are all that a run's user may read.

    Waits for etcd to start until ``deadline``. Raises ConfigError as soon as it is clear that waiting cannot help,
    otherwise StoreUnavailableError, which says what is wrong with which endpoint.
    """
    try:
        return _tried(settings, run, deadline.at_most(FIRST_TRY_S))
    except StoreUnavailableError as error:
        _raise_if_hopeless(_examined(settings, deadline), error)
    try:
        return within(deadline, lambda: _tried(settings, run, deadline))
    except StoreUnavailableError as error:
        findings = _examined(settings, Deadline.after(EXAMINE_S))
        _raise_if_hopeless(findings, error)
        raise StoreUnavailableError(_message(findings), hint=_hint(findings)) from error


def connect_patiently(settings: StoreSettings, deadline: Deadline, *, run: str | None = None) -> Store:
    """As :func:`connect_checked`, for unattended nodes: password and certificate files may be in the middle of a
    replacement, so a refusal is final only at ``deadline``."""
    refused: CredentialsError | None = None
    while True:
        try:
            return connect_checked(settings, deadline, run=run)
        except CredentialsError as error:
            if not settings.renewable or deadline.remaining_s() <= REFUSED_PAUSE_S:
                raise
            if refused is None:
                logger().warning("store.refused", error=str(error))
            refused = error
        except StoreUnavailableError as error:
            if refused is None:
                raise
            raise refused from error  # etcd was too slow for the last attempt, but the cause is known
        pause(REFUSED_PAUSE_S)


def _tried(settings: StoreSettings, run: str | None, deadline: Deadline) -> Store:
    root = f"{settings.prefix}/" if run is None else RunKeys(settings.prefix, run).root
    store = connect(settings)
    try:
        store.range(root, deadline, limit=1, keys_only=True)
    except BaseException:
        store.close()
        raise
    return store


def _examined(settings: StoreSettings, deadline: Deadline) -> list[StoreFault]:
    tls, timeout_s = settings.ca_cert is not None, min(EXAMINE_S, max(0.2, deadline.remaining_s()))
    found = [examine(endpoint, tls=tls, timeout_s=timeout_s) for endpoint in settings.endpoints]
    return [
        _explained(finding, settings, endpoint) for finding, endpoint in zip(found, settings.endpoints, strict=True)
    ]


def _explained(finding: StoreFault, settings: StoreSettings, endpoint: Endpoint) -> StoreFault:
    """A failed handshake with its cause; waiting does not repair it."""
    cause = refusal(endpoint, settings, EXAMINE_S) if finding.handshake else None
    if cause is None:
        return finding
    return replace(finding, text=f"{finding.text}: {cause}", permanent=True)


def _raise_if_hopeless(findings: Sequence[StoreFault], error: StoreUnavailableError) -> None:
    """Raise ConfigError if waiting cannot repair the fault."""
    hopeless = all(finding.permanent for finding in findings) or any(finding.for_all for finding in findings)
    if _UNTRUSTED in error.message or hopeless:
        refused = any(finding.handshake and finding.permanent for finding in findings)
        kind = CredentialsError if refused else ConfigError
        raise kind(_message(findings), hint=_hint(findings)) from error


def _message(findings: Sequence[StoreFault]) -> str:
    reasons = "; ".join(dict.fromkeys(finding.text for finding in findings))
    return f"cannot use the store: {reasons}"


def _hint(findings: Sequence[StoreFault]) -> str:
    """The most specific advice: faults of all endpoints, then an etcd without a quorum before its dead members."""
    hints = [finding.hint for finding in sorted(findings, key=lambda finding: not finding.for_all)]
    return next((hint for hint in hints if hint != START_HINT), hints[0])
