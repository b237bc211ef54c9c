"""This node once it takes part in its run: what it has from its arrival to its end, whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.agent.health.service import HealthService
from elastic_trainer.agent.rendezvous.addresses import LivenessPort
from elastic_trainer.agent.workers.rescue import Rescue
from elastic_trainer.agent.workers.supervisor import Supervisor
from elastic_trainer.membership.documents import Departure
from elastic_trainer.membership.member import Member
from elastic_trainer.telemetry.logs import logger


@dataclass(frozen=True, slots=True)
class ArrivedNode:
    """See the module."""

    member: Member
    liveness: LivenessPort
    supervisor: Supervisor
    health: HealthService
    rescue: Rescue

    def leave(self, departure: Departure | None = None) -> bool:
        """End this node's part: its key goes away, everybody else's stays. Whether its workers made steps.

        ``departure``: why, where that is neither the end of the run nor of the process by force."""
        made_steps = False
        try:
            made_steps = self.health.made_steps
            self.health.close()
        except Exception:  # noqa: BLE001 - what reports health must not keep this node's key where others wait for it
            logger().exception("health.failed")
        last = self.member.look().round
        self.member.leave(departure)
        self.rescue.close(last)
        self.supervisor.close()
        self.liveness.close()
        return made_steps
