"""What every node's agent and workers are, as far as the protocol sees it: the workers of a node act as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastic_trainer.membership.documents import Ghost, Identity, NodeRecord, RoundDocument, RoundMember
from elastic_trainer.model import Incarnation
from tests.simulation.node import SimNode


@dataclass(frozen=True, slots=True)
class Place:
    """A round as one node's worker has read it."""

    number: int
    nonce: str
    members: tuple[RoundMember, ...]


class Watcher(Protocol):
    """Hears what nodes do, and raises where that is wrong."""

    def entered(self, name: str, number: int) -> None:
        """The worker of node ``name`` has begun to form a round."""
        ...

    def took(self, name: str, entry: Incarnation, own: Incarnation) -> None:
        """Node ``name``, being ``own``, takes the place of ``entry`` in a round."""
        ...


class Agent:
    """One node, of ``size`` workers that act as one.

    ``place`` is the round that they are in; ``step`` the newest that they hold.
    """

    def __init__(self, node: SimNode, watch: Watcher, size: int) -> None:
        self.node, self.name, self.host = node, node.name, node.host
        self.loop, self.chance = node.loop, node.chance
        self.place: Place | None = None
        self.place_since = 0.0
        self.formed = False
        self.flagged: tuple[int, RoundDocument | None] | None = None
        """The planned change that the worker holds: the round that it ends, and the next."""
        self.step: Identity | None = None
        self.life = 0
        self.done = self.left = False
        self.watch = watch
        self.base = NodeRecord(host="h", address="h", local_world_size=size, store_port=1, probe_port=1)

    @property
    def alive(self) -> bool:
        """Whether it runs, now or after a thaw."""
        return not (self.host.dead or self.left)

    @property
    def awake(self) -> bool:
        """Whether it runs now."""
        return self.alive and not self.host.frozen

    def soon(self, seconds: float, call: Callable[[], None]) -> None:
        """``call`` on this host, unless its worker is another one by then."""
        life = self.life

        def same_life() -> None:
            if self.life == life:
                call()

        self.loop.after(seconds, lambda: self.host.deliver(same_life))

    def enter(self, document: RoundDocument) -> None:
        """The worker begins to form the round."""
        self.place = Place(document.number, document.nonce, document.members)
        self.place_since, self.formed, self.flagged = self.loop.now, False, None
        self.watch.entered(self.name, document.number)

    def takes(self, mine: RoundMember | None) -> bool:
        """Whether ``mine`` is this node's place in a round."""
        if mine is None or not self.node.key.is_mine(mine):
            return False
        self.watch.took(self.name, mine.incarnation, Incarnation(self.node.key.create_revision, self.life))
        return True

    def crash_worker(self) -> None:
        raise NotImplementedError

    def lose_contact(self, unreachable: tuple[str, ...]) -> None:
        """A collective of the worker failed, or its round was never formed."""
        raise NotImplementedError

    def finish(self) -> None:
        """The training has come to its end."""
        raise NotImplementedError

    def switch(self, following: RoundDocument | None) -> None:
        """All hold the planned change: the worker goes over at this step."""
        raise NotImplementedError

    def accuse(self, suspects: tuple[Ghost, ...]) -> None:
        """Others of the round do not answer (in place)."""

    def evict(self) -> None:
        """The node is asked to go."""
        raise NotImplementedError

    def made_step(self) -> None:
        """The round works, so all its members can be reached."""
