"""Targets, options and TLS files of the channel; what etcd's and gRPC's failures mean to a caller."""

from __future__ import annotations

from pathlib import Path

import pytest

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
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store.api import prefix_end
from elastic_trainer.store.etcd import StoreConnection, is_stale_token, options, resolved, target, translate


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        ("etcd", "etcd:2379"),
        ("etcd.ns.svc:1234", "etcd.ns.svc:1234"),
        ("[::1]:5", "[::1]:5"),
        ("10.0.0.1:1,10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"),
        ("[::1]:1,[::2]:2", "ipv6:[::1]:1,[::2]:2"),
        ("10.0.0.1:1,10.0.0.1:1,10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"),
    ],
)
def test_targets(endpoints: str, expected: str) -> None:
    """One endpoint is left to gRPC's resolver; several become a list of addresses."""
    assert target(resolved(parse_endpoints(endpoints))) == expected


def test_a_list_of_names_is_resolved_and_unknown_ones_are_passed_over() -> None:
    """gRPC takes one name only, people have lists; one dead name must not hide the others."""
    addresses = resolved(parse_endpoints("localhost:1,no-such-host.invalid:2,10.0.0.3:3"))
    assert "10.0.0.3:3" in addresses
    assert {"127.0.0.1:1", "[::1]:1"} & set(addresses)
    assert not [address for address in addresses if address.endswith(":2")]
    assert target(addresses).startswith("ipv4:")
    with pytest.raises(StoreUnavailableError, match=r"a\.invalid, b\.invalid"):
        resolved(parse_endpoints("a.invalid,b.invalid"))


def test_one_name_for_the_certificate_of_a_list() -> None:
    """Only a list needs to know which name its certificates carry."""
    assert "grpc.ssl_target_name_override" not in dict(options(parse_endpoints("a:1")))
    assert dict(options(parse_endpoints("a:1,b:2")))["grpc.ssl_target_name_override"] == "a"


def test_tls_files_are_checked_before_grpc_sees_them(tmp_path: Path) -> None:
    """gRPC reports bad files as a failed handshake, for ever; this names the file."""
    endpoints = parse_endpoints("127.0.0.1:1")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        StoreConnection(StoreSettings(endpoints=endpoints, ca_cert=tmp_path / "none"))
    (tmp_path / "der").write_bytes(b"\x30\x82")
    with pytest.raises(ConfigError, match="not in PEM form"):
        StoreConnection(StoreSettings(endpoints=endpoints, ca_cert=tmp_path / "der"))
    with pytest.raises(ConfigError, match="no 'ca_cert'"):
        StoreConnection(StoreSettings(endpoints=endpoints, cert=tmp_path / "der", key=tmp_path / "der"))


def test_the_end_of_a_prefix() -> None:
    """It is the first key after all that begin with the prefix."""
    assert prefix_end("/run/nodes/") == "/run/nodes0"
    assert prefix_end("a") == "b"
    for wrong in ("", "ü", "\x7f"):
        with pytest.raises(ValueError, match="a prefix must"):
            prefix_end(wrong)


def kind(code: str, text: str, *, write: bool) -> type[ElasticTrainerError]:
    return type(translate(code, text, where="10.0.0.1:2379", write=write))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("UNAVAILABLE", "Socket closed"),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer"),
        ("UNAVAILABLE", "keepalive watchdog timeout"),
        ("UNAVAILABLE", "etcdserver: request timed out"),
        ("UNAVAILABLE", "etcdserver: request timed out, possibly due to previous leader failure"),
        ("UNAVAILABLE", "etcdserver: leader changed"),
        ("UNAVAILABLE", "etcdserver: server stopped"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded"),
        ("UNKNOWN", "raft proposal dropped"),
        ("INTERNAL", "anything"),
        ("CANCELLED", ""),
        ("SOMETHING_NEW", "a text of a later version"),
    ],
)
def test_a_write_that_may_have_happened_is_unknown(code: str, text: str) -> None:
    """A read that failed so is merely unavailable; for a write only the careful answer is right."""
    assert kind(code, text, write=False) is StoreUnavailableError
    assert kind(code, text, write=True) is OutcomeUnknownError


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: ... Connection refused"),
        ("UNAVAILABLE", "connections to all backends failing; last error: UNAVAILABLE"),
        ("UNAVAILABLE", "DNS resolution failed for etcd:2379"),
        ("UNAVAILABLE", "etcdserver: no leader"),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests"),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded"),
    ],
)
def test_a_write_that_was_never_taken_may_be_repeated(code: str, text: str) -> None:
    """Where nothing can have happened the error says so, which lets the caller try again."""
    expected = StoreUnavailableError
    assert kind(code, text, write=False) is expected
    if "space" not in text:
        assert kind(code, text, write=True) is expected
    else:
        assert "no space" in str(translate(code, text, where="h:1", write=True))


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        ("NOT_FOUND", "etcdserver: requested lease not found", LeaseLostError),
        ("PERMISSION_DENIED", "etcdserver: permission denied", AccessDeniedError),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", CredentialsError),
        ("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user ID or password", CredentialsError),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", ConfigError),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", ConfigError),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", PermanentError),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", PermanentError),
        ("OUT_OF_RANGE", "etcdserver: too large lease TTL", PermanentError),
    ],
)
def test_what_trying_again_cannot_mend(code: str, text: str, expected: type[ElasticTrainerError], write: bool) -> None:
    """Refusals are permanent for reads and writes alike."""
    assert kind(code, text, write=write) is expected


def test_messages_name_the_endpoint_and_a_short_cause() -> None:
    """gRPC's paragraph becomes one clause."""
    text = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:2379: Failed: Connection refused"
    error = translate("UNAVAILABLE", text, where="10.0.0.1:2379", write=False)
    assert str(error) == "etcd at 10.0.0.1:2379 does not answer: connection refused"


def test_stale_tokens_are_distinguished_from_wrong_passwords() -> None:
    """Only the former is worth another authentication."""
    assert is_stale_token("UNAUTHENTICATED", "etcdserver: invalid auth token")
    assert is_stale_token("INVALID_ARGUMENT", "etcdserver: revision of auth store is old")
    assert not is_stale_token("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user ID or password")
    assert not is_stale_token("PERMISSION_DENIED", "etcdserver: permission denied")
