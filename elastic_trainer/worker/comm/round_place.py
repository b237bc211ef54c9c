"""A process's place in a round: its rank, and the store at which the ranks rendezvous."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import WorkerEnvironment


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The store at which the ranks of a round rendezvous.

    ``serve``: rank 0 hosts the store. ``prefix`` is used by no other round; without it the ranks agree on one.
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
    """Why this round was formed, for people."""

    @property
    def one_host(self) -> bool:
        loopback = self.store is not None and self.store.host in ("localhost", "127.0.0.1", "::1")
        return self.local_world_size == self.world_size or loopback


def place_in(environment: WorkerEnvironment) -> RoundPlace:
    """The place given by the launcher's environment variables. ConfigError if they contradict each other."""
    if environment.rank >= environment.world_size or environment.local_rank >= environment.local_world_size:
        raise ConfigError(
            f"environment: RANK {environment.rank} of WORLD_SIZE {environment.world_size}, LOCAL_RANK"
            f" {environment.local_rank} of LOCAL_WORLD_SIZE {environment.local_world_size} are invalid",
            hint="start the script with torchrun, or unset these variables",
        )
    return RoundPlace(
        round=environment.round,
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        store=_store_in(environment) if environment.launched else None,
        reason=environment.round_reason,
    )


def _store_in(environment: WorkerEnvironment) -> StoreAddress:
    if environment.master_addr is None or environment.master_port is None:
        raise ConfigError(
            "environment: RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not",
            hint="start the script with torchrun, or set all four",
        )
    return StoreAddress(environment.master_addr, environment.master_port, serve=not environment.use_agent_store)
