"""Segments of every kind of network, and the ways on and off them that only tests take."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Interface, IPv6Interface
from pathlib import Path
from typing import Self

from elastic_trainer.local.hosts import BRIDGE, CURRENT, HUB, INSIDE, ClusterError, Host, Segment, run_ip

ABOVE, BELOW, IPV6 = HUB, "10.213.0.1/16", "fd99::1/64"
"""The hub's addresses. Of two peers of gloo the one with the greater address connects: 127.0.0.1 lies between these."""
AT_ONCE = "nodad"
"""An IPv6 address would be of no use for a second, until the kernel is sure that nobody else has it."""


class OwnName(StrEnum):
    """What a host's own name resolves to there."""

    ADDRESS = "address"
    LOOPBACK = "loopback"
    """127.0.1.1, as Debian's installer writes it."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """How a host is connected. ``hubs``: the hub's addresses that it reaches, and has addresses beside."""

    hubs: tuple[str, ...] = (ABOVE,)
    own_name: OwnName = OwnName.ADDRESS
    aside: bool = False
    """Whether each host has a second interface, listed before the first, that reaches no other host."""
    rules: str = ""
    """Rules of nftables that each host loads, as for a firewall."""


class AnySegment(Segment):
    """A segment whose hosts are connected as a test wants them."""

    network = HostNetwork()
    """Of the hosts that are attached next."""

    def __enter__(self) -> Self:
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._stack.callback(os.close, self._home)
        super().__enter__()
        with contextlib.suppress(ClusterError):  # kernels may have no IPv6
            run_ip("addr", "add", BELOW, "dev", BRIDGE)
            run_ip("addr", "add", IPV6, "dev", BRIDGE, AT_ONCE)
        return self

    @contextmanager
    def using(self, network: HostNetwork) -> Iterator[None]:
        """In the body hosts are connected by ``network``."""
        before, self.network, self.hubs = self.network, network, network.hubs
        try:
            yield
        finally:
            self.network, self.hubs = before, before.hubs

    @contextmanager
    def left(self) -> Iterator[None]:
        """In the body this thread, and what it starts, is in the original network."""
        with within(f"/proc/self/fd/{self._home}"), one_host():
            yield

    def share(self, directory: Path) -> None:
        """Let hosts that are attached from now on see ``directory``."""
        self._shared.append(directory)

    def _own_name(self, name: str, address: str) -> list[str]:
        mine = {OwnName.LOOPBACK: [f"127.0.1.1 {name}"], OwnName.NOTHING: []}
        return mine.get(self.network.own_name, super()._own_name(name, address))

    def _connect(self, host: Host, interfaces: Sequence[IPv4Interface | IPv6Interface]) -> None:
        inside = host.command
        if self.network.aside:  # first, so that it has the lower index
            run_ip("link", "add", "aside0", "type", "veth", "peer", "name", "aside1", inside=inside)
            run_ip("addr", "add", f"172.31.{self._count % 256}.2/24", "dev", "aside0", inside=inside)
            for end in ("aside0", "aside1"):
                run_ip("link", "set", end, "up", inside=inside)
        super()._connect(host, [each for each in interfaces if each.version == 4])
        for each in interfaces:
            if each.version == 6:
                run_ip("addr", "add", str(each), "dev", INSIDE, AT_ONCE, inside=inside)
        if self.network.rules:
            subprocess.run([*inside, "nft", "-f", "-"], input=self.network.rules, check=True, text=True)


@contextmanager
def one_host() -> Iterator[None]:
    """In the body nodes that this thread starts share this process's host, and its loopback, as they do elsewhere."""
    token = CURRENT.set(None)
    try:
        yield
    finally:
        CURRENT.reset(token)


@contextmanager
def within(network: str) -> Iterator[None]:
    """In the body this thread is in the network namespace of the file ``network``; sockets that it opens stay there."""
    here, there = (os.open(each, os.O_RDONLY | os.O_CLOEXEC) for each in ("/proc/thread-self/ns/net", network))
    library = ctypes.CDLL(None, use_errno=True)
    try:
        assert library.setns(there, 0) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert library.setns(here, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(here)
        os.close(there)


def entering(host: Host) -> list[str]:
    """The words that start a command on ``host``. The command's parent is the ``nsenter`` that waits for it."""
    return ["nsenter", f"--target={host.pid}", "--net", "--uts", "--ipc", "--mount", "--pid"]
