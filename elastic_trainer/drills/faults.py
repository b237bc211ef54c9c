"""Faults that a user requests of a local run: what is due, which node it strikes, and carrying it out.

All but :func:`perform` is pure.
*Runs in* the local cluster's process. *Owns* nothing. *Fails by* ConfigError for a fault that cannot happen.
*Invariant*: a fault is reported as done only when its victims' pids are gone (or its node has started).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.cluster import LocalCluster
from elastic_trainer.model import checked_name
from elastic_trainer.wording import counted


class FaultKind(StrEnum):
    """What happens."""

    KILL_NODE = "kill-node"
    KILL_WORKER = "kill-worker"
    JOIN = "join"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to do once the job has committed ``step``.

    Without ``node`` the victim is chosen then, as soon as the job can lose one.
    """

    kind: FaultKind
    step: int
    node: str | None = None
    local_rank: int = 0

    @property
    def chooses(self) -> bool:
        """Whether it strikes a node that it does not name."""
        return self.node is None and self.kind is not FaultKind.JOIN

    def __str__(self) -> str:
        where = f":{self.node}" if self.node else ""
        return f"{self.kind} at step {self.step}{where}"


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was carried out at ``t`` (monotonic seconds), when the job was at ``step`` of ``round``."""

    fault: Fault
    node: str
    pids: tuple[int, ...]
    t: float
    round: int
    step: int

    def __str__(self) -> str:
        if self.fault.kind is FaultKind.JOIN:
            return f"node {self.node} started"
        if self.fault.kind is FaultKind.KILL_WORKER:
            return f"worker {self.fault.local_rank} of {self.node} killed (pid {self.pids[0]})"
        return f"node {self.node} killed ({counted(len(self.pids), 'process', 'processes')})"


def parse_fault(kind: FaultKind, text: str) -> Fault:
    """Read ``STEP``, ``STEP:NODE`` or, for a worker, ``STEP:NODE:LOCAL_RANK``."""
    parts = text.split(":")
    most = {FaultKind.JOIN: 1, FaultKind.KILL_NODE: 2, FaultKind.KILL_WORKER: 3}[kind]
    form = "STEP" + "[:NODE]" * (most > 1) + "[:LOCAL_RANK]" * (most > 2)
    wrong = ConfigError(f"--{kind}-at {text!r} is not {form}", hint="STEP is a number of committed steps, from 1")
    if len(parts) > most or not all(part.isascii() and part.isdigit() for part in (parts[0], *parts[2:])):
        raise wrong
    if int(parts[0]) < 1:
        raise wrong
    node = checked_name(parts[1], f"node of --{kind}-at") if len(parts) > 1 else None
    return Fault(kind, int(parts[0]), node, int(parts[2]) if len(parts) > 2 else 0)


def check(faults: Sequence[Fault], start: int, min_nodes: int, workers: int) -> None:
    """Refuse faults that a run of ``start`` nodes could never live through, or that name what will not exist."""
    names = {f"n{index}" for index in range(start)}
    killed: set[str] = set()
    count = start
    for fault in sorted(faults, key=lambda each: each.step):
        if fault.kind is FaultKind.JOIN:
            names.add(f"n{len(names)}")
            count += 1
            continue
        if fault.node is not None and fault.node not in names:
            raise ConfigError(f"{fault}: there is no node {fault.node} by then", hint=f"there are {_list(names)}")
        if fault.node in killed:
            raise ConfigError(f"{fault}: node {fault.node} has been killed before", hint="name another node")
        if fault.local_rank >= workers:
            raise ConfigError(f"{fault}: there is no local rank {fault.local_rank}", hint="see --nproc-per-node")
        if fault.kind is FaultKind.KILL_NODE:
            count -= 1
            killed |= {fault.node} if fault.node else set()
        if count < min_nodes:
            raise ConfigError(
                f"{fault} leaves {count} of at least {min_nodes} nodes, so that the job could never go on",
                hint="start more nodes, lower the minimum of --nodes, or let one join before",
            )


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names, key=lambda name: int(name[1:])))


def due(pending: Sequence[Fault], step: int) -> tuple[Fault, ...]:
    """Those of ``pending`` whose step the job has committed, earliest first."""
    return tuple(sorted((fault for fault in pending if fault.step <= step), key=lambda fault: fault.step))


def victim(fault: Fault, running: Sequence[str], training: Sequence[str], first: str | None) -> str | None:
    """The node that ``fault`` strikes: the one it names, else the last one that does not host rank 0 (``first``).

    Of those that train, if any: a spare, or one whose worker is still away, would change nothing for the others.
    """
    if fault.node is not None:
        return fault.node if fault.node in running else None
    there = [name for name in running if name in training] or list(running)
    candidates = [name for name in there if name != first] or there
    return candidates[-1] if candidates else None


def perform(
    fault: Fault, cluster: LocalCluster, training: Sequence[str], first: str | None, at: tuple[int, int]
) -> Injected | None:
    """Carry ``fault`` out now; None if its victim was not there. ``at`` is the job's present (round, step)."""
    if fault.kind is FaultKind.JOIN:
        t = SYSTEM.monotonic()
        node = cluster.add()
        return Injected(fault, node.name, (node.pid,), t, *at)
    name = victim(fault, [node.name for node in cluster.running], training, first)
    if name is None:
        return None
    node = cluster.node(name)
    killed = node.kill() if fault.kind is FaultKind.KILL_NODE else node.kill_worker(fault.local_rank)
    return None if killed is None else Injected(fault, name, killed.pids, killed.t, *at)
