"""A conductor's configuration and ports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic_trainer.agent.workers.kill import kill_now
from elastic_trainer.agent.workers.reachability import Ask
from elastic_trainer.agent.workers.record_writer import PendingWrites
from elastic_trainer.agent.workers.watchdog import queued_s
from elastic_trainer.ipc.messages import Progress
from elastic_trainer.membership.documents import NodeRecord


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """The node whose workers are led. ``base`` is the constant part of the node's record.

    A worker has ``sever_timeout_s`` seconds to leave a round that is over.
    """

    run: str
    node: str
    base: NodeRecord
    sever_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ConductorPorts:
    """``on_progress`` receives rank 0's reports; ``committed(pid)`` reads a process's round and step from its page.

    ``create_revision()`` is that of the node's key; ``busy(pid)`` says why a process is still in a round that is over,
    empty if it has no reason; ``why_hung(pid)`` why one that has ended was killed as hung, once.
    """

    record_writer: PendingWrites
    on_progress: Callable[[Progress], None]
    create_revision: Callable[[], int]
    ask: Ask
    why_hung: Callable[[int], str | None]
    committed: Callable[[int], tuple[int, int] | None]
    busy: Callable[[int], str]
    kill: Callable[[int, str], object] = kill_now
    queued_s: Callable[[int], Mapping[str, float]] = queued_s
