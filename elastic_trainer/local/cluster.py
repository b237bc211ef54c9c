"""A cluster on one machine: each node is a real torchrun process with its workers, in its own process session.

At the hub of a segment (see hosts.py) each node gets a host of its own; elsewhere all share this machine's loopback.

*Runs in* any thread of the process that creates it.
*Owns* the nodes' processes and ``<run dir>/logs``.
*Fails by* ConfigError for a node that does not exist, ClusterError for processes that cannot be killed.
*Invariant*: every process of a node carries the run's ledger directory and the node's name in its environment, so
that :meth:`LocalCluster.stop` also finds orphans; it leaves no process behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import psutil

from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import ConfigError
from elastic_trainer.local import agents, processes
from elastic_trainer.local.hosts import ClusterError, Host, current
from elastic_trainer.settings import without_store
from elastic_trainer.variables import ENV_LEDGER_DIR, ENV_NODE

KILL_LIMIT_S = 60.0
"""Seconds that the kernel may take to remove killed processes."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The configuration of all nodes of a cluster. ``entry`` is a script or ``-m module``, and its arguments."""

    run: str
    directory: Path
    endpoint: str
    entry: Sequence[str]
    min_nodes: int
    max_nodes: int
    workers: int = 1
    max_restarts: int = 3
    backend: str = "etcd3"
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def ledger(self) -> Path:
        """The directory of the workers' ledgers."""
        return self.directory / "ledger"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"


