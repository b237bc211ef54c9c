"""Process groups and device meshes whose identity outlives rounds, for sharded models.

FSDP2 and DTensor keep the groups of their mesh for the life of a model. So a mesh consists of groups whose object,
name, rank and size never change; each round points them at new real groups. A model is sharded over the mesh before the
first round, and without torch's default group.

*Runs in* the worker's main thread (on CUDA also in autograd's).
*Fails by* ConfigError for an invalid mesh, or a model used too early; RoundBrokenError when a peer is lost.
*Invariant*: a real group is used only in its own round.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from elastic_trainer.errors import ConfigError
from elastic_trainer.ipc import gloo
from elastic_trainer.worker.comm.failures import collective
from elastic_trainer.worker.comm.waits import InterruptibleWaits, ThreadedWork

_NUMBERS = itertools.count()
_ALONE = timedelta(seconds=60)
# Python calls a group by these names, C++ (the functional collectives of DTensor) by those of _FUNCTIONAL.
_CALLS = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("allgather_coalesced", "reduce_scatter", "reduce_scatter_tensor_coalesced", "broadcast", "barrier", "scatter"),
    *("gather", "reduce", "alltoall", "alltoall_base"),
)
_FUNCTIONAL = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


class _InterruptibleWork(dist.Work):
    """An operation whose wait ends with its round and runs once: some of gloo's works act again at each wait."""

    def __init__(self, work: Any, works: InterruptibleWaits, land: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._work, self._works, self._land, self._done = work, works, land, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._done:
            with collective("a sharded model's collective"):
                self._works.wait(self._work)
            self._land()
            self._done = True
            self._works.ended(self._work)  # some works never report completion
        return True

    def is_completed(self) -> bool:
        return self._done or bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()


class _Transfer(_InterruptibleWork):
    """A send or a receive. gloo closes the connection if a wait for one ends early, so a thread waits for it.

    ``limit``: the connection itself keeps the time limit that it was made with.
    """

    def __init__(self, work: Any, works: InterruptibleWaits, limit: timedelta) -> None:
        super().__init__(work, works)
        self._limit = limit

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._done:
            transfer, self._work = self._work, ThreadedWork(partial(self._work.wait, self._limit))
            self._works.begun(self._work)
            self._works.ended(transfer)
        return super().wait(timeout)


def real_group(store: Any, rank: int, size: int, timeout: timedelta, at: Sequence[str], *, nccl: bool = False) -> Any:
    """A group for one round: a ProcessGroup with backends, since a bare ProcessGroupGloo lacks some calls."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, gloo.group(store, rank, size, timeout, at))
    group._set_default_backend(kind)
    if torch.cuda.is_available() and not nccl:
        group._register_backend(torch.device("cuda"), kind, group._get_backend(torch.device("cpu")))
    if nccl:
        backend = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, dist.ProcessGroupNCCL.Options())
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return group


class LastingGroup(dist.ProcessGroup):
    """See the module. ``ranks`` are its members' places in the shard group; torch takes them for global ranks."""

    def __init__(self, name: str, rank: int, ranks: Sequence[int], *, nccl: bool = False) -> None:
        size, self._ranks = len(ranks), ranks
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = c10d.GroupName(f"elastic/{next(_NUMBERS)}/{name}")
        self._real: Any = None
        self._works, self._limit = InterruptibleWaits(), _ALONE
        if size == 1:  # a group of one needs no round
            self._real = real_group(HashStore(), 0, 1, _ALONE, gloo.ONE_HOST, nccl=nccl)
        self.register()

    def register(self) -> None:
        """Register the group with torch; again after each destroy_process_group(), which forgets all groups."""
        world = c10d._world
        with contextlib.suppress(RuntimeError):
            _unregister_process_group(self._name)
        _register_process_group(self._name, self)
        world.pg_map[self] = ("lasting", None)  # type: ignore[assignment]
        world.pg_names[self] = self._name
        world.pg_to_tag[self] = f"ptd:{self._name}"
        world.tags_to_pg[f"ptd:{self._name}"] = [self]
        world.pg_group_ranks[self] = {place: rank for rank, place in enumerate(self._ranks)}
        world.pg_backend_config[self] = "cpu:lasting"

    def unregister(self) -> None:
        """Call before destroy_process_group(), which would try to destroy this group."""
        world = c10d._world
        for table in (world.pg_map, world.pg_names, world.pg_to_tag, world.pg_group_ranks, world.pg_backend_config):
            table.pop(self, None)
        world.tags_to_pg.pop(f"ptd:{self._name}", None)

    def point_at(self, real: Any, works: InterruptibleWaits, limit: timedelta = _ALONE) -> None:
        """From now on ``real`` performs the operations (None: there is no round); ``limit`` is for each transfer."""
        if self.size() > 1:
            self._real, self._works, self._limit = real, works, limit

    def getBackendName(self) -> str:
        return "lasting"

    @property
    def group_name(self) -> c10d.GroupName:
        return self._name

    def _present(self) -> Any:
        if self._real is None:
            raise ConfigError(
                "a sharded model communicates before it is wrapped",
                hint="pass src_data_rank=None to parallelize_module(), and compute only after session.wrap()",
            )
        return self._real

    def _call(self, name: str, *arguments: Any) -> _InterruptibleWork:
        with collective(name):
            return _InterruptibleWork(self._works.begun(getattr(self._present(), name)(*arguments)), self._works)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _InterruptibleWork:
        return self._transfer("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _InterruptibleWork:
        return self._transfer("recv", tensors, peer, tag)

    def _transfer(self, name: str, tensors: list[torch.Tensor], peer: int, tag: int) -> _InterruptibleWork:
        if not isinstance(self._present()._get_backend(tensors[0].device), dist.ProcessGroupGloo):
            return self._call(name, tensors, peer, tag)
        with collective(name):
            return _Transfer(
                self._works.begun(getattr(self._present(), name)(tensors, peer, tag)), self._works, self._limit
            )

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, options: Any = None, *, spends: bool = False
    ) -> _InterruptibleWork:
        """As gloo does it (all-reduce a copy, keep one part): the wait for gloo's own cannot be interrupted.

        ``spends``: the ``source`` is not needed afterwards, so it is not copied.
        """
        if not isinstance(self._present()._get_backend(output.device), dist.ProcessGroupGloo):
            return self._call("_reduce_scatter_base", output, source, *([] if options is None else [options]))
        whole, how = source if spends else source.clone(), dist.AllreduceOptions()
        if options is not None:
            how.reduceOp = options.reduceOp
        with collective("reduce_scatter"):
            work = self._works.begun(self._present().allreduce([whole], how))
        parts = whole.view(self.size(), -1)
        return _InterruptibleWork(work, self._works, lambda: output.copy_(parts[self.rank()].view_as(output)))

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]


