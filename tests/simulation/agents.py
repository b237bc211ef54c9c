"""What every node's agent and workers are, as far as the protocol sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_trainer.ipc.channel import Drain, Formation
from elastic_trainer.membership.documents import Ghost, Identity, NodeRecord
from elastic_trainer.model import Incarnation
from tests.simulation.node import SimNode


@dataclass(frozen=True, slots=True)
class Place:
    """A round as one worker has read it."""

    number: int
    nonce: str
    nodes: tuple[str, ...]
    world_size: int
    rank: int


class Watcher(Protocol):
    """Hears what nodes do, and raises where that is wrong."""

    def entered(self, who: str, number: int) -> None:
        """The worker ``who`` has begun to form a round."""
        ...

    def took(self, name: str, entry: Incarnation, own: Incarnation) -> None:
        """Node ``name``, being ``own``, takes the place of ``entry`` in a round."""
        ...

    def assigned(self, name: str, own: Incarnation, local_rank: int, formation: Formation) -> None:
        """The agent of node ``name``, being ``own``, has sent a worker its rank."""
        ...

    def told_over(self, name: str, number: int) -> None:
        """The agent of node ``name`` has told a worker that round ``number`` is over."""
        ...

    def started(self, name: str, life: int, number: int) -> None:
        """Restart mode: the workers of ``life`` of node ``name`` start for round ``number``."""
        ...


class Trainer:
    """What makes steps: one worker, or in restart mode those of a node, which act as one.

    ``place`` is the round that it is in; ``step`` the newest that it holds.
    """

    def __init__(self, agent: Agent, who: str) -> None:
        self.agent, self.who = agent, who
        self.place: Place | None = None
        self.place_since = 0.0
        self.formed = False
        self.step: Identity | None = None
        self.calls, self.inside = 0, False
        """The calls of all ranks (evaluations) that it has completed, and whether it is in the middle of one."""
        self.call_key = 0
        """The create-revision of its node's key when it began that call."""
        self.newcomer = True
        """Whether it has not trained yet."""

    @property
    def still(self) -> bool:
        """Whether it does nothing now."""
        return self.agent.host.frozen

    @property
    def flagged(self) -> Drain | None:
        """The planned change that it holds."""
        return None

    def soon(self, seconds: float, call: Callable[[], None]) -> None:
        """``call`` on this host, unless it has ended by then."""
        raise NotImplementedError

    def enter(self, place: Place) -> None:
        """Begin to form the round."""
        self.place, self.place_since, self.formed = place, self.agent.loop.now, False
        self.agent.watch.entered(self.who, place.number)

    def lose_contact(self, unreachable: tuple[str, ...]) -> None:
        """A collective failed, or the round was never formed."""
        raise NotImplementedError

    def made_step(self) -> None:
        """All members have made a step."""

    def switch(self) -> None:
        """All hold the planned change: go over at this step."""
        raise NotImplementedError


class Agent:
    """One node of ``size`` workers."""

    def __init__(self, node: SimNode, watch: Watcher, size: int) -> None:
        self.node, self.name, self.host = node, node.name, node.host
        self.loop, self.chance, self.watch = node.loop, node.chance, watch
        self.left = False
        self.base = NodeRecord(host="h", address=node.name, local_world_size=size, store_port=1, probe_port=1)

    trainers: Sequence[Trainer]
    team: int
    """How many trainers it has when all are there."""

    @property
    def alive(self) -> bool:
        """Whether it runs, now or after a thaw."""
        return not (self.host.dead or self.left)

    @property
    def awake(self) -> bool:
        """Whether it runs now."""
        return self.alive and not self.host.frozen

    @property
    def at_work(self) -> list[Trainer]:
        """Those that are in a round."""
        return [each for each in self.trainers if each.place is not None]

    def crash_worker(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """The training has come to its end."""
        raise NotImplementedError

    def accuse(self, suspects: tuple[Ghost, ...]) -> None:
        """Others of the round do not answer (in place)."""

    def evict(self) -> None:
        """The node is asked to go."""
        raise NotImplementedError
