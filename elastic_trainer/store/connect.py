"""Open the store that the settings name, and say in one sentence why that does not work.

*Runs in* the main thread of an agent or command, at its start.
*Owns* nothing: the store that it returns belongs to the caller.
*Fails by* ConfigError (wrong endpoint, TLS, credentials) at once, StoreUnavailableError at the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, StoreUnavailableError
from elastic_trainer.settings import StoreSettings
from elastic_trainer.store.api import Store
from elastic_trainer.store.diagnosis import START_HINT, Finding, examine
from elastic_trainer.store.retry import within

FIRST_TRY_S = 2.0
"""How long etcd may take to answer before its endpoints are examined."""
EXAMINE_S = 1.0
_UNTRUSTED = "certificate_verify_failed"  # as failures.reason() has it


def connect(settings: StoreSettings) -> Store:
    """The store at ``settings``' endpoints. Nothing is sent before the first call; grpc is imported here."""
    store: Store = import_module("elastic_trainer.store.etcd").EtcdStore(settings)
    return store


def connect_checked(settings: StoreSettings, deadline: Deadline) -> Store:
    """A store that has answered a read of the prefix.

    Waits for etcd to come up until ``deadline``. Raises ConfigError as soon as it is clear that waiting cannot help,
    else StoreUnavailableError that says what is wrong with which endpoint.
    """
    try:
        return _tried(settings, deadline.at_most(FIRST_TRY_S))
    except StoreUnavailableError as error:
        _raise_if_hopeless(_examined(settings, deadline), error)
    try:
        return within(deadline, lambda: _tried(settings, deadline))
    except StoreUnavailableError as error:
        findings = _examined(settings, Deadline.after(EXAMINE_S))
        _raise_if_hopeless(findings, error)
        raise StoreUnavailableError(_message(findings, error), hint=_hint(findings)) from error


def _tried(settings: StoreSettings, deadline: Deadline) -> Store:
    store = connect(settings)
    try:
        store.range(f"{settings.prefix}/", deadline, limit=1)
    except BaseException:
        store.close()
        raise
    return store


def _examined(settings: StoreSettings, deadline: Deadline) -> list[Finding]:
    tls = settings.ca_cert is not None
    return [
        examine(endpoint, tls=tls, timeout_s=min(EXAMINE_S, max(0.2, deadline.remaining_s())))
        for endpoint in settings.endpoints
    ]


def _raise_if_hopeless(findings: Sequence[Finding], error: StoreUnavailableError) -> None:
    """Raise ConfigError when waiting cannot mend what is wrong."""
    hopeless = all(finding.permanent for finding in findings) or any(finding.for_all for finding in findings)
    if _UNTRUSTED in error.message or hopeless:
        raise ConfigError(_message(findings, error), hint=_hint(findings)) from error


def _message(findings: Sequence[Finding], error: StoreUnavailableError) -> str:
    told = "; ".join(dict.fromkeys(finding.text for finding in findings))
    cause = "; the certificate is not one that ca_cert vouches for" if _UNTRUSTED in error.message else ""
    return f"cannot use the store: {told}{cause}"


def _hint(findings: Sequence[Finding]) -> str:
    """The most specific advice: what holds for all, then an etcd without a quorum before its dead members."""
    hints = [finding.hint for finding in sorted(findings, key=lambda finding: not finding.for_all)]
    return next((hint for hint in hints if hint != START_HINT), hints[0])
