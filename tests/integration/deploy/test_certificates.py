"""``deploy/etcd/certificates.sh``: certificates are renewed without a new key; mistakes are told in one sentence."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.settings import Endpoint
from elastic_trainer.store import connect_checked
from elastic_trainer.store.connect import refusal
from tests.integration.store.support import client, put, settings
from tests.support.deployment import DEPLOY, ran
from tests.support.etcd import TlsEtcdServer
from tests.support.networks import one_host
from tests.support.requirements import needs
from tests.support.waiting import soon

SCRIPT = DEPLOY / "etcd" / "certificates.sh"


@pytest.fixture(autouse=True)
def loopback() -> Iterator[None]:
    """The certificates name this machine's loopback, where etcd serves."""
    with one_host():
        yield


def make(*words: str | Path, code: int = 0) -> str:
    """Run the script; what it printed, or what it said when it failed with ``code``."""
    needs("openssl", "it makes the certificates")
    elsewhere = {**os.environ, "TMPDIR": "/nowhere"}  # what is copied across file systems may arrive in halves
    done = ran(SCRIPT, *words, env=elsewhere)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def files(directory: Path, name: str = "client") -> dict[str, Path]:
    return {"ca_cert": directory / "ca.crt", "cert": directory / f"{name}.crt", "key": directory / f"{name}.key"}


def server_of(directory: Path, data: Path, binary: str) -> EtcdServer:
    """An etcd with the certificates, for its clients and for its peers."""
    served = (directory / name for name in ("ca.crt", "server.crt", "server.key"))
    return TlsEtcdServer(data, *served, binary=binary)


def contents(directory: Path, pattern: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob(pattern))}


def names(certificate: Path) -> str:
    return ran("openssl", "x509", "-in", certificate, "-noout", "-text").stdout


def test_again_it_replaces_no_key_and_renews_what_ends_soon(tmp_path: Path) -> None:
    """Keys and good certificates stay; what changed its names or ends within a month is made anew with the old key."""
    told = make("-n", "team", tmp_path)
    for name in ("server", "peer", "client"):
        assert f"kubectl create secret generic etcd-{name}-tls -n team --from-file=ca.crt={tmp_path}/ca.crt" in told
    first = contents(tmp_path, "*")
    assert all(os.stat(path).st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    text = names(tmp_path / "server.crt")
    for wanted in ("IP Address:127.0.0.1", "DNS:etcd,", "DNS:etcd.team.svc,", "DNS:etcd-2.etcd.team.svc,"):
        assert wanted in text
    make("-n", "team", tmp_path)
    assert contents(tmp_path, "*") == first
    make("-n", "team", "-a", "etcd.example.org", "-d", "10", tmp_path)
    second = contents(tmp_path, "*")
    assert "DNS:etcd.example.org" in names(tmp_path / "server.crt")
    assert {name for name in first if first[name] != second[name]} == {
        "server.crt", "server.names", "peer.crt", "peer.names"
    }  # fmt: skip
    make("-n", "team", "-a", "etcd.example.org", tmp_path)
    assert contents(tmp_path, "server.crt") != {"server.crt": second["server.crt"]}, "one of 10 days is renewed"
    assert contents(tmp_path, "*.key") == {name: text for name, text in first.items() if name.endswith(".key")}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "say one directory"),
        (("-n", "No Name", "x"), "is not a name of a namespace"),
        (("-u", "root", "x"), "-u root is not for a run"),
        (("-u", "etcd-peer", "x"), "-u etcd-peer is not for a run"),
        (("-u", "a/../b", "x"), "is not a name of a user"),
        (("-a", "x,IP:1.2.3.4\nCA:TRUE", "x"), "is neither a host name nor an address"),
        (("-d", "soon", "x"), "take numbers"),
    ],
)
def test_its_mistakes_are_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    """Nothing is written, and nothing can be slipped into a certificate."""
    assert sentence in make(*words, code=78)
    assert not Path("x").exists()


