"""Nodes on several hosts that share nothing but a network and a directory: each has its own loopback.

A host is a network namespace with an address in 192.168.77.0/24, its own name and its own ``/etc/hosts``. The test
itself runs at the hub, where the bridge is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.ledger import Line, LineKind, audit
from elastic_trainer.local.tail import LedgerTail
from elastic_trainer.membership.documents import JournalEntry, NodeRecord, RoundDocument, RoundState
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.keys import RunKeys
from tests.support.requirements import needs, needs_root

NETWORK = "192.168.77"
HUB = f"{NETWORK}.1"
LIMIT_S = 180.0
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

    def train(self, host: Host, endpoint: str, nnodes: str = "1:2", recovery: str = "in_place", **options: str) -> None:
        """Start torchrun on ``host``; the node has its name."""
        common = {"node_id": host.name, "recovery": recovery, "ttl": "60", "last_call": "0.5", "join_interval": "0.5"}
        conf = ",".join(f"{name}={value}" for name, value in (common | options).items())
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}", "--nproc-per-node=1"]
        command += ["--max-restarts=100", "--rdzv-id=run", "--rdzv-backend=etcd3", f"--rdzv-endpoint={endpoint}"]
        command += [f"--rdzv-conf={conf}", "-m", "elastic_trainer.drills.job", f"--directory={self.directory}"]
        command += [f"--samples={SAMPLES}", "--save-every=1"]
        self.start(host, host.name, command, {"ELASTIC_TRAINER_LEDGER_DIR": str(self.directory / "ledger")})

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
            self.wait_for(lambda name=name: self.running[name].poll() is not None, f"{name} does not end")
            assert self.running[name].returncode == 0, self.describe()

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
            assert not deadline.expired and not closed, f"{what}:\n{self.describe()}"
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
def endpoint(hosts: Hosts, tmp_path: Path) -> Iterator[str]:
    """An etcd at the hub, which all hosts reach."""
    everywhere = f"--listen-client-urls=http://127.0.0.1:2379,http://{HUB}:2379"
    with EtcdServer(tmp_path / "etcd", ports=(2379, 2380), arguments=[everywhere]):
        yield f"{HUB}:2379"


@pytest.mark.timeout(600)
def test_a_job_that_starts_on_one_host_grows_onto_another(hosts: Hosts, endpoint: str) -> None:
    """In place, on a network above 127.0.0.0: while it is alone its gloo groups use the loopback, and those of the next
    round do not. Nothing is lost."""
    hosts.train(hosts.add("n0"), endpoint)
    hosts.wait_steps(5, world=1)
    hosts.train(hosts.add("n1"), endpoint)
    hosts.wait_steps(20, world=2)
    with looking(endpoint) as run:
        states = [entry.state for entry in run.journal()]
        assert RoundState.BROKEN not in states, run.journal()
        assert run.addresses() == {"n0": f"{NETWORK}.2", "n1": f"{NETWORK}.3"}
    hosts.finish("n0", "n1")
    hosts.assert_nothing_lost()
