"""The address that a node announces."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from elastic_trainer.ipc import address as module
from elastic_trainer.ipc.address import is_loopback, own_address, refusal_proves

V4, V6 = "203.0.113.1", "2001:db8::1"
"""Their routes are the default routes."""


class Machine:
    """Routes by host, and interfaces in the kernel's order."""

    def __init__(self, routes: dict[str, str], **interfaces: tuple[str, ...]) -> None:
        self.routes, self.interfaces = routes, interfaces
        self.down: set[str] = set()

    def addresses(self) -> dict[str, list[SimpleNamespace]]:
        return {
            name: [
                SimpleNamespace(family=socket.AF_INET6 if ":" in each else socket.AF_INET, address=each)
                for each in all_
            ]
            for name, all_ in self.interfaces.items()
        }

    def states(self) -> dict[str, SimpleNamespace]:
        return {name: SimpleNamespace(isup=name not in self.down) for name in self.interfaces}

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Be this machine; returns the list in which warnings appear."""
        said: list[str] = []
        monkeypatch.setattr(module, "_source", lambda host, port: self.routes.get(host))
        monkeypatch.setattr(psutil, "net_if_addrs", self.addresses)
        monkeypatch.setattr(psutil, "net_if_stats", self.states)
        note = SimpleNamespace(warning=lambda event, **keys: said.append(str(keys)), info=lambda event, **keys: None)
        monkeypatch.setattr(module, "logger", lambda: note)
        return said


LO = ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (Machine({"etcd": "10.0.0.2", V4: "192.168.1.2"}, lo=LO), "10.0.0.2"),
        (Machine({"etcd": "fd00::2"}, lo=LO), "fd00::2"),
        (Machine({"etcd": "127.0.0.1", V4: "192.168.1.2"}, lo=LO, eth0=("192.168.1.2",)), "192.168.1.2"),
        (Machine({"etcd": "::1", V6: "fd00::2"}, lo=LO, eth0=("fd00::2",)), "fd00::2"),
        (Machine({V4: "192.168.1.2"}, lo=LO), "192.168.1.2"),  # the name of etcd has no address
        (Machine({"etcd": "127.0.0.1"}, lo=LO, eth0=("192.168.1.2", "fd00::2")), "192.168.1.2"),
        (Machine({"etcd": "127.0.0.1"}, lo=LO, eth0=("fe80::1%eth0", "fd00::2")), "fd00::2"),
        (Machine({"etcd": "127.0.0.1"}, lo=LO), "127.0.0.1"),
        (Machine({"etcd": "::1"}, lo=LO, eth0=("fe80::1%eth0",)), "::1"),
        (Machine({}, lo=LO), "127.0.0.1"),
    ],
)
def test_an_address_that_other_machines_can_use_is_announced(
    machine: Machine, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that reaches etcd; where etcd is here, that of the default route or of the one interface. The loopback
    where there is nothing else."""
    said = machine.apply(monkeypatch)
    assert own_address("etcd", 2379) == expected
    assert said == []


def test_a_choice_among_several_interfaces_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the others, and the option that chooses one. An interface that is down does not count."""
    machine = Machine({"etcd": "127.0.0.1"}, lo=LO, gone=("10.9.9.9",), eth0=("10.0.0.2",), eth1=("192.168.1.2",))
    machine.down.add("gone")
    (said,) = [machine.apply(monkeypatch)]
    assert own_address("etcd", 2379) == "10.0.0.2"
    (warning,) = said
    assert "192.168.1.2" in warning
    assert "10.9.9.9" not in warning
    assert "--local-addr or --rdzv-conf interface=" in warning


def test_a_node_that_stays_alone_keeps_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its network may change while it trains, and nobody else needs it."""
    Machine({"etcd": "127.0.0.1", V4: "192.168.1.2"}).apply(monkeypatch)
    assert own_address("etcd", 2379, alone=True) == "127.0.0.1"


@pytest.mark.parametrize(
    ("own", "other", "proves"),
    [
        ("10.0.0.2", "10.0.0.3", True),
        ("10.0.0.2", "127.0.0.1", False),
        ("10.0.0.2", "::1", False),
        ("10.0.0.2", "localhost", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "::1", True),
        ("127.0.0.1", "10.0.0.2", True),
    ],
)
def test_what_a_loopback_address_refuses_says_nothing_about_another_machine(own: str, other: str, proves: bool) -> None:
    """Unless this node announces one too: then both are on one machine."""
    assert refusal_proves(own, other) is proves


def test_loopback_addresses_in_all_spellings() -> None:
    """Those of Debian's /etc/hosts, of IPv6, and IPv4 within it. Other names are not looked up."""
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "fe80::1%eth0", "box0", "")))
