"""Builds gRPC channels to etcd with etcd3's own set-up: target address, options, TLS, stubs.

*Runs in* agents and commands. *Owns* one gRPC channel for each :class:`Wire`.
*Fails by* raising ConfigError for unreadable certificates, StoreUnavailableError when no host name resolves.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.errors import ConfigError, StoreUnavailableError
from elastic_trainer.settings import Endpoint, StoreSettings
from elastic_trainer.store.descriptors import load_etcd3

KEEPALIVE_PATH = "/etcdserverpb.Lease/LeaseKeepAlive"


class Wire:
    """One channel and the stubs on it."""

    def __init__(self, settings: StoreSettings, addresses: tuple[str, ...]) -> None:
        etcd3 = load_etcd3()
        self.addresses = addresses
        self.rpc: Any = etcd3.etcdrpc
        self._client = _client(etcd3, settings, addresses)
        channel = self._client.channel
        self.kv = self._client.kvstub
        self.lease = self._client.leasestub
        self.maintenance = self._client.maintenancestub
        self.auth = self.rpc.AuthStub(channel)
        self.watch = self.rpc.WatchStub(channel)
        # The method is a stream, but etcd answers each request once and ends with the client: on the wire that equals
        # a unary call, which needs no thread to feed a stream of one request.
        self.keep_alive = channel.unary_unary(
            KEEPALIVE_PATH,
            request_serializer=self.rpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=self.rpc.LeaseKeepAliveResponse.FromString,
        )

    def close(self) -> None:
        """Close the channel; calls in flight end as cancelled."""
        self._client.close()


def is_address(host: str) -> bool:
    """Whether ``host`` is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolved(endpoints: Sequence[Endpoint]) -> tuple[str, ...]:
    """``address:port`` of all endpoints, names replaced by their addresses; names that do not resolve are skipped.

    gRPC takes several addresses in one target but only one name, and users have lists of names. A single endpoint is
    passed to gRPC as it is, which follows its DNS record.
    """
    if len(endpoints) == 1:
        return (str(endpoints[0]),)
    found = [address for endpoint in endpoints for address in _addresses(endpoint)]
    if not found:
        names = ", ".join(endpoint.host for endpoint in endpoints)
        raise StoreUnavailableError(f"none of the store's host names resolves: {names}", hint="check DNS")
    return tuple(dict.fromkeys(found))


def _addresses(endpoint: Endpoint) -> list[str]:
    if is_address(endpoint.host):
        return [str(endpoint)]
    try:
        records = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(Endpoint(host=str(record[4][0]), port=endpoint.port)) for record in records]


def target(addresses: Sequence[str]) -> str:
    """The gRPC target for ``addresses``: a single one as it is, several as a list (only IPv4 ones if there are any)."""
    if len(addresses) == 1:
        return addresses[0]
    v4 = [address for address in addresses if not address.startswith("[")]
    return f"ipv4:{','.join(v4)}" if v4 else f"ipv6:{','.join(addresses)}"


def options(endpoints: Sequence[Endpoint]) -> list[tuple[str, int | str]]:
    """gRPC channel options."""
    chosen: list[tuple[str, int | str]] = [
        ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
        ("grpc.keepalive_time_ms", 10_000),  # detects a frozen server; etcd answers 2 s with GOAWAY
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),  # newer gRPC uses this one, 60 s by default (measured with 1.85)
        ("grpc.http2.max_pings_without_data", 0),  # a quiet watch needs its pings: no limit
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", 2_000),  # despite its name, the time limit of one attempt to connect
        ("grpc.use_local_subchannel_pool", 1),  # otherwise a second store shares the first one's connection
        ("grpc.enable_http_proxy", 0),  # etcd is near; a proxy variable meant for downloads must not catch it
        ("grpc.max_receive_message_length", -1),  # a read of many nodes may exceed gRPC's 4 MiB
    ]
    if len(endpoints) > 1:
        # A list has no name of its own: certificates are checked against the first endpoint's.
        chosen.append(("grpc.default_authority", str(endpoints[0])))
        chosen.append(("grpc.ssl_target_name_override", endpoints[0].host))
    return chosen


def _client(etcd3: Any, settings: StoreSettings, addresses: tuple[str, ...]) -> Any:
    """etcd3's client, for its channel and stubs. It takes host and port separately only to join them again."""
    if settings.cert is not None and settings.ca_cert is None:
        raise ConfigError("a client certificate is set but no 'ca_cert'", hint="set ca_cert to the CA of etcd")
    for path in (settings.ca_cert, settings.cert, settings.key):
        if path is not None:
            _check_readable(path)
    host, _, port = target(addresses).rpartition(":")
    return etcd3.Etcd3Client(
        host=host,
        port=port,
        ca_cert=settings.ca_cert,
        cert_cert=settings.cert,
        cert_key=settings.key,
        grpc_options=options(settings.endpoints),
    )


def _check_readable(path: Path) -> None:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS file {str(path)!r} cannot be read: {error.strerror}", hint="check its path") from error
    if b"-----BEGIN" not in text:
        raise ConfigError(f"TLS file {str(path)!r} is not in PEM form", hint="convert it with openssl")