def threads_per_worker(cores: int, workers: int) -> int:
    """Compute threads for each of ``workers`` processes on a machine with ``cores`` cores."""
    return max(1, cores // max(1, workers))


def torchrun(spec: ClusterSpec, node: str, first: bool, *, hosted: bool = False) -> list[str]:
    """The command of one node; the ``first`` one hosts the store of torchrun's own c10d backend.

    ``hosted``: on a host of its own, which has to find out its address as it does in production.
    """
    options = dict(spec.options)
    options |= {"is_host": str(first).lower()} if spec.backend == "c10d" else {"node_id": node}
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nnodes={spec.min_nodes}:{spec.max_nodes}", f"--nproc-per-node={spec.workers}"]
    command += [f"--max-restarts={spec.max_restarts}", f"--rdzv-id={spec.run}", f"--rdzv-backend={spec.backend}"]
    command += [f"--rdzv-endpoint={spec.endpoint}", *(() if hosted else ("--local-addr=127.0.0.1",))]
    command += ["--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in options.items())]
    return [*command, *spec.entry]


@dataclass(frozen=True, slots=True)
class Killed:
    """Processes that were killed, and when they were signalled (monotonic seconds)."""

    pids: tuple[int, ...]
    t: float


class Node:
    """One node of a local cluster. Its pid is torchrun's; workers are its descendants, each in its own session."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, marks: Mapping[str, str]) -> None:
        self.name, self.log, self._process, self._marks = name, log, process, marks

    @property
    def pid(self) -> int:
        """torchrun's process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal, as in :class:`subprocess.Popen`."""
        return self._process.poll()

    @property
    def running(self) -> bool:
        """Whether torchrun is alive (frozen counts)."""
        return self.exit_code() is None

    def family(self) -> list[psutil.Process]:
        """torchrun and all its descendants, itself first."""
        return processes.tree(self.pid) if self.running else []

    def worker(self, local_rank: int = 0) -> psutil.Process | None:
        """The worker of this local rank, or None if it does not run."""
        # A worker's children inherit its variables: the worker is the process that torchrun started.
        for process in processes.children(self.pid) if self.running else ():
            if processes.environment(process).get("LOCAL_RANK") == str(local_rank):
                return process
        return None

    def kill(self) -> Killed | None:
        """SIGKILL the whole node at once, as if its machine failed; None if it no longer ran."""
        family = self.family()
        return kill(family, self._marks) if family else None

    def kill_worker(self, local_rank: int = 0) -> Killed | None:
        """SIGKILL one worker; None if there was none."""
        worker = self.worker(local_rank)
        return kill([worker]) if worker is not None else None

    def freeze(self) -> list[int]:
        """SIGSTOP the whole node; returns the frozen process ids."""
        family = self.family()
        processes.send(family, signal.SIGSTOP)
        return [process.pid for process in family]

    def thaw(self) -> None:
        processes.send(self.family(), signal.SIGCONT)

    def terminate(self) -> None:
        """Send torchrun SIGTERM, as an eviction does; does not wait."""
        if self.running:
            self._process.terminate()

    def wait(self, deadline: Deadline) -> int | None:
        """Wait for torchrun to end; its exit code, or None at the deadline."""
        while (code := self.exit_code()) is None and not deadline.expired:
            pause(min(_POLL_S, deadline.remaining_s()))
        return code


def kill(victims: Sequence[psutil.Process], marks: Mapping[str, str] | None = None) -> Killed:
    """SIGKILL ``victims`` at once, and all other processes that carry ``marks``; returns when all have ended."""
    t = SYSTEM.monotonic()
    remaining = processes.kill_all(victims, marks, Deadline.after(KILL_LIMIT_S))
    if remaining:
        raise ClusterError(f"processes {[process.pid for process in remaining]} survived SIGKILL")
    return Killed(tuple(process.pid for process in victims), t)


class LocalCluster:
    """The nodes of one run. Use as a context manager: leaving it ends every process of the run."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.nodes: list[Node] = []
        self.ledger_marks = {ENV_LEDGER_DIR: str(spec.ledger)}
        self.segment = current()
        self.hosts: dict[str, Host] = {}
        """The hosts of the nodes, by their names; none where nodes share this machine's. A node whose host is here
        already, since something else runs on it, gets that one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, count: int) -> list[Node]:
        return [self.add() for _ in range(count)]

    def add(self) -> Node:
        """Start one more node, named ``n0``, ``n1``, ... in order."""
        name = f"n{len(self.nodes)}"
        for directory in (self.spec.ledger, self.spec.logs):
            directory.mkdir(parents=True, exist_ok=True)
        log = self.spec.logs / f"{name}.log"
        if self.segment is not None and name not in self.hosts:
            self.hosts[name] = self.segment.attach(name, [self.spec.directory], self.spec.ledger)
        host = self.hosts[name].pid if name in self.hosts else 0
        process = agents.spawn(self.command(name), log, self._environment(name), host)
        node = Node(name, process, log, self.ledger_marks | {ENV_NODE: name})
        self.nodes.append(node)
        return node

    def command(self, name: str) -> list[str]:
        spec, first = self.spec, not self.nodes
        if spec.backend == "c10d" and self.hosts:  # the first node serves
            server = self.hosts[name if first else self.nodes[0].name]
            spec = replace(spec, endpoint=f"{server.address}:{spec.endpoint.rpartition(':')[2]}")
        return torchrun(spec, name, first, hosted=name in self.hosts)

    def node(self, name: str) -> Node:
        found = next((node for node in self.nodes if node.name == name), None)
        if found is not None:
            return found
        raise ConfigError(f"there is no node {name!r}", hint=f"there are {', '.join(n.name for n in self.nodes)}")

    @property
    def running(self) -> list[Node]:
        """Nodes whose torchrun is alive."""
        return [node for node in self.nodes if node.running]

    def wait(self, deadline: Deadline) -> bool:
        """Wait until no node runs; False at the deadline."""
        while self.running and not deadline.expired:
            pause(min(_POLL_S, deadline.remaining_s()))
        return not self.running

    def stop(self, grace_s: float = 10.0) -> None:
        """End all nodes: SIGTERM, up to ``grace_s`` seconds of grace, then SIGKILL for all that remains of the run."""
        nodes = self.running
        family = [process for node in nodes for process in node.family()]
        for node in nodes:
            node.thaw()
            node.terminate()
        self.wait(Deadline.after(grace_s))
        processes.kill_all(family, self.ledger_marks, Deadline.after(KILL_LIMIT_S))
        for node in nodes:
            node.wait(Deadline.after(KILL_LIMIT_S))
        for host in self.hosts.values():
            host.close()

    def _environment(self, name: str) -> dict[str, str]:
        processes_at_most = self.spec.max_nodes * self.spec.workers
        threads = threads_per_worker(len(os.sched_getaffinity(0)), processes_at_most)
        mine = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        if name not in self.hosts:  # a laptop's host name may resolve to an address that moves with its network
            mine |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        named = {ENV_LEDGER_DIR: str(self.spec.ledger), ENV_NODE: name}
        return mine | without_store(os.environ) | dict(self.spec.environment) | named
