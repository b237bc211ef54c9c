"""How a session learns its place in the world, and whom it tells what it does.

A link is the session's only neighbour: the launcher's environment, or this package's agent on the same node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import WorkerEnvironment


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the ranks of a round meet.

    ``serve``: rank 0 of the workers hosts the store itself. ``prefix`` is a name that no other round uses; where
    the launcher has none the ranks agree on one when they meet.
    """

    host: str
    port: int
    serve: bool
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class RoundPlace:
    """One process's place in one round. Without ``store`` it is alone and needs no process group."""

    round: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store: StoreAddress | None = None
    reason: str = ""
    """Why there is this round, for people."""

    @property
    def one_host(self) -> bool:
        loopback = self.store is not None and self.store.host in ("localhost", "127.0.0.1", "::1")
        return self.local_world_size == self.world_size or loopback


@dataclass(frozen=True, slots=True)
class RankProgress:
    """What a session tells about itself; ``step_s`` is the time that a step takes, smoothed."""

    phase: str
    step: int
    epoch: int
    samples: int
    step_s: float


class Link(Protocol):
    """The port. ``report_due`` is asked at each step; ``report`` must never block."""

    def broken(self, round: int) -> str | None:
        """Why ``round`` is over, or None while it is not known to be."""
        ...

    def report_due(self) -> bool:
        """Whether anybody wants to know how far this process is."""
        ...

    def report(self, progress: RankProgress) -> None:
        """Take note of ``progress``."""
        ...

    def close(self, status: str) -> None:
        """The session has ended: ``done``, ``stopped`` or ``failed``."""
        ...


class EnvironmentLink:
    """A launcher's environment variables, or no launcher at all: one round for the life of the process, and no news."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._environment = environment

    def formation(self) -> RoundPlace:
        """ConfigError if the variables contradict each other."""
        env = self._environment
        if env.rank >= env.world_size or env.local_rank >= env.local_world_size:
            raise ConfigError(
                f"environment: RANK {env.rank} of WORLD_SIZE {env.world_size}, LOCAL_RANK {env.local_rank} of"
                f" LOCAL_WORLD_SIZE {env.local_world_size} make no sense",
                hint="start the script with torchrun, or unset these variables",
            )
        return RoundPlace(
            round=env.round,
            rank=env.rank,
            world_size=env.world_size,
            local_rank=env.local_rank,
            local_world_size=env.local_world_size,
            store=self._store() if env.launched else None,
            reason=env.round_reason,
        )

    def _store(self) -> StoreAddress:
        env = self._environment
        if env.master_addr is None or env.master_port is None:
            raise ConfigError(
                "environment: RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not",
                hint="start the script with torchrun, or set all four",
            )
        return StoreAddress(env.master_addr, env.master_port, serve=not env.use_agent_store)

    def broken(self, round: int) -> str | None:
        return None

    def report_due(self) -> bool:
        return False

    def report(self, progress: RankProgress) -> None:
        return None

    def close(self, status: str) -> None:
        return None