def _forwarding(name: str) -> Callable[..., _InterruptibleWork]:
    return lambda self, *arguments: self._call(name, *arguments)


for _name in _CALLS:
    setattr(LastingGroup, _name, _forwarding(_name))
for _name, _real in _FUNCTIONAL.items():
    setattr(LastingGroup, _name, _forwarding(_real))


class LastingMesh(DeviceMesh):
    """A mesh whose ranks are places in the shard group.

    DeviceMesh looks itself up by torch's global rank, which is undefined before the first round and changes with each.
    """

    gate: threading.Event | None = None
    """Set while get_group() is allowed: in parallelizing(), and after the first round has begun."""

    def __init__(self, *arguments: Any, _rank: int, **named: Any) -> None:
        self._place = _rank
        super().__init__(*arguments, _rank=_rank, _init_backend=False, **named)

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        gate = self._get_root_mesh().gate  # type: ignore[attr-defined]
        if gate is not None and not gate.is_set():
            raise ConfigError(
                "a model is sharded outside of session.parallelizing()",
                hint="call fully_shard() and parallelize_module() inside `with session.parallelizing():`",
            )
        return super().get_group(mesh_dim)

    def get_rank(self) -> int:
        return self._place

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Known before any round, and the same in each."""
        return self.get_group(mesh_dim).rank()

    @property
    def mesh(self) -> torch.Tensor:
        full = self._layout.remap_to_tensor(self._rank_map)
        return DeviceMesh._get_mesh_tensor_from_full_mesh(full, self._place)

    def _hash_key(self) -> tuple[Any, ...]:
        """DTensor's caches return objects made for an *equal* mesh, with that mesh's groups and place."""
        return (*super()._hash_key(), self._place, tuple(getattr(self, "_dim_group_names", ())))

    def __hash__(self) -> int:
        return hash(self._hash_key())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LastingMesh) and self._hash_key() == other._hash_key())

    def _create_sub_mesh(self, layout: Any, submesh_dim_names: tuple[str, ...]) -> DeviceMesh:
        root = self._get_root_mesh()
        part = LastingMesh(
            self._device_type,
            _layout=layout,
            _rank_map=root._rank_map,
            mesh_dim_names=submesh_dim_names,
            _root_mesh=root,
            _rank=self._place,
        )
        names = self._mesh_dim_names or ()
        part._dim_group_names = [self._dim_group_names[names.index(name)] for name in submesh_dim_names]
        return part


class ShardLayout:
    """The arrangement of the ranks of a shard group, and this process's place in it, fixed for its life.

    The ranks of a node, or of several, are divided into shard groups of ``size`` consecutive ranks; ``number`` is the
    index of this process among them. ``node_size`` is the number of ranks of a node.
    """

    def __init__(self, device: str, shape: Sequence[int], names: Sequence[str], number: int, node_size: int) -> None:
        self.shape, self.names, self.node_size = tuple(shape), tuple(names), node_size
        self.size = math.prod(self.shape)
        self.place, self.spans_nodes = number % self.size, self.size > node_size
        numbers = torch.arange(self.size).reshape(self.shape)
        self.coordinate = tuple(int(each) for each in (numbers == self.place).nonzero()[0])
        nccl = device == "cuda"
        self.whole = LastingGroup("all", self.place, range(self.size), nccl=nccl)
        self.dims = [
            LastingGroup(name, self.coordinate[dim], self.members(dim), nccl=nccl)
            for dim, name in enumerate(self.names)
        ]
        self.mesh = LastingMesh(device, numbers, mesh_dim_names=self.names, _rank=self.place)
        self.mesh._dim_group_names = [group.group_name for group in self.dims]
        self.mesh._pg_registry.update({group.group_name: group for group in self.dims})
        self.mesh.gate = self._gate = threading.Event()
        self._met = False
        self.stages: int | None = None
        """The dimension along which places hold different stages of the model, if any."""

    def members(self, dim: int) -> tuple[int, ...]:
        """The places that differ from this one only in ``dim``."""
        numbers = torch.arange(self.size).reshape(self.shape)
        index: list[Any] = list(self.coordinate)
        index[dim] = slice(None)
        return tuple(numbers[tuple(index)].tolist())

    @contextmanager
    def parallelizing(self) -> Iterator[None]:
        """The shard group replaces torch's default group, whose rank FSDP over tensor parallel uses."""
        self._gate.set()
        before, joins = c10d.GroupMember.WORLD, DeviceMesh._concatenate
        c10d._update_default_pg(self.whole)
        DeviceMesh._concatenate = staticmethod(partial(self._joined, joins))  # type: ignore[method-assign]
        try:
            yield
        finally:
            c10d._update_default_pg(before)
            DeviceMesh._concatenate = joins  # type: ignore[method-assign]
            if not self._met:
                self._gate.clear()

    def _joined(self, joins: Callable[[list[DeviceMesh]], DeviceMesh], parts: list[DeviceMesh]) -> DeviceMesh:
        """FSDP over tensor parallel joins parts of a mesh; the result must outlive rounds like its parts."""
        joined = joins(parts)
        if isinstance(parts[0], LastingMesh):
            joined.__class__ = LastingMesh
            joined._place = self.place  # type: ignore[attr-defined]
        return joined

    def enter(self, whole: Any, dims: Sequence[Any], works: InterruptibleWaits, limit: timedelta = _ALONE) -> None:
        """A round begins with these real groups; ``limit`` is for each send and receive."""
        self._met = True
        self._gate.set()
        for lasting, real in zip((self.whole, *self.dims), (whole, *dims), strict=True):
            lasting.register()
            lasting.point_at(real, works, limit)

    def leave(self) -> None:
        """The round is over."""
        for lasting in (self.whole, *self.dims):
            lasting.point_at(None, InterruptibleWaits())
            lasting.unregister()


