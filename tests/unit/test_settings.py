"""Endpoints, rendezvous options and the worker's environment."""

from __future__ import annotations

from pathlib import Path
from traceback import format_exception

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import (
    Endpoint,
    StoreSettings,
    parse_endpoints,
    rendezvous_options,
    validated,
    worker_environment,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("etcd", [("etcd", 2379)]),
        ("10.0.0.1:1234", [("10.0.0.1", 1234)]),
        ("a:1, b:2 ,c", [("a", 1), ("b", 2), ("c", 2379)]),
        ("[::1]", [("::1", 2379)]),
        ("[fe80::1]:99", [("fe80::1", 99)]),
    ],
)
def test_endpoints(text: str, expected: list[tuple[str, int]]) -> None:
    """One or several, with etcd's port by default, IPv6 in brackets; written again they are the same."""
    endpoints = parse_endpoints(text)
    assert [(endpoint.host, endpoint.port) for endpoint in endpoints] == expected
    assert parse_endpoints(",".join(map(str, endpoints))) == endpoints


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a:", "a:x", ":2379", "a:0", "a:65536", "http://a:2379", "::1", "a:1/x", "a:-1"]
)
def test_wrong_endpoints_are_named(text: str) -> None:
    """The sentence quotes what was written and shows the form."""
    with pytest.raises(ConfigError, match="store endpoint") as caught:
        parse_endpoints(text)
    assert "host:2379" in str(caught.value)


def test_options_are_typed_and_what_torchrun_adds_is_passed_over(tmp_path: Path) -> None:
    """Strings from the command line become numbers, enums, booleans and paths; the defaults stand in the documents."""
    (tmp_path / "token").write_text("secret")
    given = {"recovery": "in_place", "ttl": "3", "reopen": "true", "failure_limit": "5", "step_timeout": "0"}
    chosen = rendezvous_options({**given, "metrics_address": "", "metrics_token_file": str(tmp_path / "token")})
    assert chosen.recovery is RecoveryMode.IN_PLACE
    assert (chosen.ttl, chosen.reopen, chosen.failure_limit, chosen.step_timeout) == (3.0, True, 5, 0.0)
    assert (chosen.metrics_address, chosen.metrics_token_file) == ("", tmp_path / "token")
    assert rendezvous_options({"timeout": 900, "read_timeout": 60, "rank": 0}) == rendezvous_options({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tll": "5"}, "unknown key 'tll'"),
        ({"preflight_wait": "5"}, "'preflight_wait' is no option any more: a node always waits up to 10 s"),
        ({"ttl": "soon"}, "'ttl' is 'soon'"),
        ({"ttl": "1"}, "'ttl' is '1'"),
        ({"recovery": "hot"}, "'recovery' is 'hot'"),
        ({"ca_cert": "/no/such/file"}, "'ca_cert' is '/no/such/file': the file cannot be read"),
        ({"step_timeout": "-1"}, "'step_timeout' is '-1'"),
        ({"first_step_timeout": "-1"}, "'first_step_timeout' is '-1'"),
        ({"phase_timeout": "long"}, "'phase_timeout' is 'long'"),
        ({"sizes": "2,4"}, "'sizes' is '2,4'"),
        ({"multiple_of": "0"}, "'multiple_of' is '0'"),
        ({"shard_nodes": "0"}, "'shard_nodes' is '0'"),
        ({"metrics_port": "65536"}, "'metrics_port' is '65536'"),
        ({"metrics_cert": "/no/such/cert"}, "metrics_cert and metrics_key go together"),
        ({"metrics_key": "/no/such/key"}, "metrics_cert and metrics_key go together"),
        (
            {"metrics_cert": "/no/cert", "metrics_key": "/no/key"},
            "'metrics_cert' is '/no/cert': the file cannot be read",
        ),
        ({"metrics_token_file": "/no/token"}, "'metrics_token_file' is '/no/token': the file cannot be read"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], message: str) -> None:
    """One sentence with the option and its value, as a configuration error."""
    with pytest.raises(ConfigError) as caught:
        rendezvous_options(options)
    assert str(caught.value).startswith("--rdzv-conf: ")
    assert message in str(caught.value)
    assert caught.value.exit_code == 78
    assert caught.value.hint


def test_several_wrong_options_are_counted_and_old_ones_say_what_holds_now() -> None:
    """The first is explained and the others are announced."""
    with pytest.raises(ConfigError, match=r"1 more problem\(s\) follow"):
        rendezvous_options({"ttl": "x", "last_call": "y"})
    for name in ("last_call_limit", "join_batch", "stalled_rounds"):
        with pytest.raises(ConfigError, match=f"--rdzv-conf: '{name}' is no option any more: it is .*remove it"):
            rendezvous_options({"ttl": "5", name: "7"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"user": "a"}, "user and password go together"),
        ({"password": "a"}, "user and password go together"),
        ({"password_file": "a"}, "user and password go together"),
        ({"user": "a", "password": "b", "password_file": "c"}, "password and password_file are both given"),
        ({"cert": "c.pem"}, "cert and key go together"),
        ({"prefix": "no-slash"}, "'prefix' is 'no-slash'"),
        ({"prefix": "/a/"}, "'prefix'"),
        ({"prefix": "/a//b"}, "'prefix'"),
        ({"prefix": "/ä"}, "'prefix'"),
    ],
)
def test_store_settings_that_do_not_fit(options: dict[str, str], message: str) -> None:
    """Halves of pairs and prefixes that cannot be keys are refused."""
    with pytest.raises(ConfigError) as caught:
        validated(StoreSettings, {"endpoints": parse_endpoints("a"), **options}, "store")
    assert message in str(caught.value)


