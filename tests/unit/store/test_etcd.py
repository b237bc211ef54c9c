"""The door to etcd: etcd3's messages, targets, options and TLS files of the channel, what failures and answers mean."""

from __future__ import annotations

import subprocess
import sys
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
from elastic_trainer.settings import Endpoint, StoreSettings, parse_endpoints
from elastic_trainer.store import etcd
from elastic_trainer.store.api import prefix_end
from elastic_trainer.store.connect import judge

# ---- etcd3


def run_python(code: str) -> str:
    """What a fresh interpreter prints that treats warnings as errors."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_etcd3_loads_once_without_a_warning_and_works() -> None:
    """With warnings as errors etcd3 imports on the installed protobuf, and its messages survive the wire; the first of
    several threads installs, the others wait for it."""
    code = (
        "import threading\n"
        "from elastic_trainer.store.etcd import load_etcd3\n"
        "found = []\n"
        "threads = [threading.Thread(target=lambda: found.append(load_etcd3().etcdrpc)) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "rpc = found[0]\n"
        "back = rpc.PutRequest.FromString(rpc.PutRequest(key=b'k', value=b'v', lease=7).SerializeToString())\n"
        "print(back.key, back.lease, rpc.RangeRequest.DESCEND, rpc.Compare.NOT_EQUAL)\n"
        "print(len(found), len({each.TxnRequest for each in found}))"
    )
    assert run_python(code).split("\n") == ["b'k' 7 2 3", "8 1"]
    assert etcd.load_etcd3() is etcd.load_etcd3()


def test_other_etcd_clients_are_left_alone() -> None:
    """Nothing is registered in the default pool, and a client that did so before keeps its own messages."""
    code = (
        "from google.protobuf import descriptor_pool\n"
        "from elastic_trainer.store import etcd\n"
        "pool = descriptor_pool.Default()\n"
        "etcd.load_etcd3()\n"
        "try:\n"
        "    pool.FindFileByName('rpc.proto')\n"
        "    print('disturbed')\n"
        "except KeyError:\n"
        "    pass\n"
        "for name in ('kv', 'auth', 'rpc'):\n"
        "    pool.AddSerializedFile(etcd.serialized_descriptor(etcd.source_directory() / f'{name}_pb2.py'))\n"
        "print(pool.FindMessageTypeByName('etcdserverpb.PutRequest').full_name)"
    )
    assert run_python(code) == "etcdserverpb.PutRequest"


def test_importing_the_store_package_is_cheap() -> None:
    names = "('grpc', 'etcd3', 'torch', 'google.protobuf')"
    code = f"import sys, elastic_trainer.store\nprint([name for name in {names} if name in sys.modules])"
    assert run_python(code) == "[]"


def test_what_is_not_etcd3_is_named(tmp_path: Path) -> None:
    """Missing files, sources without a descriptor, and descriptors that are damaged, foreign or incomplete."""
    path = tmp_path / "kv_pb2.py"
    with pytest.raises(ConfigError, match=r"kv_pb2\.py cannot be read"):
        etcd.serialized_descriptor(path)
    path.write_text("print('hello')\n")
    with pytest.raises(ConfigError, match=r"kv_pb2\.py holds no descriptor"):
        etcd.serialized_descriptor(path)
    for literal in ("data", "_b('\\u1234')", "b'\\x1'"):
        path.write_text(f"f(serialized_pb={literal})\n")
        with pytest.raises(ConfigError, match="in an unknown form"):
            etcd.serialized_descriptor(path)
    source = (etcd.source_directory() / "rpc_pb2.py").read_text()
    for text in ("f(serialized_pb=b'\\xff\\xff')\n", source):
        for name in ("kv", "auth", "rpc"):
            (tmp_path / f"{name}_pb2.py").write_text(text)
        with pytest.raises(ConfigError, match="unexpected descriptors"):
            etcd.build(tmp_path)


def test_the_sources_are_parsed_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for name in ("kv", "auth", "rpc"):
        source = (etcd.source_directory() / f"{name}_pb2.py").read_text()
        (tmp_path / f"{name}_pb2.py").write_text(f"open({str(marker)!r}, 'w').close()\n{source}")
    assert {etcd.PACKAGE, f"{etcd.PACKAGE}.rpc_pb2", f"{etcd.PACKAGE}.rpc_pb2_grpc"} <= set(etcd.build(tmp_path))
    assert not marker.exists()


# ---- the channel


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
    """One endpoint is left to gRPC's resolver; several become a list of addresses, with the first one's certificate."""
    parsed = parse_endpoints(endpoints)
    assert etcd.target(etcd.resolved(parsed)) == expected
    name = dict(etcd.options(parsed)).get("grpc.ssl_target_name_override")
    assert name == (parsed[0].host if len(parsed) > 1 else None)


def test_a_list_of_names_is_resolved_and_unknown_ones_are_passed_over() -> None:
    """gRPC takes one name only, people have lists; one dead name must not hide the others."""
    addresses = etcd.resolved(parse_endpoints("localhost:1,no-such-host.invalid:2,10.0.0.3:3"))
    assert "10.0.0.3:3" in addresses
    assert {"127.0.0.1:1", "[::1]:1"} & set(addresses)
    assert not [address for address in addresses if address.endswith(":2")]
    assert etcd.target(addresses).startswith("ipv4:")
    with pytest.raises(StoreUnavailableError, match=r"a\.invalid, b\.invalid"):
        etcd.resolved(parse_endpoints("a.invalid,b.invalid"))


def test_tls_files_are_checked_before_grpc_sees_them(tmp_path: Path) -> None:
    """gRPC reports bad files as a failed handshake, for ever; this names the file."""
    (der := tmp_path / "der").write_bytes(b"\x30\x82")
    for files, sentence in (
        ({"ca_cert": tmp_path / "none"}, "cannot be read: No such file"),
        ({"ca_cert": der}, "not in PEM form"),
        ({"cert": der, "key": der}, "no 'ca_cert'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            etcd.StoreConnection(StoreSettings(endpoints=parse_endpoints("127.0.0.1:1"), **files))


def test_the_end_of_a_prefix() -> None:
    assert (prefix_end("/run/nodes/"), prefix_end("a")) == ("/run/nodes0", "b")
    for wrong in ("", "ü", "\x7f"):
        with pytest.raises(ValueError, match="a prefix must"):
            prefix_end(wrong)


# ---- failures


AWAY, UNKNOWN = StoreUnavailableError, OutcomeUnknownError


@pytest.mark.parametrize(
    ("code", "text", "of_a_read", "of_a_write"),
    [
        ("UNAVAILABLE", "Socket closed", AWAY, UNKNOWN),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", AWAY, UNKNOWN),
        ("UNAVAILABLE", "keepalive watchdog timeout", AWAY, UNKNOWN),
        ("UNAVAILABLE", "etcdserver: request timed out, possibly due to previous leader failure", AWAY, UNKNOWN),
        ("UNAVAILABLE", "etcdserver: leader changed", AWAY, UNKNOWN),
        ("UNAVAILABLE", "etcdserver: server stopped", AWAY, UNKNOWN),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", AWAY, UNKNOWN),
        ("UNKNOWN", "raft proposal dropped", AWAY, UNKNOWN),
        ("INTERNAL", "anything", AWAY, UNKNOWN),
        ("CANCELLED", "", AWAY, UNKNOWN),
        ("SOMETHING_NEW", "a text of a later version", AWAY, UNKNOWN),
        ("UNAVAILABLE", "failed to connect to all addresses; last error: ... Connection refused", AWAY, AWAY),
        ("UNAVAILABLE", "connections to all backends failing; last error: UNAVAILABLE", AWAY, AWAY),
        ("UNAVAILABLE", "DNS resolution failed for etcd:2379", AWAY, AWAY),
        ("UNAVAILABLE", "etcdserver: no leader", AWAY, AWAY),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", AWAY, AWAY),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", AWAY, AWAY),
        ("NOT_FOUND", "etcdserver: requested lease not found", LeaseLostError, LeaseLostError),
        ("PERMISSION_DENIED", "etcdserver: permission denied", AccessDeniedError, AccessDeniedError),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", CredentialsError, CredentialsError),
        ("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user", CredentialsError, CredentialsError),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", ConfigError, ConfigError),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", ConfigError, ConfigError),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", PermanentError, PermanentError),
        ("OUT_OF_RANGE", "etcdserver: too large lease TTL", PermanentError, PermanentError),
    ],
)
def test_what_a_failure_means(
    code: str, text: str, of_a_read: type[ElasticTrainerError], of_a_write: type[ElasticTrainerError]
) -> None:
    """A write that may have happened is unknown; one that was never taken may be repeated; a refusal is final."""
    found = [etcd.translate(code, text, where="10.0.0.1:2379", write=write) for write in (False, True)]
    assert [type(each) for each in found] == [of_a_read, of_a_write]
    assert ("no space left" in str(found[1])) == ("space exceeded" in text)


def test_messages_name_the_endpoint_and_a_short_cause() -> None:
    text = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:2379: Failed: Connection refused"
    error = etcd.translate("UNAVAILABLE", text, where="10.0.0.1:2379", write=False)
    assert str(error) == "etcd at 10.0.0.1:2379 does not answer: connection refused"


def test_stale_tokens_are_distinguished_from_wrong_passwords() -> None:
    """Only the former is worth another authentication."""
    assert etcd.is_stale_token("UNAUTHENTICATED", "etcdserver: invalid auth token")
    assert etcd.is_stale_token("INVALID_ARGUMENT", "etcdserver: revision of auth store is old")
    assert not etcd.is_stale_token("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user ID or password")
    assert not etcd.is_stale_token("PERMISSION_DENIED", "etcdserver: permission denied")


ETCD = b'HTTP/1.1 200 OK\r\n\r\n{"etcdserver":"3.5.1","etcdcluster":"3.5.0"}'
HTTPS = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"


@pytest.mark.parametrize(
    ("answer", "tls", "text", "permanent"),
    [
        (ETCD, False, "up but does not serve requests", False),
        (ETCD, True, "does not use TLS", True),
        (HTTPS, False, "10.0.0.1:2379 requires TLS", True),
        (HTTPS, True, "TLS handshake with 10.0.0.1:2379 fails", False),
        (b"\x15\x03\x01\x00\x02\x02\x16", False, "requires TLS", True),
        (b"HTTP/1.1 404 Not Found\r\n\r\n<html>", False, "is a web server (HTTP/1.1 404), not etcd", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n<html>", False, "answers HTTP/1.1 503", False),  # a proxy's
        (b"SSH-2.0-OpenSSH_9.2\r\n", False, "is not etcd", True),
        (b"", False, "closes connections without an answer", False),
    ],
)
def test_judging_an_answer(answer: bytes, tls: bool, text: str, permanent: bool) -> None:
    """The sentence names the endpoint and what is wrong; only hopeless cases are permanent."""
    finding = judge(answer, Endpoint(host="10.0.0.1", port=2379), tls=tls)
    assert text in finding.text
    assert "10.0.0.1:2379" in finding.text
    assert finding.permanent is permanent
    assert finding.hint
