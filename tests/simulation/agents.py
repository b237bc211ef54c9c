"""What every node's agent and workers are, as far as the protocol sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_trainer.ipc.channel import Message
from elastic_trainer.membership.documents import Ghost, NodeRecord
from tests.simulation.node import SimNode

if TYPE_CHECKING:
    from tests.simulation.workers import SimWorker
    from tests.simulation.world import World


class Agent:
    """One node of ``size`` workers."""

    def __init__(self, node: SimNode, world: World, size: int) -> None:
        self.node, self.name, self.host = node, node.name, node.host
        self.loop, self.chance, self.world = node.loop, node.chance, world
        self.left = self.evicted = False
        self.base = NodeRecord(host="h", address=node.name, local_world_size=size, store_port=1, probe_port=1)

    workers: Sequence[SimWorker]
    team: int
    """How many workers it has when all are there."""

    @property
    def alive(self) -> bool:
        """Whether it runs, now or after a thaw."""
        return not (self.host.dead or self.left)

    @property
    def awake(self) -> bool:
        """Whether it runs now."""
        return self.alive and not self.host.frozen

    @property
    def at_work(self) -> list[SimWorker]:
        """Those that are in a round."""
        return [each for each in self.workers if each.groups.in_round and each.alive]

    def die(self, *, silently: bool = False) -> None:
        """The machine ends; ``silently``: its connections are not closed, as by a loss of power."""
        self._end_workers(silently)
        self.node.die()

    def leave(self) -> None:
        """The node goes, with its key."""
        self._end_workers(silently=False)
        self.node.leave()

    def _end_workers(self, silently: bool) -> None:
        for each in self.workers:
            if not silently:
                each.groups.close(0.0)
            each.thread.end()

    def sends(self, worker: SimWorker, message: Message) -> None:
        """The conductor sends ``message`` to ``worker``."""

    def heard(self, worker: SimWorker, message: Message) -> None:
        """``worker`` has said ``message``."""

    def ended(self, worker: SimWorker) -> None:
        """The process of ``worker`` has ended."""
        raise NotImplementedError

    def crash_worker(self) -> None:
        raise NotImplementedError

    def accuse(self, suspects: tuple[Ghost, ...]) -> None:
        """Others of the round do not answer (in place)."""

    def evict(self) -> None:
        """The node is asked to go."""
        raise NotImplementedError
