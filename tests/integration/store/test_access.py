"""Users and passwords, TLS, and what a wrong set-up is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import (
    EXIT_CONFIG,
    ConfigError,
    CredentialsError,
    ElasticTrainerError,
    StoreUnavailableError,
    TransientError,
)
from elastic_trainer.local.etcd import EtcdCluster, EtcdServer
from elastic_trainer.store import connect_checked, connect_patiently
from elastic_trainer.store.accounts import Accounts
from elastic_trainer.store.api import Put, Store
from elastic_trainer.store.etcd import StoreConnection
from tests.integration.store.support import client, put, settings, watching
from tests.support.certificates import Authority
from tests.support.etcd import TlsEtcdServer, guard
from tests.support.waiting import soon


def checked(endpoint: str, limit_s: float = 30.0, **options: Any) -> None:
    connect_checked(settings(endpoint, **options), Deadline.after(limit_s)).close()


def refusal(endpoint: str, limit_s: float = 30.0, **options: Any) -> ElasticTrainerError:
    with pytest.raises(ElasticTrainerError) as caught:
        checked(endpoint, limit_s, **options)
    return caught.value


def refused(endpoint: str, **options: Any) -> str:
    """The sentence of the configuration error."""
    error = refusal(endpoint, **options)
    assert isinstance(error, ConfigError)
    return str(error)


@pytest.fixture
def guarded(own_etcd: EtcdServer) -> EtcdServer:
    return guard(own_etcd, "secret")


TRAINER: dict[str, Any] = {"user": "trainer", "password": "secret"}


def test_a_user_works_over_plaintext_and_outlives_its_token(guarded: EtcdServer) -> None:
    """Reads, writes, leases and watches carry the token; a restart of etcd, which forgets it, is not noticed. Nor
    is one under several callers: writes are done once."""
    with client(guarded.endpoint, **TRAINER) as store:
        recorder = watching(store, "/elastic_trainer/")
        lease = store.grant(60.0, soon())
        put(store, "/elastic_trainer/a", b"1", lease.id)
        recorder.wait_events(1)
        guarded.restart()
        assert store.keep_alive(lease.id, soon()) > 0
        put(store, "/elastic_trainer/a", b"2")
        recorder.wait_events(2)
        assert recorder.values() == [b"1", b"2"]
        store.revoke(lease.id, soon())
        guarded.restart()
        with ThreadPoolExecutor(6) as pool:
            revisions = list(pool.map(lambda number: put(store, f"/elastic_trainer/{number}"), range(6)))
        assert len(set(revisions)) == 6
        assert max(revisions) - min(revisions) == 5


def test_a_token_that_a_watch_has_dropped_is_made_anew(guarded: EtcdServer) -> None:
    """A call that finds its token stale, while a watch has found the same, is not left without any."""
    connection = StoreConnection(settings(guarded.endpoint, **TRAINER))
    try:
        assert connection.asks_who_it_is(soon())
        stale = connection._token
        connection.forget_token()
        assert connection._renewed_token(stale, soon())
    finally:
        connection.close()


def test_a_password_may_change_while_a_store_is_open(guarded: EtcdServer, tmp_path: Path) -> None:
    """etcd forgets the user's tokens at once, and refuses the old password: an outage, until the file has the new one.

    Who begins with a file that is wrong is told so at once.
    """
    file = tmp_path / "password"
    file.write_text("secret\n")
    login: dict[str, Any] = {"user": "trainer", "password_file": file}
    with client(guarded.endpoint, **login) as store:
        recorder = watching(store, "/elastic_trainer/")
        put(store, "/elastic_trainer/a", b"1")
        recorder.wait_events(1)
        with Accounts(settings(guarded.endpoint, user="root", password="r00t"), soon()) as accounts:
            accounts.ask("UserChangePassword", name="trainer", password="another")
        with pytest.raises(StoreUnavailableError):
            store.get("/elastic_trainer/a", Deadline.after(2.0))
        refused(guarded.endpoint, **login)
        file.write_text("another\n")
        put(store, "/elastic_trainer/a", b"2")
        recorder.wait_events(2)
        assert recorder.values() == [b"1", b"2"]
    file.unlink()
    assert "No such file" in refused(guarded.endpoint, **login)


def test_wrong_credentials_are_told_at_once(guarded: EtcdServer) -> None:
    """A wrong password, no user at all, and a prefix without rights are configuration errors that name etcd."""
    began = SYSTEM.monotonic()
    wrong = refused(guarded.endpoint, user="trainer", password="guess")
    assert f"etcd at {guarded.endpoint} refuses the credentials" in wrong
    assert "guess" not in wrong
    assert "user" in refused(guarded.endpoint)
    assert "denies access" in refused(guarded.endpoint, prefix="/other", **TRAINER)
    assert SYSTEM.monotonic() - began < 20.0
    checked(guarded.endpoint, **TRAINER)


def test_a_node_waits_for_credentials_that_are_being_replaced(guarded: EtcdServer, tmp_path: Path) -> None:
    """A pod may start between a new password and its Secret: what lies in a file is tried again until the deadline,
    and only then refused, as is at once what lies in none."""
    password = tmp_path / "password"
    password.write_text("that of before")
    options = settings(guarded.endpoint, user="trainer", password_file=password)
    new = tmp_path / "new"
    new.write_text("secret")
    replaced = threading.Timer(2.0, lambda: new.replace(password))  # whole, as Kubernetes does it
    replaced.start()
    connect_patiently(options, Deadline.after(60.0)).close()
    assert password.read_text() == "secret"  # it was not let in before
    replaced.join()
    password.write_text("that of before")
    with pytest.raises(CredentialsError) as caught:
        connect_patiently(options, Deadline.after(10.0))
    assert caught.value.exit_code == EXIT_CONFIG
    began = SYSTEM.monotonic()
    with pytest.raises(CredentialsError):
        connect_patiently(settings(guarded.endpoint, user="trainer", password="guess"), Deadline.after(120.0))
    assert SYSTEM.monotonic() - began < 60.0


def test_a_user_is_ignored_where_authentication_is_off(own_etcd: EtcdServer) -> None:
    """As etcd's own client does: the same settings work before and after authentication is switched on."""
    with client(own_etcd.endpoint, **TRAINER) as store:
        assert put(store, "/elastic_trainer/a") > 0


