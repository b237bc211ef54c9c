"""Targets, options and TLS files of the channel."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.errors import ConfigError, StoreUnavailableError
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store.api import prefix_end
from elastic_trainer.store.etcd import StoreConnection, options, resolved, target


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
