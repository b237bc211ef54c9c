"""A conductor's configuration and ports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic_trainer.agent.workers.kill import HungWorkers
from elastic_trainer.agent.workers.reachability import Reachability
from elastic_trainer.agent.workers.record_writer import RecordWriter
from elastic_trainer.ipc.messages import Progress
from elastic_trainer.membership.documents import NodeRecord


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """The node whose workers are led, and their time limits. ``base`` is the constant part of the node's record.

    A worker has ``sever_timeout_s`` seconds to leave a round that is over; one that answers no ping for
    ``hang_timeout_s`` seconds is killed (0: never).
    """

    run: str
    node: str
    base: NodeRecord
    sever_timeout_s: float = 30.0
    hang_timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ConductorPorts:
    """``on_progress`` receives rank 0's reports; ``committed(pid)`` reads a process's round and step from its page.

    ``create_revision()`` is that of the node's key; ``busy(pid)`` says why a process is still in a round that is over,
    empty if it has no reason.
    """

    record_writer: RecordWriter
    on_progress: Callable[[Progress], None]
    create_revision: Callable[[], int]
    reachability: Reachability
    hung: HungWorkers
    committed: Callable[[int], tuple[int, int] | None]
    busy: Callable[[int], str]
