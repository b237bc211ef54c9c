"""Nodes on several hosts that share nothing but a network and a directory: each has its own loopback.

A host is a network namespace with an address in 192.168.77.0/24, its own name and its own ``/etc/hosts``. The test
itself runs at the hub, where the bridge is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.etcd_binary import find_binary
from elastic_trainer.local.ledger import Line, LineKind, audit
from elastic_trainer.local.tail import LedgerTail
from elastic_trainer.membership.documents import JournalEntry, NodeRecord, RoundDocument, RoundState
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.keys import RunKeys
from tests.support.requirements import needs, needs_root

NETWORK = "192.168.77"
HUB = f"{NETWORK}.1"
NOBODY = "02:00:00:00:00:01"
"""A hardware address that nobody has."""
LIMIT_S = 120.0
CLONE_NEWNET = 0x40000000
SAMPLES = 2048
DEBIAN = "127.0.0.1 localhost\n127.0.1.1 {name}\n"
"""As Debian's installer writes it."""


@dataclass(frozen=True, slots=True)
class Host:
    """One of several; ``enter`` begins each command on it."""

    name: str
    address: str
    enter: tuple[str, ...]


class Hosts:
    """The hub with its bridge, the hosts, and what runs on them. A context manager, in the test's main thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hosts: dict[str, Host] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        self._tail = LedgerTail(directory / "ledger")
        self._lines: list[Line] = []

    def __enter__(self) -> Self:
        needs_root("hosts of their own need network namespaces")
        for program in ("ip", "unshare", "nsenter", "mount"):
            needs(program, "makes hosts")
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        library = ctypes.CDLL(None, use_errno=True)
        assert library.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        self._stack.callback(os.close, home)
        self._stack.callback(library.setns, home, CLONE_NEWNET)
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "bridge0", "address", "02:00:00:00:00:02", "type", "bridge")
        call("ip", "addr", "add", f"{HUB}/24", "dev", "bridge0")
        call("ip", "link", "set", "bridge0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._stack.close()

    def add(self, name: str, hosts_file: str = "127.0.0.1 localhost\n") -> Host:
        """A host named ``name``; ``{name}`` in the text of its ``/etc/hosts`` stands for it."""
        number = len(self.hosts) + 2
        file = self.directory / f"hosts-{name}"
        file.write_text(hosts_file.format(name=name))
        inside = f"hostname {name} && mount --bind {file} /etc/hosts && echo ready && exec sleep infinity"
        holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", inside], stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(holder.wait)
        self._stack.callback(holder.kill)
        assert holder.stdout is not None
        with holder.stdout:
            assert holder.stdout.readline() == "ready\n"
        host = Host(name, f"{NETWORK}.{number}", ("nsenter", f"--target={holder.pid}", "--net", "--uts", "--mount"))
        call("ip", "link", "add", f"veth{number}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        call("ip", "link", "set", f"veth{number}", "master", "bridge0", "up")
        call(*host.enter, "ip", "link", "set", "lo", "up")
        call(*host.enter, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        call(*host.enter, "ip", "link", "set", "eth0", "up")
        self.hosts[name] = host
        return host

    def start(self, host: Host, name: str, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        variables = {name: text for name, text in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        with (self.directory / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [*host.enter, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables | dict(environment or {}),
            )

    def serve_etcd(self, host: Host) -> str:
        """Start etcd on ``host`` as one does on the head machine; returns where others reach it."""
        command = [find_binary(), f"--data-dir={self.directory / 'etcd'}", "--unsafe-no-fsync"]
        command += ["--listen-client-urls=http://0.0.0.0:2379", "--advertise-client-urls=http://localhost:2379"]
        self.start(host, "etcd", command)
        self.wait_for(lambda: "serving" in self.log("etcd"), "etcd does not start")
        return f"{host.address}:2379"

    def train(
        self,
        host: Host,
        endpoint: str,
        nnodes: str = "1:2",
        recovery: str = "in_place",
        environment: Mapping[str, str] | None = None,
        **options: str,
    ) -> None:
        """Start torchrun on ``host``; the node has its name."""
        common = {"node_id": host.name, "recovery": recovery, "ttl": "60", "last_call": "0.5", "join_interval": "0.5"}
        conf = ",".join(f"{name}={value}" for name, value in (common | options).items())
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}", "--nproc-per-node=1"]
        command += ["--max-restarts=100", "--rdzv-id=run", "--rdzv-backend=etcd3", f"--rdzv-endpoint={endpoint}"]
        command += [f"--rdzv-conf={conf}", "-m", "elastic_trainer.drills.job", f"--directory={self.directory}"]
        command += [f"--samples={SAMPLES}", "--save-every=1"]
        variables = {"ELASTIC_TRAINER_LEDGER_DIR": str(self.directory / "ledger")}
        self.start(host, host.name, command, variables | dict(environment or {}))

    def part(self, one: Host, other: Host) -> None:
        """Drop all packets between two hosts silently; both still reach the hub."""
        for here, there in ((one, other), (other, one)):
            words = ("ip", "neigh", "replace", there.address, "dev", "eth0", "lladdr", NOBODY, "nud", "permanent")
            call(*here.enter, *words)

    def reunite(self, one: Host, other: Host) -> None:
        for here, there in ((one, other), (other, one)):
            call(*here.enter, "ip", "neigh", "del", there.address, "dev", "eth0")

    def end(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.send_signal(signal.SIGKILL)
            process.wait()

    def finish(self, *names: str) -> None:
        """Let the training end; all nodes succeed."""
        (self.directory / "stop").touch()
        for name in names:
            process = self.running[name]
            self.wait_for(partial(has_ended, process), f"{name} does not end")
            assert process.returncode == 0, self.describe()

    # ---- what happens

    def lines(self) -> list[Line]:
        self._lines += self._tail.read()
        return self._lines

    def steps(self, world: int) -> int:
        """Committed steps of rank 0 in rounds of ``world`` ranks."""
        return sum(line.event is LineKind.STEP and (line.world, line.rank) == (world, 0) for line in self.lines())

    def wait_steps(self, count: int, world: int) -> None:
        before = self.steps(world)
        self.wait_for(lambda: self.steps(world) >= before + count, f"{count} steps of {world} ranks do not come")

    def wait_for(self, condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
        deadline = Deadline.after(limit_s)
        while not (found := condition()):
            closed = [name for name in self.running if "the run has failed" in self.log(name)]
            assert not deadline.expired, f"{what}:\n{self.describe()}"
            assert not closed, f"{what}:\n{self.describe()}"
            pause(0.1)
        return found

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def describe(self) -> str:
        return "\n".join(f"---- {name}\n{self.log(name)[-6000:]}" for name in self.running)

    def assert_nothing_lost(self) -> None:
        """No step was rolled back, and each sample was used once."""
        found = audit(self.lines(), SAMPLES)
        assert found.exact, found.reason
        assert found.repeated == 0, found


@dataclass(frozen=True, slots=True)
class Run:
    """What the store holds of it."""

    store: Any
    keys: RunKeys

    def document(self) -> RoundDocument | None:
        found = self.store.get(self.keys.round, Deadline.after(LIMIT_S)).first
        return RoundDocument.decode(found.value, found.key) if found is not None else None

    def journal(self) -> list[JournalEntry]:
        items = self.store.range(self.keys.events, Deadline.after(LIMIT_S)).items
        return [JournalEntry.decode(item.value, item.key) for item in items]

    def addresses(self) -> dict[str, str]:
        """Those that the nodes announce."""
        items = self.store.range(self.keys.nodes, Deadline.after(LIMIT_S)).items
        return {str(self.keys.node_id(item.key)): NodeRecord.decode(item.value, item.key).address for item in items}


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def call(*words: str) -> None:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@contextmanager
def looking(endpoint: str) -> Iterator[Run]:
    store = connect(StoreSettings(endpoints=parse_endpoints(endpoint)))
    try:
        yield Run(store, RunKeys("/elastic_trainer", "run"))
    finally:
        store.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture
def endpoint(hosts: Hosts) -> str:
    """An etcd at the hub, which all hosts reach."""
    return hosts.serve_etcd(Host("hub", HUB, ()))


@pytest.mark.timeout(600)
def test_a_job_that_starts_on_one_host_grows_onto_another(hosts: Hosts, endpoint: str) -> None:
    """In place, on a network above 127.0.0.0: while it is alone its gloo groups use the loopback, and those of the next
    round do not. Nothing is lost."""
    hosts.train(hosts.add("n0"), endpoint)
    hosts.wait_steps(5, world=1)
    hosts.train(hosts.add("n1"), endpoint)
    hosts.wait_steps(20, world=2)
    with looking(endpoint) as run:
        reasons = [entry.reason for entry in run.journal()]
        assert not any("forming" in each or "cannot reach" in each for each in reasons), reasons
        assert run.addresses() == {"n0": f"{NETWORK}.2", "n1": f"{NETWORK}.3"}
    hosts.finish("n0", "n1")
    hosts.assert_nothing_lost()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recovery", ["in_place", "restart"])
@pytest.mark.parametrize("endpoint_here", ["localhost:2379", "head:2379", f"{NETWORK}.2:2379"])
def test_etcd_on_the_head_machine(hosts: Hosts, recovery: str, endpoint_here: str) -> None:
    """Whatever the head calls its etcd, it announces an address that others can use, and the second host trains with
    it. All hosts have Debian's ``/etc/hosts``."""
    head, other = hosts.add("head", DEBIAN), hosts.add("other", DEBIAN)
    hosts.serve_etcd(head)
    hosts.train(head, endpoint_here, recovery=recovery)
    hosts.train(other, f"{head.address}:2379", recovery=recovery)
    hosts.wait_steps(10, world=2)
    with looking(f"{head.address}:2379") as run:
        assert run.addresses() == {"head": head.address, "other": other.address}
    hosts.finish("head", "other")


