"""Hosts on this machine: each has a network, processes, a host name and a /tmp of its own, on one network segment.

Also free TCP ports, for servers that will be restarted on them; another process may take one at once, so users try
another when binding fails.

*Runs in* tests, drills and ``elastic-trainer local --hosts``, as root. *Owns* a segment's namespaces and cables.
*Fails by* ConfigError where hosts cannot be made, ClusterError for what the machine refuses, StoreUnavailableError when
no port is free.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from pathlib import Path
from typing import Self

from elastic_trainer.errors import ConfigError, PermanentError, StoreUnavailableError
from elastic_trainer.local.host_init import PRIVATE as PRIVATE
from elastic_trainer.worker.report import PROC

HOST = "127.0.0.1"


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that were free a moment ago, outside the kernel's range of ephemeral ports.

    In that range a client that connects to a stopped etcd could be assigned etcd's own port, and keep it.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first_ephemeral = int(file.read().split()[0])
    candidates = range(10_000, first_ephemeral) if first_ephemeral > 11_000 else range(61_000, 65_536)
    chosen: list[int] = []
    for port in random.sample(candidates, len(candidates)):
        if is_free(port):
            chosen.append(port)
        if len(chosen) == count:
            return tuple(chosen)
    raise StoreUnavailableError("this machine has no free ports")


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


# ---- hosts

PROGRAMS = ("ip", "nsenter")
BRIDGE, INSIDE = "bridge0", "eth0"
HUB = "192.168.0.1/16"
"""The hub's address."""
_CLONE_NEWNET = 0x40000000
_NETWORK = "/proc/thread-self/ns/net"
_NOBODY, _OWN = "02:00:00:00:00:01", "02:00:00:00:00:02"
"""Hardware addresses that no cable has: an unused one, and the bridge's."""
_CLOSED_PORT = 9
_READY_S = 30.0
_TRIAL = """
import ctypes, os, subprocess, sys
library = ctypes.CDLL(None, use_errno=True)
if library.unshare(0x40000000 | 0x04000000 | 0x08000000 | 0x00020000 | 0x20000000):
    sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
sys.exit(subprocess.run(["ip", *sys.argv[1:]]).returncode)
"""
_TRIED = ("link", "add", BRIDGE, "type", "bridge")


class ClusterError(PermanentError):
    """The machine failed to perform an operation on the cluster."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host. ``pid`` is its first process's, as this process sees it; ``outside`` the bridge's end of its cable."""

    name: str
    pid: int
    outside: str
    addresses: tuple[str, ...]
    _holder: subprocess.Popen[bytes] = field(repr=False)

    @property
    def address(self) -> str:
        """The first of its addresses on the segment."""
        return self.addresses[0]

    @property
    def command(self) -> list[str]:
        """The words that start a command in its network, but with all else of this process's own host."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def close(self) -> None:
        """Kill all that runs on it, at once, as a power failure does; its cable goes too."""
        self._holder.kill()
        self._holder.wait()


def check_possible() -> None:
    """Raise ConfigError unless this process can create hosts."""
    if (lacking := lacks()) is not None:
        raise ConfigError(f"hosts of their own for the nodes need {lacking}", hint="run it as root, with iproute2")


def lacks() -> str | None:
    """What this process lacks to create hosts; None if it can."""
    if sys.platform != "linux":
        return "Linux"
    if os.geteuid() != 0:
        return "root"
    lacking = next((f"the program {each!r}" for each in PROGRAMS if shutil.which(each) is None), None)
    return lacking or _refused()


@cache
def _refused() -> str | None:
    """What the kernel lacks or refuses; found out by a trial, since sandboxes forbid more than capabilities say."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _TRIAL, *_TRIED], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return f"namespaces and virtual networks, which fail here: {done.stderr.strip().rpartition(chr(10))[2]}"


