"""This node from its arrival in the run to its end."""

from __future__ import annotations

import os
from dataclasses import dataclass

from elastic_trainer.agent.health.service import HealthService
from elastic_trainer.agent.rendezvous.addresses import LivenessPort
from elastic_trainer.agent.workers.rescue import NeighbourCopies, Rescue
from elastic_trainer.agent.workers.watchdog import Supervisor
from elastic_trainer.membership.documents import Departure
from elastic_trainer.membership.member import Member
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.variables import ENV_ADDRESS, ENV_COPIES_HERE, ENV_MEMORY


@dataclass(frozen=True, slots=True)
class ArrivedNode:
    """See the module."""

    member: Member
    liveness: LivenessPort
    supervisor: Supervisor
    health: HealthService
    rescue: Rescue
    copies: NeighbourCopies

    def lend_memory(self, address: str) -> None:
        """Name the memory files to the workers that start next, and the ``address`` at which others reach this node."""
        os.environ[ENV_ADDRESS] = address
        os.environ[ENV_MEMORY] = self.rescue.paths
        os.environ[ENV_COPIES_HERE] = f"{address} {self.copies.here}"

    def leave(self, departure: Departure | None = None) -> None:
        """Leave the run: delete this node's key. ``departure``: why, unless the run has ended."""
        try:
            self.health.close()
        except Exception:  # noqa: BLE001 - a failing health report must not keep the key that others wait for
            logger().exception("health.failed")
        last = self.member.look().round
        self.member.leave(departure)
        self.copies.stop()
        self.rescue.close(last)
        self.copies.close()
        self.supervisor.close()
        self.liveness.close()
