"""What part of a checkpoint this rank writes, in one round: all, some files of a whole state, or one place's shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from threading import Event

import torch

from elastic_trainer.checkpoint import Places
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.round_place import RoundPlace
from elastic_trainer.worker.comm.waits import ThreadedWork, storage_awaited


class Writers(StrEnum):
    """Who writes checkpoints."""

    AUTO = "auto"
    """One rank of each node, if the state is large."""
    RANK0 = "rank0"


SHARED_FROM = 32 << 20
"""Bytes of parameters from which on several nodes write a checkpoint together."""

MOST_WRITERS = 16


@dataclass(frozen=True, slots=True)
class Shares:
    """In how many files the nodes of a round write a checkpoint together, and where this one begins."""

    parts: int = 1
    turn: int = 0

    @classmethod
    def among(cls, place: RoundPlace, writers: Writers = Writers.AUTO) -> Shares:
        """One file for each node, if all have as many ranks; nodes that count otherwise cannot help each other."""
        if writers is Writers.RANK0:
            return cls()
        nodes = place.world_size // place.local_world_size
        return cls(max(1, min(MOST_WRITERS, nodes)), place.rank // place.local_world_size)

    def worthwhile(self, module: torch.nn.Module) -> bool:
        """The same on all ranks."""
        return self.parts > 1 and sum(each.nbytes for each in module.parameters()) >= SHARED_FROM


ALONE = Shares()


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One place's part of a sharded state, which its shard group copies together.

    ``peers`` are the ranks of the group; None: they cannot be reached, and each acts for itself. ``writes``: the group
    writes the checkpoints; else it has copies in memory only.
    """

    places: Places
    peers: Control | None
    writes: bool

    @property
    def leads(self) -> bool:
        """Whether the others of the group follow this place."""
        return self.places.index == 0

    @property
    def helps(self) -> bool:
        return self.writes and not self.leads

    @property
    def over(self) -> Event | None:
        """Set when the round with the peers is over."""
        return self.peers.works.over if self.peers is not None else None


def in_round(within: ShardPart | Control | None, wait: Callable[[], object]) -> None:
    """``wait()`` for storage, and no longer than a round with others lasts: it may end because one of them is gone."""
    peers = within.peers if isinstance(within, ShardPart) else within
    if peers is not None:
        peers.works.wait_for_own(ThreadedWork(wait))
    else:
        with storage_awaited():
            wait()


def not_shared(module: torch.nn.Module) -> Callable[[str], bool]:
    """Of a tensor's name in a checkpoint: whether ranks may hold other values (buffers, random generators)."""
    buffers = {f"{place}{name}" for name, _ in module.named_buffers() for place in ("model/", "average/module.")}
    return lambda name: name in buffers or not name.startswith(("model/", "optimizer/", "average/"))