def test_options_make_store_settings(tmp_path: Path) -> None:
    """Endpoint and options together say how to reach etcd; the password is not shown."""
    ca = tmp_path / "ca.pem"
    ca.write_text("x")
    options = rendezvous_options({"prefix": "/p", "user": "u", "password": "hush", "ca_cert": str(ca)})
    store = options.store("a:1,b:2")
    assert store.endpoints == (Endpoint(host="a", port=1), Endpoint(host="b", port=2))
    assert (store.prefix, store.user, store.password, store.ca_cert) == ("/p", "u", "hush", ca)
    assert "hush" not in f"{store!r}{options!r}"


ENVIRONMENT = {
    "ELASTIC_TRAINER_USER": "run-x",
    "ELASTIC_TRAINER_PASSWORD_FILE": "/secrets/password",
    "ELASTIC_TRAINER_CA_CERT": "/tls/ca.crt",
    "ELASTIC_TRAINER_CERT": "/tls/tls.crt",
    "ELASTIC_TRAINER_KEY": "/tls/tls.key",
}


def test_the_environment_says_what_options_leave_open() -> None:
    """All five variables; an option that is given goes before its variable, a password before the file of one."""
    store = rendezvous_options({}).store("a", ENVIRONMENT)
    assert [str(path) for path in (store.password_file, store.ca_cert, store.cert, store.key)] == [
        "/secrets/password",
        "/tls/ca.crt",
        "/tls/tls.crt",
        "/tls/tls.key",
    ]
    assert (store.user, store.password) == ("run-x", None)
    chosen = rendezvous_options({"user": "me", "password": "hush"}).store("a", ENVIRONMENT)
    assert (chosen.user, chosen.password, chosen.password_file) == ("me", "hush", None)
    assert str(chosen.ca_cert) == "/tls/ca.crt"
    assert rendezvous_options({}).store("a", dict.fromkeys(ENVIRONMENT, "")).user is None


def test_a_mistake_in_the_environment_names_its_variables() -> None:
    """Who has written nothing wrong into his options looks there."""
    with pytest.raises(ConfigError, match="with ELASTIC_TRAINER_USER: user and password go together"):
        rendezvous_options({}).store("a", {"ELASTIC_TRAINER_USER": "me"})


@pytest.mark.parametrize("values", [{"password": "hush"}, {"user": "me", "password": ["hush"]}])
def test_no_mistake_shows_a_password(values: dict[str, object]) -> None:
    """Neither one about several values together, which would show them all, nor one about the password itself."""
    with pytest.raises(ConfigError) as caught:
        validated(StoreSettings, {"endpoints": parse_endpoints("a"), **values}, "--rdzv-conf")
    assert "hush" not in "".join(format_exception(caught.value))


def test_a_launched_worker_reads_its_place() -> None:
    """torchrun's variables and this package's own; without a launcher a world of one, and empty ones are not set."""
    alone = worker_environment({"NODE": "x", "RANK": ""})
    assert (alone.rank, alone.world_size, alone.launched, alone.channel) == (0, 1, False, None)
    assert (alone.pages, alone.reached) == (None, 0)
    own = {"NODE": "n1", "ROUND": "7", "RECOVERY": "in_place", "CHANNEL": "/tmp/socket", "REACHED": "41"}
    torchruns = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchruns["TORCHELASTIC_RUN_ID"] = "job"
    found = worker_environment(torchruns | {f"ELASTIC_TRAINER_{name}": value for name, value in own.items()})
    assert found.launched
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.run_id, found.node, found.round, found.recovery) == ("job", "n1", 7, RecoveryMode.IN_PLACE)
    assert (found.channel, found.reached) == (Path("/tmp/socket"), 41)
    for name, wrong in (("RANK", "x"), ("ELASTIC_TRAINER_REACHED", "-1")):
        field = name.rpartition("_")[2].lower()
        with pytest.raises(ConfigError, match=f"environment: '{field}' is '{wrong}'"):
            worker_environment({"WORLD_SIZE": "2", name: wrong})


def test_a_collective_may_take_as_long_as_the_watchdog_lets_a_rank_do_something_else() -> None:
    """A compilation, a step and a save, one after the other; 600 s where nobody watches the ranks."""
    assert rendezvous_options({}).group_timeout_s > 1800.0 + 300.0 + 3600.0
    assert rendezvous_options({"phase_timeout": "86400"}).group_timeout_s > 86400.0
    for name in ("phase_timeout", "step_timeout", "first_step_timeout"):
        assert rendezvous_options({name: "0"}).group_timeout_s > 7 * 86400.0
    assert worker_environment({}).group_timeout == 600.0
    assert worker_environment({"ELASTIC_TRAINER_GROUP_TIMEOUT": "6300.0"}).group_timeout == 6300.0


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "a"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}, "a"),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "0f8fad5b-d9cb-469f-a165-70867728950e"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "local-81ad5736"}, None),
    ],
)
def test_a_run_has_a_name_only_if_somebody_gave_it_one(variables: dict[str, str], name: str | None) -> None:
    """A script alone has none, nor has ``torchrun --standalone`` or ``elastic-trainer local``, which
    make one up at each start."""
    assert worker_environment(variables).run_name == name
