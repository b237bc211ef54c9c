"""What a conductor is given: whose workers it leads, how long they get, and what it needs of its node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic_trainer.agent.workers.kill import Verdicts
from elastic_trainer.agent.workers.reachability import Reachability
from elastic_trainer.agent.workers.record_writer import RecordWriter
from elastic_trainer.ipc.messages import Progress
from elastic_trainer.membership.documents import NodeRecord


@dataclass(frozen=True, slots=True)
class Conduct:
    """Whose workers are led, and how long they get. ``base`` is the node's record without what changes.

    A worker has ``sever_timeout_s`` to leave a round that is over; one that answers nothing for ``hang_timeout_s`` is
    killed (0: never).
    """

    run: str
    node: str
    base: NodeRecord
    sever_timeout_s: float = 30.0
    hang_timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ConductorPorts:
    """``on_progress`` gets rank 0's reports; ``committed(pid)`` the round and the step that a process's page shows.

    ``create_revision()`` is that of the node's key; ``busy(pid)`` says what keeps a process in a round that is over,
    empty if nothing does.
    """

    announcer: RecordWriter
    on_progress: Callable[[Progress], None]
    create_revision: Callable[[], int]
    reachability: Reachability
    verdicts: Verdicts
    committed: Callable[[int], tuple[int, int] | None]
    busy: Callable[[int], str]
