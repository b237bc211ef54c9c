"""The process groups of one round that a sharded model needs, in addition to those of all ranks.

Consecutive ranks form a shard group and together hold one whole state; ranks of one place in different shard groups
hold the same shard.

*Runs in* the worker's main thread.
*Fails by* ConfigError on ranks whose node or mesh differs from rank 0's, RoundBrokenError when a peer is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import xxhash

from elastic_trainer import torch_internals
from elastic_trainer.errors import ConfigError
from elastic_trainer.torch_internals import PrefixStore
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.lasting import ShardLayout, real_group
from elastic_trainer.worker.comm.waits import InterruptibleWaits, ThreadedWork


@dataclass(frozen=True, slots=True)
class FormTimeouts:
    """Limits for forming the groups, and for later operations on them."""

    forming_s: float
    working_s: float


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """The groups of this rank: of its shard group ``number`` of ``count``, and of its place in all shard groups."""

    number: int
    count: int
    whole: Any
    dims: tuple[Any, ...]
    peers: Control
    """The ranks of the shard group."""
    copies: Control
    """The ranks of this place, by shard group."""
    replicas: Any
    """The process group of these ranks, for gradients; None if there is only one shard group."""
    works: InterruptibleWaits
    on_stream: bool = False
    """Whether gradients are summed by NCCL: a wait then only orders the device's stream, and blocks nobody."""
    names: tuple[str, ...] = ()
    """The store keys under which this rank's gloo published its addresses."""


def form_shard_groups(
    layout: ShardLayout, store: Any, control: Control, patience: FormTimeouts, at: Sequence[str], *, nccl: bool
) -> ShardGroups:
    """Form the groups of all ranks of ``control`` through ``store``, in the same order on each.

    ``at``: this host's addresses for gloo.
    """
    _check_alike(layout, control)
    forming, working = timedelta(seconds=patience.forming_s), timedelta(seconds=patience.working_s)
    size, place, works = layout.size, layout.place, control.works
    number, count = control.rank // size, control.world_size // size
    published: list[str] = []

    def made(name: str, rank: int, members: int) -> Any:
        if members == 1:
            return None
        group = real_group(PrefixStore(name, store), rank, members, forming, at, nccl=nccl)
        torch_internals.limit_gloo(group, working)
        published.append(f"{name}/0/{rank}")
        if nccl:
            works.abort_with(torch_internals.backend_of(group, torch.device("cuda")).abort)
        return group

    def make() -> tuple[Any, list[Any], Any]:
        whole = made(f"shards/{number}", place, size)
        dims = [  # never the whole group: its own sums detect ranks that call the model unequally often
            made(f"{name}/{number}/{layout.members(dim)[0]}", layout.coordinate[dim], layout.shape[dim])
            for dim, name in enumerate(layout.names)
        ]
        return whole, dims, made(f"copies/{place}", number, count)

    threaded = ThreadedWork(make, brief=True)
    works.wait(works.begun(threaded))
    whole, dims, replicas = threaded.result
    peers = Control(whole, place, size, works, working)
    copies = Control(replicas, number, count, works, working)
    data = InterruptibleWaits() if nccl else works
    return ShardGroups(number, count, whole, tuple(dims), peers, copies, replicas, data, nccl, tuple(published))


def _check_alike(layout: ShardLayout, control: Control) -> None:
    """Raise on ranks that differ from rank 0, and only on those: the others continue without them."""
    described = repr((layout.shape, layout.names))
    mine = [layout.node_size, xxhash.xxh3_64_intdigest(described.encode()) >> 1]
    rows = control.gather(mine)
    if mine[0] != rows[0][0]:
        raise ConfigError(
            f"this node has {mine[0]} processes and the node of rank 0 has {rows[0][0]}, and a sharded model needs"
            " equally many on each node",
            hint="start all nodes with the same --nproc-per-node",
        )
    if mine != rows[0]:
        raise ConfigError(
            f"the device mesh {described} of this rank is not that of rank 0", hint="create the same mesh on all nodes"
        )
    if control.rank % layout.size != layout.place and all(row == mine for row in rows):
        raise ConfigError(
            f"rank {control.rank} holds the shards of place {layout.place}, but is needed at another place",
            hint="start all nodes with the same --rdzv-conf shard_nodes",
        )
