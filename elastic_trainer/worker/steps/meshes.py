"""The device mesh of a session, which a script shards its model over.

*Runs in* the worker's main thread.
*Fails by* ConfigError for a mesh that does not fit the node or the job, and for a second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh

from elastic_trainer import torch_internals
from elastic_trainer.data import seeds
from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.comm.lasting import ShardLayout, checked_shape
from elastic_trainer.worker.steps.engine import WorkerContext


class Meshes:
    """See the module. ``layout`` None: there is no mesh."""

    def __init__(self) -> None:
        self.layout: ShardLayout | None = None

    def make(
        self, context: WorkerContext, shape: Sequence[int], names: Sequence[str], *, whole_job: bool
    ) -> DeviceMesh:
        if self.layout is not None:
            raise ConfigError("a second device mesh", hint="make one mesh, and take parts of it: mesh['tp']")
        torch_internals.require(torch_internals.SHARDED)
        environment, device = context.environment, context.placement.device
        size = environment.local_world_size
        nodes = nodes_of_job(environment) if whole_job else environment.shard_nodes
        sizes, checked = checked_shape(shape, names, size, nodes, launched=environment.launched, whole_job=whole_job)
        taken = environment.shard_place
        node = environment.rank // size % nodes if taken is None else taken
        self.layout = ShardLayout(device.type, sizes, checked, node * size + environment.local_rank, size)
        if device.type == "cuda":
            torch_internals.seed_shards(context.options.seed, self.layout.mesh)
        return self.layout.mesh

    @contextmanager
    def parallelizing(self, context: WorkerContext) -> Iterator[None]:
        if self.layout is None:
            raise ConfigError("there is no device mesh yet", hint="call session.init_device_mesh(...) first")
        with self.layout.parallelizing():
            yield
        if context.placement.device.type == "cpu":  # where DTensor gives shards no random numbers of their own
            seeds.seeder(context.placement.device)(seeds.key(seeds.START, context.options.seed, self.layout.place))


def nodes_of_job(environment: WorkerEnvironment) -> int:
    """How many nodes a mesh over the whole job covers. Pure; raises ConfigError where there can be no such mesh."""
    if environment.in_place:
        raise ConfigError(
            "a device mesh over the whole job with recovery=in_place: a lost node takes shards with it that nobody else"
            " has",
            hint="leave out recovery=in_place, or leave out whole_job and shard within groups of nodes (shard_nodes)",
        )
    if environment.shard_nodes > 1:
        raise ConfigError(
            f"a device mesh over the whole job, and shard_nodes={environment.shard_nodes}",
            hint="leave shard_nodes out: all nodes hold the model together",
        )
    world, size = environment.world_size, environment.local_world_size
    if world % size:
        raise ConfigError(
            f"a device mesh over the whole job, whose {world} processes are not {size} on each node as on this one",
            hint="start all nodes with one --nproc-per-node",
        )
    return world // size