def checked_shape(
    shape: Sequence[int],
    names: Sequence[str] | None,
    node_size: int,
    nodes: int = 1,
    *,
    launched: bool,
    whole_job: bool = False,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The mesh's shape and names; -1 is the rest that the other dimensions leave of the ``nodes`` that share a model.

    Pure; raises ConfigError. In a process that no launcher started each dimension is 1. ``whole_job``: those
    ``nodes`` are all there are, and the mesh covers them.
    """
    wanted = tuple(shape)
    if names is None or len(names) != len(wanted) or len(set(names)) != len(wanted) or not wanted:
        raise ConfigError(
            f"a device mesh of shape {wanted} with the dimension names {names}",
            hint="name each dimension, for example mesh_dim_names=('dp_shard', 'tp')",
        )
    if not launched:
        return (1,) * len(wanted), tuple(names)
    size = node_size * nodes
    if wanted.count(-1) == 1:
        others = -math.prod(wanted)
        wanted = tuple(size // others if each == -1 and others > 0 else each for each in wanted)
    if whole_job and (min(wanted) < 1 or size != math.prod(wanted)):
        raise ConfigError(
            f"a device mesh of shape {tuple(shape)} does not cover the {size} processes of the whole job",
            hint="give one dimension as -1: the number of processes changes with that of the nodes",
        )
    if min(wanted) < 1 or size % math.prod(wanted):
        where = "this node" if nodes == 1 else f"{nodes} nodes (--rdzv-conf shard_nodes={nodes})"
        raise ConfigError(
            f"a device mesh of shape {tuple(shape)} does not divide the {size} processes of {where}",
            hint="a model is sharded within a node, or within shard_nodes nodes; the session makes its replicas",
        )
    return wanted, tuple(names)
