"""How this process comes together with the others: once for its life, or in rounds that its node's agent leads.

*Runs in* the main thread of a worker process. *Owns* the link, and the sockets beneath the groups.
*Fails by* ConfigError for an environment that makes no sense, TransientError when the ranks cannot meet, StorageError
for a directory that cannot be written at the start.
"""

from __future__ import annotations

from elastic_trainer import settings
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.groups import FormTimeouts
from elastic_trainer.worker.comm.link import EnvironmentLink
from elastic_trainer.worker.comm.sever import Sockets
from elastic_trainer.worker.comm.waits import InterruptibleWaits
from elastic_trainer.worker.inplace.agent_link import ChannelLink
from elastic_trainer.worker.inplace.escape import Escape
from elastic_trainer.worker.inplace.recovery import InPlaceRecovery
from elastic_trainer.worker.inplace.rounds import Rounds
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.saver import check_storage
from elastic_trainer.worker.steps.boundary import Boundaries
from elastic_trainer.worker.steps.one_round import OneRound
from elastic_trainer.worker.steps.rank_context import RankContext
from elastic_trainer.worker.steps.training import Training
from elastic_trainer.worker.steps.workplace import Workplace


class OneGathering:
    """One round for the life of the process, where its launcher says."""

    def __init__(self, environment: WorkerEnvironment, timeout_s: float) -> None:
        self.link = EnvironmentLink(environment)
        self._formation = self.link.formation()
        self._timeouts = FormTimeouts(min(settings.GROUP_TIMEOUT_S, timeout_s), timeout_s)
        self._sockets = Sockets()
        self.descriptors = self._sockets.descriptors

    @property
    def world_size(self) -> int:
        return self._formation.world_size

    def broken(self) -> str | None:
        return None

    def stop_requested(self, signal: str) -> None:
        """Nothing to do: the ranks agree on it themselves."""

    def meet(self, place: Workplace) -> None:
        place.position.generation = self._formation.round
        with place.tracker.during(Phase.RENDEZVOUS):
            self._sockets.forming(groups.store_ends(self._formation))
            waits = InterruptibleWaits(place.tracker)
            group = groups.form(self._formation, place.placement, self._timeouts, waits)
            self._sockets.formed(group.listening)
        place.arrive(group)
        place.context = RankContext(group, Boundaries(group.control, place.signals))
        check_storage(place.manager, group.control, place.environment)

    def round_end(self, training: Training) -> OneRound:
        return OneRound(training.begin_here)


class InPlaceGathering:
    """Rounds come and go: the others are met when there is a model."""

    world_size = 2
    """More than one: how many is not known yet."""

    def __init__(self, environment: WorkerEnvironment, timeout_s: float, tracker: HeartbeatReporter) -> None:
        self._timeouts = FormTimeouts(environment.form_timeout, timeout_s)
        self._escape = Escape(tracker)
        self.link = ChannelLink(environment, self._escape.over)
        self.stop_requested = self.link.evicted

    def descriptors(self) -> list[int]:
        return self.link.descriptors() + self._escape.descriptors()

    def broken(self) -> str | None:
        return self.link.broken(self._escape.number)

    def meet(self, place: Workplace) -> None:
        """Ranks meet only once there is a model."""

    def round_end(self, training: Training) -> InPlaceRecovery:
        return InPlaceRecovery(Rounds(self.link, self._escape, training.place.placement, self._timeouts), training)


def gathering(
    environment: WorkerEnvironment, timeout_s: float | None, tracker: HeartbeatReporter
) -> OneGathering | InPlaceGathering:
    """That of this process. ``timeout_s`` bounds a collective, if the script says so."""
    limit_s = timeout_s if timeout_s is not None else environment.group_timeout
    if environment.in_place:
        return InPlaceGathering(environment, limit_s, tracker)
    return OneGathering(environment, limit_s)