@pytest.fixture
def secured(etcd_binary: str, tmp_path: Path) -> Iterator[tuple[EtcdServer, dict[str, Any]]]:
    """An etcd that speaks TLS only and wants client certificates, and the options for it."""
    authority = Authority(tmp_path / "certificates")
    certificate, key = authority.issue("server")
    served = authority.certificate, certificate, key
    mine, my_key = authority.issue("agent")
    options: dict[str, Any] = {"ca_cert": authority.certificate, "cert": mine, "key": my_key}
    with TlsEtcdServer(tmp_path / "etcd", *served, binary=etcd_binary) as server:
        yield server, options


def test_client_certificates(secured: tuple[EtcdServer, dict[str, Any]]) -> None:
    """Calls and watches work over mutual TLS, for one endpoint and for a list with names, over a restart."""
    server, options = secured
    port = server.client_port
    for endpoint in (server.endpoint, f"localhost:{port}", f"127.0.0.1:{port},localhost:{port}"):
        with client(endpoint, **options) as store:
            recorder = watching(store, "/w/")
            put(store, "/w/a", b"1")
            recorder.wait_events(1)
            if endpoint == server.endpoint:
                server.restart()
            put(store, "/w/a", b"2")
            recorder.wait_events(2)
        assert recorder.values() == [b"1", b"2"]


def test_tls_mistakes_are_explained(secured: tuple[EtcdServer, dict[str, Any]], etcd: EtcdServer) -> None:
    """TLS on one side only, and a CA that did not sign etcd's certificate."""
    server, options = secured
    plain = refused(server.endpoint)
    assert f"{server.endpoint} requires TLS" in plain
    assert "ca_cert" in plain
    assert "does not use TLS" in refused(etcd.endpoint, **options)
    stranger = Authority(Path(str(options["ca_cert"])).parent / "other")
    fails = f"the TLS handshake with {server.endpoint} fails: "
    assert f"{fails}its certificate is rejected: " in refused(server.endpoint, ca_cert=stranger.certificate)
    naked = refused(server.endpoint, limit_s=4.0, ca_cert=options["ca_cert"])
    assert f"{fails}it requires a client certificate, and none is configured" in naked
    assert "cert and key" in naked


def test_a_web_server_is_not_etcd() -> None:
    """Told well before the deadline, since waiting cannot help."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        began = SYSTEM.monotonic()
        assert "is a web server" in refused(f"127.0.0.1:{server.server_address[1]}", limit_s=60.0)
        server.shutdown()
    assert SYSTEM.monotonic() - began < 30.0


def test_an_absent_etcd_is_waited_for_until_the_deadline(own_etcd: EtcdServer) -> None:
    """Unknown names, closed ports and silence are named in one sentence; an etcd that comes up in time is found."""
    own_etcd.kill()
    absent = refusal(own_etcd.endpoint, 3.0)
    assert isinstance(absent, StoreUnavailableError)
    assert f"nothing listens at {own_etcd.endpoint}" in str(absent)
    unknown = refusal("no-such-host.invalid:2379", 1.0)
    assert "'no-such-host.invalid' does not resolve" in str(unknown)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = refusal(f"127.0.0.1:{silent.getsockname()[1]}", 1.0)
    assert "accepts no connection or does not answer" in str(nobody)
    assert "\n" not in f"{absent}{unknown}{nobody}"
    restart = threading.Thread(target=own_etcd.start)
    restart.start()
    checked(own_etcd.endpoint, 60.0)
    restart.join()


def test_a_cluster_survives_the_loss_of_its_leader(etcd_binary: str) -> None:
    """Writes and a watch go on without a gap when the leader is killed; without a quorum both say so."""
    with EtcdCluster(3) as cluster, client(cluster.endpoint) as store:
        recorder = watching(store, "/w/")
        written = [_put_certainly(store, number) for number in range(5)]
        first = cluster.leader()
        cluster.kill(first)
        written += [_put_certainly(store, number) for number in range(5, 10)]
        recorder.wait(lambda me: b"9" in me.values(), "the last write")
        assert list(dict.fromkeys(recorder.values())) == [str(number).encode() for number in range(10)]
        assert written == sorted(written)
        second = (first + 1) % 3
        cluster.kill(second)
        recorder.wait(lambda me: me.connected[-1] is False, "the lost quorum")
        with pytest.raises(StoreUnavailableError):
            store.get("/w/k", Deadline.after(2.0))
        quorum = refusal(cluster.endpoint, 5.0)
        assert isinstance(quorum, StoreUnavailableError)
        assert "quorum" in str(quorum)
        cluster.members[first].launch()
        cluster.restart(second)
        _put_certainly(store, 10)
        recorder.wait(lambda me: b"10" in me.values(), "the write after the quorum is back")


def _put_certainly(store: Store, number: int) -> int:
    """Write until acknowledged (a write under way when a member dies has an unknown outcome)."""
    deadline, write = Deadline.after(60.0), Put("/w/k", str(number).encode())
    while True:
        try:
            return store.transact([], [write], deadline=deadline.at_most(5.0)).revision
        except TransientError:
            assert not deadline.expired