class Segment:
    """One network segment. A context manager: in its body this thread, and what it starts, is at the hub.

    Threads that were started before stay where they were, those of libraries too: a process enters one segment, early.

    ``shared``: directories below /tmp or /dev/shm that all hosts see, as on a shared disk; the interpreter, the working
    directory and this package always are.
    """

    hubs: Sequence[str] = (HUB,)
    """The hub's addresses that the next hosts reach, and have addresses beside."""

    def __init__(self, shared: Sequence[Path] = ()) -> None:
        self._shared = [Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2], *shared]
        self._stack = ExitStack()
        self._hosts: dict[str, Host] = {}
        self._count = 0

    def __enter__(self) -> Self:
        check_possible()
        try:
            self._leave_home()
            run_ip("link", "set", "lo", "up")
            # Without its own address a bridge takes that of a port, and another one when that port is cut off: then the
            # node behind the port still reaches the hub, and all others must first resolve the hub's new address.
            run_ip("link", "add", BRIDGE, "address", _OWN, "type", "bridge")
            run_ip("addr", "add", self.hubs[0], "dev", BRIDGE)
            run_ip("link", "set", BRIDGE, "up")
            token = CURRENT.set(self)
            self._stack.callback(CURRENT.reset, token)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _leave_home(self) -> None:
        """Move this thread, and all that it will start, to an empty network; ``__exit__`` moves it back."""
        home = os.open(_NETWORK, os.O_RDONLY | os.O_CLOEXEC)
        self._stack.callback(os.close, home)
        _call("unshare", _CLONE_NEWNET)
        self._stack.callback(_call, "setns", home, _CLONE_NEWNET)

    @property
    def hub(self) -> str:
        """The address at which the next hosts reach servers of this process."""
        return str(ip_interface(self.hubs[0]).ip)

    # ---- hosts

    def attach(self, name: str, shared: Sequence[Path] = (), ledger: Path | None = None) -> Host:
        """Start a host called ``name``, which also sees ``shared``.

        Workers that keep a ledger in the directory ``ledger`` write the process ids of this process's own host there
        (see worker/report.py).
        """
        self._count += 1
        interfaces = [_behind(hub, self._count) for hub in self.hubs]
        addresses = tuple(str(each.ip) for each in interfaces)
        given = [path.absolute() for path in (*self._shared, Path.cwd(), *shared)]
        shown = [*given, *(path.resolve() for path in given)]  # as it is spelled, and what links lead to
        names = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", *self._own_name(name, addresses[0])]
        holder, pid = _first_process(
            {
                "name": name,
                "names": "".join(f"{each}\n" for each in names),
                "shared": [str(path) for path in shown if path.exists()],
                "proc": str(ledger.resolve() / PROC) if ledger is not None else "",
            }
        )
        host = Host(name, pid, f"veth{self._count}", addresses, holder)
        self._stack.callback(host.close)
        self._hosts[name] = host
        self._connect(host, interfaces)
        return host

    def _own_name(self, name: str, address: str) -> list[str]:
        """The lines by which a host resolves its own name."""
        return [f"{address} {name}"]

    def _connect(self, host: Host, interfaces: Sequence[IPv4Interface | IPv6Interface]) -> None:
        run_ip("link", "add", host.outside, "type", "veth", "peer", "name", INSIDE, "netns", str(host.pid))
        run_ip("link", "set", host.outside, "master", BRIDGE, "up")
        for each in interfaces:
            run_ip("addr", "add", str(each), "dev", INSIDE, inside=host.command)
        run_ip("link", "set", INSIDE, "up", inside=host.command)
        run_ip("link", "set", "lo", "up", inside=host.command)

    def cut(self, name: str) -> None:
        """Drop all packets to and from a host; its interface stays up, so that no process is notified."""
        run_ip("link", "set", self._hosts[name].outside, "nomaster")

    def restore(self, name: str) -> None:
        run_ip("link", "set", self._hosts[name].outside, "master", BRIDGE)

    def part(self, one: str, other: str) -> None:
        """Drop all packets of ``one`` to ``other``; all others still reach both."""
        self._neighbour("replace", one, other, "lladdr", _NOBODY, "nud", "permanent")

    def reunite(self, one: str, other: str) -> None:
        self._neighbour("del", one, other)

    def _neighbour(self, verb: str, one: str, other: str, *more: str) -> None:
        for address in self._hosts[other].addresses:
            run_ip("neigh", verb, address, "dev", INSIDE, *more, inside=self._hosts[one].command)

    def reaches(self, name: str) -> bool:
        """Whether the host's network answers the hub: it refuses a connection to an unused port."""
        try:
            socket.create_connection((self._hosts[name].address, _CLOSED_PORT), timeout=0.3).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True


CURRENT: ContextVar[Segment | None] = ContextVar("segment", default=None)


def current() -> Segment | None:
    """The segment whose hub this thread is at; None on the machine's own network."""
    return CURRENT.get()


def reachable() -> str:
    """The address at which nodes that this thread starts reach servers of this process."""
    segment = current()
    return segment.hub if segment is not None else HOST


def _first_process(wanted: dict[str, object]) -> tuple[subprocess.Popen[bytes], int]:
    """Start the first process of a host; the process that waits for it, and its own id."""
    holder = subprocess.Popen(
        [sys.executable, "-m", "elastic_trainer.local.host_init", str(os.getpid()), json.dumps(wanted)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which ends the nodes first
    )
    said, error = b"", "it did not answer in time"
    if holder.stdout is not None and holder.stderr is not None:
        with holder.stdout, holder.stderr:
            if select.select([holder.stdout], [], [], _READY_S)[0]:
                said = holder.stdout.readline()
                error = "" if said else holder.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
    if not said:
        holder.kill()
        holder.wait()
        raise ClusterError(f"no host could be created: {error}")
    return holder, int(said)


def _behind(hub: str, number: int) -> IPv4Interface | IPv6Interface:
    """The address of the host ``number`` in the network of ``hub``, with the length of its prefix."""
    interface = ip_interface(hub)
    return ip_interface(f"{interface.ip + number}/{interface.network.prefixlen}")


def run_ip(*words: str, inside: Sequence[str] = ()) -> None:
    """Run ``ip`` with ``words``, by the command ``inside``. Raises ClusterError."""
    done = subprocess.run([*inside, "ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"ip {' '.join(words)} failed: {done.stderr.strip()}")


def _call(name: str, *arguments: int) -> None:
    """Call the C library's ``name``; ClusterError with the kernel's reason."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        raise ClusterError(f"{name} failed: {os.strerror(ctypes.get_errno())}", hint="this needs CAP_SYS_ADMIN")
