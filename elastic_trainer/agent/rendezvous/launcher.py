"""What torchrun starts on this node, and why: read from the frames of torchrun's agent, which does not pass it on.

The handler needs the number of workers before it can assign ranks. torchrun's own backends get it from a second
exchange after the rendezvous, in which any node can block on a dying one.

*Runs in* torchrun's main thread, inside ``next_rendezvous``.
*Fails by* ConfigError when no torchrun agent is calling.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import ElasticAgent, RunResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """The number of workers of this node, and torchrun's ``--role`` and ``--max-restarts``."""

    count: int
    role: str
    max_restarts: int


def local_workers() -> LocalWorkers:
    """Read them from the calling torchrun agent (the nearest one up the stack)."""
    for names in _callers():
        caller = names.get("self")
        if isinstance(caller, ElasticAgent):
            spec = caller.get_worker_group().spec
            return LocalWorkers(spec.local_world_size, spec.role, spec.max_restarts)
    raise ConfigError("this rendezvous backend was not called by torchrun's agent", hint="start the job with torchrun")


def failures() -> dict[int, ProcessFailure]:
    """The failed workers, by rank, if torchrun calls because of their failure."""
    for names in _callers():
        result = names.get("run_result")
        if isinstance(result, RunResult):
            return dict(result.failures)
    return {}


def _callers() -> Iterator[dict[str, Any]]:
    """The local variables of all callers, nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back