def test_certificates_that_do_not_fit_are_told_in_one_sentence(tmp_path: Path, etcd_binary: str) -> None:
    """Of another CA, for another host, expired, with another's key, or none: each is named, and none is waited for."""
    made, other = tmp_path / "made", tmp_path / "other"
    make(made)
    make("-u", "run-x", other)
    good = files(made)
    with server_of(made, tmp_path / "etcd", etcd_binary) as server:
        with client(server.endpoint, **good) as store:
            put(store, "/elastic_trainer/x/a")
        expired = tmp_path / "expired.crt"
        _expire(made, expired)
        refused = "it rejects the certificate in cert, which has expired or is of another CA"
        mistakes = [
            (refused, files(other) | {"ca_cert": good["ca_cert"]}),
            (refused, good | {"cert": expired}),
            ("its certificate is rejected: ", files(other)),
            ("cert and key do not match", good | {"key": other / "client.key"}),
            ("it requires a client certificate, and none is configured", {"ca_cert": good["ca_cert"]}),
        ]
        for sentence, options in mistakes:
            with pytest.raises(ConfigError, match=sentence) as caught:
                connect_checked(settings(server.endpoint, **options), Deadline.after(30.0))
            assert "\n" not in str(caught.value)


class Hasty:
    """Stands before a server. It resets the first connection as soon as the client has said its second word.

    So does the kernel of a server that has refused a client's certificate and closed, when more comes: what the client
    has not read by then is lost.
    """

    def __init__(self, port: int) -> None:
        self._port, self.met = port, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(host="127.0.0.1", port=self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.met += 1
                with client, socket.create_connection(("127.0.0.1", self._port)) as server:
                    self._relay(client, server, words=1 if self.met == 1 else 100)

    def _relay(self, client: socket.socket, server: socket.socket, words: int) -> None:
        while True:
            for ready in select.select([client, server], [], [], 10.0)[0]:
                said = ready.recv(1 << 16)
                if ready is client and not words:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                words -= ready is client
                if not said:
                    return
                (server if ready is client else client).sendall(said)


def test_a_refusal_is_known_although_the_server_has_hung_up(tmp_path: Path, etcd_binary: str) -> None:
    """On what we asked: the alert that came before it is lost with the connection, so it is listened for once more."""
    made, other = tmp_path / "made", tmp_path / "other"
    make(made)
    make("-u", "run-x", other)
    with server_of(made, tmp_path / "etcd", etcd_binary) as server:
        hasty = Hasty(int(server.endpoint.rpartition(":")[2]))
        try:
            options = files(other) | {"ca_cert": files(made)["ca_cert"]}
            found = refusal(hasty.endpoint, settings(server.endpoint, **options), 10.0)
        finally:
            hasty.close()
    assert hasty.met == 2
    assert found is not None
    assert "it rejects the certificate in cert" in found


def test_an_expired_certificate_of_etcd_is_told(tmp_path: Path, etcd_binary: str) -> None:
    """In the words of TLS, with the endpoint."""
    made = tmp_path / "made"
    make(made)
    _expire(made, made / "server.crt", "server")
    server = server_of(made, tmp_path / "etcd", etcd_binary)
    try:
        server.launch()  # its health cannot be asked for
        limit = soon()
        while True:
            with pytest.raises(ElasticTrainerError) as caught:
                connect_checked(settings(server.endpoint, **files(made)), Deadline.after(3.0))
            if isinstance(caught.value, ConfigError) or limit.expired:
                break
        assert "its certificate is rejected: certificate has expired" in str(caught.value)
    finally:
        server.dispose()


def _expire(directory: Path, target: Path, name: str = "client") -> None:
    """A certificate for the key of ``name`` that ended yesterday."""
    (directory / "e").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    ca = "-CA ca.crt -CAkey ca.key -set_serial 7 -days -1 -extfile e"
    for words in (f"req -new -key {name}.key -subj /CN={name} -out r", f"x509 -req -in r {ca} -out {target}"):
        assert ran("openssl", *words.split(), cwd=directory).returncode == 0
