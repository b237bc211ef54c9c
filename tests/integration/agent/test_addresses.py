"""Ports of a node: one that tells that it lives, one that stays free for rank 0's store."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from elastic_trainer.agent.rendezvous.restart import reserve_port
from elastic_trainer.agent.suspicion import AgentPort
from elastic_trainer.ipc.address import listen, store_at
from elastic_trainer.membership.member import refuses
from tests.support.waiting import LIMIT_S

LOCAL = "127.0.0.1"
RESERVED = 60
HELD = 200
"""Ports held at a time, so that the choice moves on and few descriptors are needed."""
TRIES = 3000
"""With so many ports reserved, so many random ones would hit one of them by chance all but surely (e to the -6)."""

LISTEN = """
import sys
from elastic_trainer.agent.suspicion import AgentPort
print(AgentPort(sys.argv[1], "run", "node", print).port, flush=True)
input()
"""


@pytest.fixture
def reserved() -> Iterator[set[int]]:
    with ExitStack() as held:
        yield {held.enter_context(reserve_port(LOCAL)).getsockname()[1] for _ in range(RESERVED)}


def test_a_store_listens_on_a_reserved_port_and_serves_clients() -> None:
    """torch's own store takes the port while it is reserved, several times one after the other."""
    with reserve_port(LOCAL) as reserved:
        port = reserved.getsockname()[1]
        for turn in range(3):
            server = TCPStore(LOCAL, port, is_master=True, wait_for_workers=False)
            client = TCPStore(LOCAL, port, is_master=False)
            client.set("turn", str(turn))
            assert server.get("turn") == str(turn).encode()
            del client, server


@pytest.mark.parametrize("how", ["bound", "bound with SO_REUSEADDR", "a client's own"])
def test_a_reserved_port_is_never_given_to_who_asks_for_any(reserved: set[int], how: str) -> None:
    with closing(socket.create_server((LOCAL, 0), backlog=128)) as server:
        for _ in range(0, TRIES, HELD):
            with ExitStack() as held:
                for _ in range(HELD):
                    if how == "a client's own":
                        other = socket.create_connection(server.getsockname(), timeout=LIMIT_S)
                        held.enter_context(closing(server.accept()[0]))
                    else:
                        other = socket.socket()
                        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(how != "bound"))
                        other.bind(("" if how == "bound" else LOCAL, 0))
                    held.enter_context(closing(other))
                    assert other.getsockname()[1] not in reserved


def test_a_killed_process_refuses_and_a_frozen_one_does_not() -> None:
    command = [sys.executable, "-c", LISTEN, LOCAL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        assert not refuses(LOCAL, port, timeout_s=0.5)
        process.kill()
        process.wait(LIMIT_S)
        assert refuses(LOCAL, port, timeout_s=LIMIT_S)


def test_silence_and_unknown_hosts_prove_nothing() -> None:
    """A full backlog (nobody accepts, nobody answers) and a name without an address are no deaths."""
    with socket.socket() as silent, ExitStack() as held:
        silent.bind((LOCAL, 0))
        silent.listen(0)
        host, port = address = silent.getsockname()
        for _ in range(4):
            filler = held.enter_context(closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex(address)
        assert not refuses(host, port, timeout_s=0.2)
    assert not refuses("no-such-host.invalid", 1, timeout_s=0.2)


@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_ports_of_both_address_families(family: str) -> None:
    if family == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with (
        closing(AgentPort(family, "run", "node", socket.socket.close)) as alive,
        reserve_port(family) as reserved,
    ):
        assert not refuses(family, alive.port, timeout_s=LIMIT_S)
        assert refuses(family, reserved.getsockname()[1], timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("127.0.0.2", "127.0.0.2"),
        ("localhost", LOCAL),
        ("::1", "::1"),
        ("192.0.2.1", "0.0.0.0"),
        ("some-host", "0.0.0.0"),  # as on machines that call themselves 127.0.1.1
    ],
)
def test_a_port_is_opened_at_the_announced_address_alone(address: str, bound: str) -> None:
    """On all addresses only where it is none of this machine's, which a translation of addresses may explain, or a
    name, which may lead elsewhere for others."""
    with closing(listen(address)) as listener:
        assert listener.getsockname()[0] == bound


@pytest.mark.parametrize("address", ["127.0.0.2", "192.0.2.1"])
def test_the_store_of_rounds_is_opened_there_too(address: str) -> None:
    store = store_at(address, timedelta(seconds=LIMIT_S))
    client = TCPStore("127.0.0.2", store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
    assert refuses(LOCAL, store.port, LIMIT_S) is (address == "127.0.0.2")


def test_a_probe_that_the_kernel_has_accepted_proves_a_death_only_if_the_next_is_refused() -> None:
    """The sockets of a process that is being ended close last, and of a container nothing answers a moment later. An
    agent closes the connection of a probe when it has too many."""
    with socket.create_server((LOCAL, 0)) as listening:
        ending = threading.Timer(0.03, listening.close)
        ending.start()
        assert refuses(LOCAL, listening.getsockname()[1], timeout_s=LIMIT_S)
        ending.join()
    with socket.create_server((LOCAL, 0)) as listening:
        accepting = threading.Thread(target=lambda: listening.accept()[0].close())
        accepting.start()
        assert not refuses(LOCAL, listening.getsockname()[1], timeout_s=LIMIT_S)
        accepting.join(LIMIT_S)
