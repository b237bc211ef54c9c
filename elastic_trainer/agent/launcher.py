"""What torchrun is about to start on this node: it does not tell its rendezvous handler, so its agent is asked.

The handler needs the number of workers before ranks can be agreed. torchrun's own backends learn it through a second
exchange after the rendezvous, in which every node can block on a dying one.

*Runs in* torchrun's main thread, inside ``next_rendezvous``.
*Fails by* ConfigError when no torchrun agent is calling.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

from torch.distributed.elastic.agent.server.api import ElasticAgent

from elastic_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """The workers of this node: how many, and torchrun's ``--role`` and ``--max-restarts``."""

    count: int
    role: str
    max_restarts: int


def local_workers() -> LocalWorkers:
    """Ask the torchrun agent that is calling (the nearest one up the stack)."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, ElasticAgent):
            spec = caller.get_worker_group().spec
            return LocalWorkers(spec.local_world_size, spec.role, spec.max_restarts)
        frame = frame.f_back
    raise ConfigError("this rendezvous backend was not called by torchrun's agent", hint="start the job with torchrun")
