"""How this process meets the others: once for its life, or in rounds led by its node's agent.

*Runs in* the main thread of a worker process. *Owns* the agent link, and the sockets of the groups.
*Fails by* ConfigError for a contradictory environment, TransientError when the ranks cannot meet, StorageError for a
directory that cannot be written at the start.
"""

from __future__ import annotations

from elastic_trainer import settings
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.groups import FormTimeouts
from elastic_trainer.worker.comm.round_place import place_in
from elastic_trainer.worker.comm.sever import Sockets
from elastic_trainer.worker.comm.waits import InterruptibleWaits
from elastic_trainer.worker.inplace.agent_link import ChannelLink
from elastic_trainer.worker.inplace.escape import Escape
from elastic_trainer.worker.inplace.recovery import InPlaceRecovery
from elastic_trainer.worker.inplace.rounds import Rounds
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.storage_check import check_storage
from elastic_trainer.worker.state.training_state import Position
from elastic_trainer.worker.steps.boundary import Boundaries
from elastic_trainer.worker.steps.one_round import OneRound
from elastic_trainer.worker.steps.training import Training
from elastic_trainer.worker.steps.workplace import RankContext, Workplace


class OneGathering:
    """One round for the life of the process, as its launcher says."""

    def __init__(self, environment: WorkerEnvironment, timeout_s: float) -> None:
        self._formation = place_in(environment)
        self.timeouts = FormTimeouts(min(settings.GROUP_TIMEOUT_S, timeout_s), timeout_s)
        self._sockets = Sockets()
        self.descriptors = self._sockets.descriptors

    @property
    def world_size(self) -> int:
        return self._formation.world_size

    def broken(self) -> str | None:
        return None

    def stop_requested(self, signal: str) -> None:
        """The ranks agree on it themselves."""

    def free(self, number: int) -> None:
        """End the collectives of round ``number`` in which the main thread waits."""
        groups.abort_nccl()
        self._sockets.sever()

    def report(self, position: Position, step_s: float) -> None:
        """There is no agent."""

    def close(self, status: str) -> None:
        """The launcher sees the exit code."""

    def meet(self, place: Workplace) -> None:
        place.position.generation = self._formation.round
        with place.tracker.during(Phase.RENDEZVOUS):
            self._sockets.forming(groups.store_ends(self._formation))
            waits = InterruptibleWaits(place.tracker)
            group = groups.form(self._formation, place.placement, self.timeouts, waits)
            self._sockets.formed(group.listening)
        place.arrive(group)
        place.context = RankContext(group, Boundaries(group.control, place.signals))
        check_storage(place.manager, group.control, place.environment)

    def round_end(self, training: Training) -> OneRound:
        return OneRound(training.begin_here)


class InPlaceGathering:
    """Rounds come and go; ranks meet once there is a model."""

    world_size = 2
    """More than one; the number is not known yet."""

    def __init__(self, environment: WorkerEnvironment, timeout_s: float, tracker: HeartbeatReporter) -> None:
        self.timeouts = FormTimeouts(environment.form_timeout, timeout_s)
        self._escape = Escape(tracker)
        self._link = ChannelLink(environment, self._escape.over)
        self.stop_requested, self.report, self.close = self._link.evicted, self._link.report, self._link.close

    def descriptors(self) -> list[int]:
        return self._link.descriptors() + self._escape.sockets.descriptors()

    def broken(self) -> str | None:
        return self._link.broken(self._escape.number)

    def free(self, number: int) -> None:
        """End the collectives of round ``number`` in which the main thread waits."""
        if number == self._escape.number:
            groups.abort_nccl()
        self._escape.sockets.sever(number)

    def meet(self, place: Workplace) -> None:
        """Ranks meet only once there is a model."""

    def round_end(self, training: Training) -> InPlaceRecovery:
        return InPlaceRecovery(
            Rounds(self._link, self._escape, training.place.placement, self.timeouts, training.replica.layout), training
        )


def gathering(
    environment: WorkerEnvironment, timeout_s: float | None, tracker: HeartbeatReporter
) -> OneGathering | InPlaceGathering:
    """``timeout_s`` limits a collective, if the script sets it."""
    limit_s = timeout_s if timeout_s is not None else environment.group_timeout
    if environment.in_place:
        return InPlaceGathering(environment, limit_s, tracker)
    return OneGathering(environment, limit_s)
