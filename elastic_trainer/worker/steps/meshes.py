"""The device mesh of a session, which a script shards its model over.

*Runs in* the worker's main thread.
*Fails by* ConfigError for a mesh that does not fit the node, and for a second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.lasting import ShardLayout, checked_shape
from elastic_trainer.worker.state import rng
from elastic_trainer.worker.steps.workplace import Workplace


class Meshes:
    """See the module. ``layout`` None: there is no mesh."""

    def __init__(self) -> None:
        self.layout: ShardLayout | None = None

    def make(self, place: Workplace, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
        if self.layout is not None:
            raise ConfigError("a second device mesh", hint="make one mesh, and take parts of it: mesh['tp']")
        environment, device = place.environment, place.placement.device
        size, nodes = environment.local_world_size, environment.shard_nodes
        sizes, checked = checked_shape(shape, names, size, nodes, launched=environment.launched)
        taken = environment.shard_place
        node = environment.rank // size % nodes if taken is None else taken
        self.layout = ShardLayout(device.type, sizes, checked, node * size + environment.local_rank, size)
        if device.type == "cuda":  # DTensor draws random numbers; without this it would ask all ranks for a seed
            from torch.distributed.tensor._random import manual_seed

            manual_seed(place.options.seed, self.layout.mesh)
        return self.layout.mesh

    @contextmanager
    def parallelizing(self, place: Workplace) -> Iterator[None]:
        if self.layout is None:
            raise ConfigError("there is no device mesh yet", hint="call session.init_device_mesh(...) first")
        with self.layout.parallelizing():
            yield
        if place.placement.device.type == "cpu":  # where DTensor gives shards no random numbers of their own
            rng.seeder(place.placement.device)(rng.key(rng.START, place.options.seed, self.layout.place))
