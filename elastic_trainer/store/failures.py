"""Translates a failed call to etcd, by status code and text, into this package's errors. Pure.

The texts are etcd's own (``api/v3rpc/rpctypes/error.go``) and gRPC's; for an unknown text the safer meaning counts: a
write may have happened.
"""

from __future__ import annotations

from elastic_trainer.errors import (
    AccessDeniedError,
    ConfigError,
    CredentialsError,
    ElasticTrainerError,
    LeaseLostError,
    OutcomeUnknownError,
    PermanentError,
    StoreUnavailableError,
)

_NEVER_SENT = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "empty address list",
    "DNS resolution failed",
    "Channel closed",
    "Domain name not found",
)
"""gRPC gave up before the request left this process."""

_NOTHING_HAPPENED = (
    "etcdserver: no leader",  # the request was rejected on arrival
    "etcdserver: not capable",
    "etcdserver: unhealthy cluster",
    "etcdserver: too many requests",
)

_STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty")
_BAD_CREDENTIALS = ("authentication failed", "user name not found", "password was given")
_DENIED_HINT = "elastic-trainer admin grant gives a user rights on one run, admin init those to read all"
_NO_SPACE = "database space exceeded"


def is_stale_token(code: str, text: str) -> bool:
    """Whether the server no longer knows our token (it restarted, or the token expired): authenticate again."""
    return code in ("UNAUTHENTICATED", "INVALID_ARGUMENT") and any(part in text for part in _STALE_TOKEN)


def translate(code: str, text: str, *, where: str, write: bool) -> ElasticTrainerError:
    """The error for a call to ``where`` that ended with gRPC status ``code`` and ``text``."""
    if code == "NOT_FOUND" and "lease not found" in text:
        return LeaseLostError("the lease has expired")
    refused = _refused(code, text, where)
    if refused is not None:
        return refused
    return _transient(code, text, where, write)


def _refused(code: str, text: str, where: str) -> ElasticTrainerError | None:
    """The error if a retry cannot help."""
    if code == "PERMISSION_DENIED":
        return AccessDeniedError(f"etcd at {where} denies access", hint=_DENIED_HINT)
    if code == "UNAUTHENTICATED" or any(part in text for part in _BAD_CREDENTIALS):
        return CredentialsError(f"etcd at {where} refuses the credentials: {text}", hint="correct user and password")
    if "user name is empty" in text:
        return ConfigError(f"etcd at {where} requires a user", hint="set user and password")
    if code == "UNIMPLEMENTED":
        return ConfigError(f"the service at {where} is not etcd (v3)", hint="correct the endpoint")
    if code in ("INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION"):
        return PermanentError(f"etcd at {where} refuses the request: {text}")
    return None


def _transient(code: str, text: str, where: str, write: bool) -> ElasticTrainerError:
    if code == "RESOURCE_EXHAUSTED" and _NO_SPACE in text:
        hint = "compact and defragment etcd, then disarm its NOSPACE alarm"
        return StoreUnavailableError(f"etcd at {where} has no space left", hint=hint)
    nothing_happened = code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") and any(
        part in text for part in (*_NEVER_SENT, *_NOTHING_HAPPENED)
    )
    if write and not nothing_happened:
        return OutcomeUnknownError(f"a write to etcd at {where} may or may not have happened: {reason(code, text)}")
    return StoreUnavailableError(f"etcd at {where} does not answer: {reason(code, text)}")


def reason(code: str, text: str) -> str:
    """A short cause for people, extracted from gRPC's long texts."""
    for phrase in ("Connection refused", "Socket closed", "Connection reset", "CERTIFICATE_VERIFY_FAILED",
                   "WRONG_VERSION_NUMBER", "Domain name not found", "No route to host"):  # fmt: skip
        if phrase in text:
            return phrase.lower()
    if code == "DEADLINE_EXCEEDED":
        return "timed out"
    return text.removeprefix("etcdserver: ")[:200] or code.lower()