@pytest.mark.timeout(600)
def test_own_names_that_lead_to_the_loopback_do_no_harm(hosts: Hosts, endpoint: str) -> None:
    """gloo publishes the announced addresses from the first round on."""
    for name in ("n0", "n1"):
        hosts.train(hosts.add(name, DEBIAN), endpoint, nnodes="2")
    hosts.wait_steps(10, world=2)
    with looking(endpoint) as run:
        reasons = [entry.reason for entry in run.journal()]
        assert not any("forming" in each or "cannot reach" in each for each in reasons), reasons
    hosts.finish("n0", "n1")
    hosts.assert_nothing_lost()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["silent", "misled"])
def test_hosts_that_do_not_reach_each_other_do_not_end_the_run(hosts: Hosts, endpoint: str, fault: str) -> None:
    """Both reach etcd. All packets between them are lost, or the workers of the second publish their loopback
    (``GLOO_SOCKET_IFNAME``), which no agent sees. The first trains on, with growing pauses between two tries, and the
    sentence names both and where the one looked for the other."""
    first, second = hosts.add("n0"), hosts.add("n1")
    hosts.train(first, endpoint, form_timeout="3", stalled_rounds="3")
    hosts.wait_steps(5, world=1)
    if fault == "silent":
        hosts.part(first, second)
    misled = {"GLOO_SOCKET_IFNAME": "lo"} if fault == "misled" else {}
    hosts.train(second, endpoint, form_timeout="3", stalled_rounds="3", environment=misled)
    with looking(endpoint) as run:
        hosts.wait_for(lambda: (found := run.document()) is not None and found.left_out == "n1", "n1 is not left out")
        hosts.wait_steps(100, world=1)
        reasons = [entry.reason for entry in run.journal()]
        assert RoundState.CLOSED not in [entry.state for entry in run.journal()], reasons
        told = [each for each in reasons if each.startswith("node n1 is excluded, which others cannot reach")]
        assert told, reasons
        assert all("'elastic-trainer doctor --peers'" in each for each in told)
        tried = {
            "silent": rf"node (n0|n1) does not answer its peer (n1|n0) at {NETWORK}\.[23]:\d+ ",
            "misled": r"node (n0|n1) cannot reach node (n1|n0) at "
            rf"(127\.0\.0\.1, which its worker published|{NETWORK}\.[23], which)",
        }[fault]
        assert all(re.search(tried, each) for each in told), told
        assert "node.quarantined" in hosts.log("n1")
        if fault == "silent":
            hosts.reunite(first, second)
            hosts.wait_steps(10, world=2)
            hosts.finish("n0", "n1")
            hosts.assert_nothing_lost()
