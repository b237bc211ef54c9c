"""What is left of a job whose workers have all died: their newest snapshots, in memory that this agent holds.

New workers resume from them (checkpoint.arena). Here they are committed to storage too, without torch, since the next
failure may take the node. The node of rank 0 does it at once; the others look after a while whether it was done or is
being done. They hold the same step with the buffers of their own ranks, and storage is to have those of one. Each
worker has memory files of its own: the first one for whole states, all of them for the places of a sharded model.

*Runs in* the agent: a thread for each end of this node's workers; torchrun's main thread when the node leaves.
*Owns* the memory files. *Fails by* nothing: what cannot be committed is logged, and new workers resume all the same.
*Invariant*: bytes that have changed since they were sealed are never committed (checkpoint.commit).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence

from elastic_trainer.checkpoint import CheckpointManager, Owner, StateSnapshot
from elastic_trainer.checkpoint.arena import SLOTS, newest
from elastic_trainer.checkpoint.layout import rescued_name
from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import NodeState, RoundDocument, RoundState
from elastic_trainer.telemetry.logs import logger

APART_S = 2.0
"""How much later than the node before it a node looks whether the state was committed."""
LOOK_S = 0.2
"""In place others may have survived, which shows in their keys by then."""
LOOKING_S = 1.0
LEAVING_S = 60.0
"""How long a node that leaves waits for a rescue under way."""
PATIENCE_S = 600.0
"""How long an agent leaves the state to another one that is writing it."""


Nodes = Callable[[Sequence[str], Deadline], Mapping[str, NodeView]]
"""The present keys of the nodes with these names; asks the store."""


class Rescue:
    """See the module."""

    def __init__(self, node: str, nodes: Nodes, workers: int, clock: Clock = SYSTEM) -> None:
        self._node, self._nodes, self._clock = node, nodes, clock
        self._files = [os.memfd_create(f"elastic-trainer-snapshot-{number}") for number in range(SLOTS * workers)]
        self._under_way = threading.Lock()
        self._closing = threading.Event()

    @property
    def paths(self) -> str:
        """Where workers open the memory files."""
        return os.pathsep.join(f"/proc/{os.getpid()}/fd/{each}" for each in self._files)

    def begin(self, document: RoundDocument, *, in_place: bool) -> None:
        """The workers of this node, which were in the round of ``document``, are dead: see to their state."""
        if newest(self._files) is not None:
            threading.Thread(
                target=self._rescue, args=(document, in_place), name="snapshot-rescue", daemon=True
            ).start()

    def close(self, document: RoundDocument | None = None) -> None:
        """The node leaves: commit what is in no storage, and give the memory back.

        Not if it left by agreement: then the others train on in the round of ``document``.
        """
        self._closing.set()
        others_train = document is not None and document.state is RoundState.ACTIVE
        if document is not None and others_train and document.member(self._node) is None:
            logger().debug("snapshot.left_to_others", round=document.number)
        elif self._under_way.acquire(timeout=LEAVING_S):
            self.commit(_turn(document, self._node) if document is not None else 0)
        files, self._files = self._files, []
        for each in files:
            os.close(each)

    def _rescue(self, document: RoundDocument, in_place: bool) -> None:
        order = [member.node for member in document.members]
        turn = _turn(document, self._node)
        if in_place:
            pause(LOOK_S, self._closing, self._clock)
        with self._under_way:
            living = self._look(order) if in_place or turn else None
            if in_place and survivors(document, living or {}):
                return
            earlier = turn if living is None else sum(1 for name in order[:turn] if name in living)
            if not pause(APART_S * earlier, self._closing, self._clock):
                self.commit(turn)

    def _look(self, names: Sequence[str]) -> Mapping[str, NodeView] | None:
        """Those that live; None where the store is away."""
        try:
            return self._nodes(names, Deadline.after(LOOKING_S, self._clock))
        except ElasticTrainerError as error:
            logger().debug("snapshot.nodes_unknown", error=str(error))
            return None

    def commit(self, turn: int = 0) -> None:
        """Commit the newest snapshot, unless storage has it or a newer state, or gets it from another agent."""
        try:
            snapshot = newest(self._files)
            if snapshot is not None and not snapshot.stored:
                self._commit(snapshot, turn)
        except Exception as error:  # noqa: BLE001 - nothing else may fail for it: a node that leaves must leave
            logger().error("snapshot.not_rescued", reason=str(error) or type(error).__name__)

    def _commit(self, snapshot: StateSnapshot, turn: int) -> None:
        manager = CheckpointManager(snapshot.location, owner=Owner(snapshot.manifest.run, snapshot.job))
        draft = snapshot.manifest.model_copy(update={"name": rescued_name(*snapshot.order, turn)})
        patience = Deadline.after(LEAVING_S if self._closing.is_set() else PATIENCE_S, self._clock)
        try:
            while manager.offered(draft) and not patience.expired:
                pause(APART_S, clock=self._clock)
            if _has(manager, snapshot):
                return
            committed = manager.write(snapshot.image(), draft, offer=True)
        finally:
            manager.close()
        took_s = round(committed.duration_s, 3)
        logger().warning("snapshot.rescued", checkpoint=committed.name, step=snapshot.manifest.step, took_s=took_s)


def _has(manager: CheckpointManager, snapshot: StateSnapshot) -> bool:
    stored = manager.newest()
    return stored is not None and (stored.round, stored.step) >= snapshot.order


def _turn(document: RoundDocument, node: str) -> int:
    order = [member.node for member in document.members]
    return order.index(node) if node in order else len(order)


def survivors(document: RoundDocument, nodes: Mapping[str, NodeView]) -> list[str]:
    """The members of the round whose workers live, and hold its state."""
    return [
        member.node
        for member in document.members
        if (view := nodes.get(member.node)) is not None
        and (view.create_revision, view.record.life) == (member.create_revision, member.life)
        and view.record.state is not NodeState.WARMING
    ]
