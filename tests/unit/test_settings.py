"""Endpoints, rendezvous options and the worker's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import (
    Endpoint,
    StoreSettings,
    log_level,
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


def test_options_have_defaults_and_are_typed() -> None:
    """Strings from the command line become numbers, enums and booleans."""
    defaults = rendezvous_options({})
    assert defaults.recovery is RecoveryMode.RESTART
    assert defaults.ttl == 5.0
    chosen = rendezvous_options({"recovery": "in_place", "ttl": "3", "reopen": "true", "failure_limit": "5"})
    assert chosen.recovery is RecoveryMode.IN_PLACE
    assert (chosen.ttl, chosen.reopen, chosen.failure_limit) == (3.0, True, 5)


def test_what_torchrun_adds_is_passed_over() -> None:
    """torchrun gives every backend ``timeout`` and others that mean nothing here."""
    assert rendezvous_options({"timeout": 900, "read_timeout": 60, "rank": 0}) == rendezvous_options({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tll": "5"}, "unknown key 'tll'"),
        ({"ttl": "soon"}, "'ttl' is 'soon'"),
        ({"ttl": "1"}, "'ttl' is '1'"),
        ({"recovery": "hot"}, "'recovery' is 'hot'"),
        ({"ca_cert": "/no/such/file"}, "'ca_cert' is '/no/such/file': the file cannot be read"),
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


def test_several_wrong_options_are_counted() -> None:
    """The first is explained and the others are announced."""
    with pytest.raises(ConfigError, match=r"1 more problem\(s\) follow"):
        rendezvous_options({"ttl": "x", "last_call": "y"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"user": "a"}, "user and password go together"),
        ({"password": "a"}, "user and password go together"),
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


def test_settings_are_frozen() -> None:
    """What was validated stays so."""
    with pytest.raises(ValueError, match="frozen"):
        setattr(rendezvous_options({}), "ttl", 7.0)  # noqa: B010 - mypy knows that it cannot be assigned


def test_a_plain_script_has_a_world_of_one() -> None:
    """Without a launcher nothing is set, and empty variables count as not set."""
    alone = worker_environment({"NODE": "x", "RANK": ""})
    assert (alone.rank, alone.world_size, alone.launched, alone.channel) == (0, 1, False, None)


def test_a_launched_worker_reads_its_place() -> None:
    """torchrun's variables and this package's own."""
    found = worker_environment(
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "job",
            "ELASTIC_TRAINER_NODE": "n1",
            "ELASTIC_TRAINER_ROUND": "7",
            "ELASTIC_TRAINER_RECOVERY": "in_place",
            "ELASTIC_TRAINER_CHANNEL": "/tmp/socket",
        }
    )
    assert found.launched
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.run_id, found.node, found.round, found.recovery) == ("job", "n1", 7, RecoveryMode.IN_PLACE)
    assert found.channel == Path("/tmp/socket")


def test_a_damaged_environment_is_named() -> None:
    """A rank that is no number is the launcher's fault and said so."""
    with pytest.raises(ConfigError, match="environment: 'rank' is 'x'"):
        worker_environment({"RANK": "x", "WORLD_SIZE": "2"})


def test_log_level_comes_from_the_environment() -> None:
    """``info`` by default."""
    assert log_level({}) == "info"
    assert log_level({"ELASTIC_TRAINER_LOG_LEVEL": "debug"}) == "debug"
