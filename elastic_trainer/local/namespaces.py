"""Separate networks for the nodes of a drill, joined by a bridge that can silently cut off each of them.

All of it lives in unnamed network namespaces: this process's, with the bridge and the etcd, and one for each node, held
by a sleeping process. When those processes end, in whatever way, the kernel removes everything.

*Runs in* the main thread, before any other thread that should be inside is started.
*Owns* the namespaces, the bridge, the virtual cables and the sleeping processes, from entry to exit.
*Fails by* ConfigError without root or the needed programs; ClusterError when the kernel refuses.
*Invariant*: the original network of the process is never configured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.cluster import ClusterError, ClusterSpec, LocalCluster, torchrun
from elastic_trainer.local.etcd import EtcdCluster, EtcdServer

CLONE_NEWNET = 0x40000000
BRIDGE, INSIDE = "bridge0", "eth0"
NETWORK = "10.213.7"
PROGRAMS = ("ip", "unshare", "nsenter")
ETCD_PORTS = (2379, 2380)
_NOBODY, _OWN = "02:00:00:00:00:01", "02:00:00:00:00:02"
"""Hardware addresses that no cable has: an unused one, and the bridge's."""
_HUB = f"{NETWORK}.1"
_CLOSED_PORT = 9
_READY_S = 10.0


def check_possible() -> None:
    """Raise ConfigError unless this process can create networks."""
    if os.geteuid() != 0:
        raise ConfigError(
            "a drill with separate networks needs root", hint="run it as root, for example in a container"
        )
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise ConfigError(
                f"a drill with separate networks needs the program {program!r}",
                hint="install iproute2 and util-linux",
            )


@dataclass(frozen=True, slots=True)
class _Cable:
    """The virtual cable between a node's network and the bridge; ``outside`` is the end at the bridge."""

    holder: subprocess.Popen[bytes]
    outside: str
    address: str

    @property
    def network(self) -> str:
        """The file of the node's namespace."""
        return f"/proc/{self.holder.pid}/ns/net"


class Segment:
    """One network segment with an etcd at the hub. A context manager; a Place for a run (see drills/harness)."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._cables: dict[str, _Cable] = {}

    def __enter__(self) -> Self:
        check_possible()
        try:
            self._leave_home()
            _ip("link", "set", "lo", "up")
            # Without its own address a bridge takes that of a port, and another one when that port is cut off: then the
            # node behind the port still reaches the hub, and all others must first resolve the hub's new address.
            _ip("link", "add", BRIDGE, "address", _OWN, "type", "bridge")
            _ip("addr", "add", f"{_HUB}/24", "dev", BRIDGE)
            _ip("link", "set", BRIDGE, "up")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _leave_home(self) -> None:
        """Move this thread, and all that it will start, to an empty network; ``__exit__`` moves it back."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._stack.callback(os.close, home)
        _call("unshare", CLONE_NEWNET)
        self._stack.callback(_call, "setns", home, CLONE_NEWNET)

    # ---- used by a stage

    def etcd(self, members: int, directory: Path) -> EtcdServer | EtcdCluster:
        if members != 1:
            raise ClusterError("there is room for one etcd server in a network segment")
        everywhere = ",".join(f"http://{host}:{ETCD_PORTS[0]}" for host in ("127.0.0.1", _HUB))
        return EtcdServer(directory, ports=ETCD_PORTS, arguments=[f"--listen-client-urls={everywhere}"])

    def endpoint(self, etcd: EtcdServer | EtcdCluster) -> str:
        return f"{_HUB}:{ETCD_PORTS[0]}"

    def cluster(self, spec: ClusterSpec) -> LocalCluster:
        variables = {"GLOO_SOCKET_IFNAME": INSIDE, "NCCL_SOCKET_IFNAME": INSIDE}
        return _SegmentCluster(replace(spec, environment={**spec.environment, **variables}), self)

    # ---- nodes

    def attach(self, node: str) -> tuple[list[str], str]:
        """Create a network for ``node``; returns the command prefix that enters it, and the node's address."""
        number = len(self._cables) + 2
        holder = self._hold()
        cable = _Cable(holder, f"veth{number}", f"{NETWORK}.{number}")
        self._cables[node] = cable
        _ip("link", "add", cable.outside, "type", "veth", "peer", "name", INSIDE, "netns", str(holder.pid))
        _ip("link", "set", cable.outside, "master", BRIDGE, "up")
        enter = ["nsenter", f"--net={cable.network}"]
        _ip("addr", "add", f"{cable.address}/24", "dev", INSIDE, inside=enter)
        _ip("link", "set", INSIDE, "up", inside=enter)
        _ip("link", "set", "lo", "up", inside=enter)
        return enter, cable.address

    def _hold(self) -> subprocess.Popen[bytes]:
        """Start a process that sleeps in its own network, and dies with this one."""
        tied = [sys.executable, "-m", "elastic_trainer.local.parent_death", str(os.getpid())]
        holder = subprocess.Popen([*tied, "unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        self._stack.callback(holder.wait)
        self._stack.callback(holder.kill)
        mine, deadline = os.readlink("/proc/thread-self/ns/net"), Deadline.after(_READY_S)
        while os.readlink(f"/proc/{holder.pid}/ns/net") == mine:
            if deadline.expired or holder.poll() is not None:
                raise ClusterError("no network namespace could be created", hint="this needs CAP_SYS_ADMIN")
            pause(0.01)
        return holder

    def cut(self, node: str) -> None:
        """Drop all packets to and from ``node``; its interface stays up, so that no process is notified."""
        _ip("link", "set", self._cables[node].outside, "nomaster")

    def restore(self, node: str) -> None:
        _ip("link", "set", self._cables[node].outside, "master", BRIDGE)

    def part(self, one: str, other: str, *, one_way: bool = False) -> None:
        """Drop all packets between two nodes, or ``one_way`` those of ``one``; all others still reach both."""
        for here, there in ((one, other),) if one_way else ((one, other), (other, one)):
            self._neighbour("replace", here, there, "lladdr", _NOBODY, "nud", "permanent")

    def reunite(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            with contextlib.suppress(ClusterError):  # one way was open
                self._neighbour("del", here, there)

    def _neighbour(self, verb: str, here: str, there: str, *more: str) -> None:
        enter = ["nsenter", f"--net={self._cables[here].network}"]
        _ip("neigh", verb, self._cables[there].address, "dev", INSIDE, *more, inside=enter)

    def reaches(self, node: str) -> bool:
        """Whether ``node``'s network answers the hub: it refuses a connection to an unused port."""
        try:
            socket.create_connection((self._cables[node].address, _CLOSED_PORT), timeout=0.3).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True


class _SegmentCluster(LocalCluster):
    """Nodes with their own networks."""

    def __init__(self, spec: ClusterSpec, segment: Segment) -> None:
        super().__init__(spec)
        self._segment = segment

    def command(self, name: str) -> list[str]:
        enter, address = self._segment.attach(name)
        spec = replace(self.spec, options={**self.spec.options, "interface": address})
        return [*enter, *torchrun(spec, name, first=not self.nodes)]


def _ip(*words: str, inside: Sequence[str] = ()) -> None:
    done = subprocess.run([*inside, "ip", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"ip {' '.join(words)} failed: {done.stderr.strip()}")


def _call(name: str, *arguments: int) -> None:
    """Call the C library's ``name``; ClusterError with the kernel's reason."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        raise ClusterError(f"{name} failed: {os.strerror(ctypes.get_errno())}", hint="this needs CAP_SYS_ADMIN")
