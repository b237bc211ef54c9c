"""A process as one rank of one round: made when the round is there, and never changed."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.groups import Group
from elastic_trainer.worker.steps.boundary import Boundaries


@dataclass(frozen=True, slots=True)
class RankContext:
    """The group of the round, and what happens between this rank's steps in it."""

    group: Group
    boundaries: Boundaries

    @property
    def control(self) -> Control:
        return self.group.control

    @property
    def rank(self) -> int:
        return self.group.formation.rank

    @property
    def world_size(self) -> int:
        return self.group.formation.world_size

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0
