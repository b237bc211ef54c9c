"""A process's place in a round: its rank, and the store at which the ranks rendezvous."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from elastic_trainer.errors import ConfigError
from elastic_trainer.ipc import gloo
from elastic_trainer.ipc.own_address import is_loopback
from elastic_trainer.settings import WorkerEnvironment, validated

ENVIRONMENT = "env://"


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
    address: str = ""
    """The address that this node's agent announces; empty without an agent."""

    def gloo_addresses(self) -> tuple[str, ...]:
        """This host's addresses for gloo in this round."""
        if self.store is None or self.local_world_size == self.world_size:
            return gloo.ONE_HOST
        return gloo.addresses(self.address, self.store.host, self.store.port)

    def misleads(self) -> str:
        """The loopback interfaces to which the user bound gloo here although ranks may be on other hosts; or empty."""
        return gloo.misleading() if self.gloo_addresses() is not gloo.ONE_HOST else ""


def self_started(
    environment: WorkerEnvironment, init_method: str | None, rank: int | None, world_size: int | None
) -> WorkerEnvironment:
    """``environment``, completed by what a script without a launcher says, as torch's ``init_process_group`` takes it.

    Ranks that meet at a loopback address are all on this machine; elsewhere LOCAL_RANK and LOCAL_WORLD_SIZE say which
    are. ConfigError for what is missing, wrong, or contradicts a launcher.
    """
    said = {name: value for name, value in (("rank", rank), ("world_size", world_size)) if value is not None}
    if init_method is None and not said:
        return environment
    method = init_method or ENVIRONMENT
    if "run_id" in environment.model_fields_set or environment.channel is not None:
        if method == ENVIRONMENT and not said:
            return environment
        raise ConfigError(
            "the session was given init_method, rank or world_size, but torchrun has started this process and decides"
            " them",
            hint="omit them, or start the processes without torchrun",
        )
    place: dict[str, Any] = {**environment.model_dump(exclude_unset=True), **said, "launched": True}
    if method != ENVIRONMENT:
        place["master_addr"], place["master_port"] = _address(method)
    missing = [name for name in ("rank", "world_size") if name not in (place if method == ENVIRONMENT else said)]
    if missing:
        raise ConfigError(
            f"init_method is {method!r}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            hint="give rank and world_size" + (", or set RANK and WORLD_SIZE" if method == ENVIRONMENT else ""),
        )
    if is_loopback(place.get("master_addr") or "") and not {"local_rank", "local_world_size"} & place.keys():
        place["local_rank"], place["local_world_size"] = place["rank"], place["world_size"]
    completed = validated(WorkerEnvironment, place, "Session")
    if completed.rank >= completed.world_size:
        raise ConfigError(
            f"rank is {completed.rank}, and world_size is {completed.world_size}",
            hint="ranks count from 0 to world_size - 1",
        )
    return completed


def _address(method: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``."""
    try:
        parts = urlsplit(method)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port beyond 65535, half an IPv6 address
        parts, host, port = urlsplit(""), None, None
    if parts.scheme != "tcp" or not host or not port or parts.path or parts.query:
        raise ConfigError(f"init_method is {method!r}", hint="use 'tcp://HOST:PORT' of rank 0's machine, or 'env://'")
    return host, port


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
        address=environment.address,
    )


def _store_in(environment: WorkerEnvironment) -> StoreAddress:
    if environment.master_addr is None or environment.master_port is None:
        raise ConfigError(
            "environment: RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not",
            hint="start the script with torchrun, set all four, or give the session an init_method",
        )
    return StoreAddress(environment.master_addr, environment.master_port, serve=not environment.use_agent_store)
