"""Process groups and device meshes whose identity outlives rounds, for sharded models.

FSDP2 and DTensor keep the groups of their mesh for the life of a model. So a mesh is made of groups whose object, name,
rank and size never change; each round points them at fresh real groups. A model is sharded over it before there is any
round, and without torch's default group.

*Runs in* the worker's main thread (on CUDA also in autograd's).
*Fails by* ConfigError for a mesh that does not fit, or a model used too early; RoundBrokenError when a peer is lost.
*Invariant*: a real group is used in its own round only.
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
from elastic_trainer.worker.comm.failures import collective
from elastic_trainer.worker.comm.waits import InterruptibleWaits

_NUMBERS = itertools.count()
_ALONE = timedelta(seconds=60)
# Python calls a group by these names, C++ (the functional collectives of DTensor) by those of _FUNCTIONAL.
_CALLS = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("allgather_coalesced", "reduce_scatter", "reduce_scatter_tensor_coalesced", "broadcast", "barrier", "scatter"),
    *("gather", "reduce", "alltoall", "alltoall_base", "send", "recv"),
)
_FUNCTIONAL = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


class _Awaited(dist.Work):
    """An operation whose wait ends with its round, and is done once: some of gloo's works act again at every wait."""

    def __init__(self, work: Any, works: InterruptibleWaits, land: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._work, self._works, self._land, self._done = work, works, land, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._done:
            with collective("a sharded model's collective"):
                self._works.wait(self._work)
            self._land()
            self._done = True
            self._works.ended(self._work)  # some never say that they are completed
        return True

    def is_completed(self) -> bool:
        return self._done or bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()


def real_group(store: Any, rank: int, size: int, timeout: timedelta, *, nccl: bool = False) -> Any:
    """A group for one round. As a ProcessGroup with backends: a bare ProcessGroupGloo lacks some calls."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout))
    group._set_default_backend(kind)
    if torch.cuda.is_available() and not nccl:
        group._register_backend(torch.device("cuda"), kind, group._get_backend(torch.device("cpu")))
    if nccl:
        backend = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, dist.ProcessGroupNCCL.Options())
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return group


class LastingGroup(dist.ProcessGroup):
    """See the module. Ranks are places in the group, not ranks of a round."""

    def __init__(self, name: str, rank: int, size: int, *, nccl: bool = False) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = c10d.GroupName(f"elastic/{next(_NUMBERS)}/{name}")
        self._real: Any = None
        self._works = InterruptibleWaits()
        if size == 1:  # needs no round
            self._real = real_group(HashStore(), 0, 1, _ALONE, nccl=nccl)
        self.register()

    def register(self) -> None:
        """Make it known to torch; again after each destroy_process_group(), which forgets all groups."""
        world = c10d._world
        with contextlib.suppress(RuntimeError):
            _unregister_process_group(self._name)
        _register_process_group(self._name, self)
        world.pg_map[self] = ("lasting", None)  # type: ignore[assignment]
        world.pg_names[self] = self._name
        world.pg_to_tag[self] = f"ptd:{self._name}"
        world.tags_to_pg[f"ptd:{self._name}"] = [self]
        world.pg_group_ranks[self] = {rank: rank for rank in range(self.size())}
        world.pg_backend_config[self] = "cpu:lasting"

    def unregister(self) -> None:
        """Before destroy_process_group(), which would try to end it."""
        world = c10d._world
        for table in (world.pg_map, world.pg_names, world.pg_to_tag, world.pg_group_ranks, world.pg_backend_config):
            table.pop(self, None)
        world.tags_to_pg.pop(f"ptd:{self._name}", None)

    def point_at(self, real: Any, works: InterruptibleWaits) -> None:
        """From now on operations are done by ``real``; None: there is no round."""
        if self.size() > 1:
            self._real, self._works = real, works

    def getBackendName(self) -> str:
        return "lasting"

    @property
    def group_name(self) -> c10d.GroupName:
        return self._name

    def _present(self) -> Any:
        if self._real is None:
            raise ConfigError(
                "a sharded model communicates before it is wrapped",
                hint="in parallelize_module() say src_data_rank=None, and compute after session.wrap() only",
            )
        return self._real

    def _call(self, name: str, *arguments: Any) -> _Awaited:
        with collective(name):
            return _Awaited(self._works.begun(getattr(self._present(), name)(*arguments)), self._works)

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, options: Any = None, *, spends: bool = False
    ) -> _Awaited:
        """As gloo does it (all-reduce a copy, take one's part): the wait for gloo's own cannot be interrupted.

        ``spends``: nobody needs the ``source`` afterwards, so it is not copied.
        """
        if not isinstance(self._present()._get_backend(output.device), dist.ProcessGroupGloo):
            return self._call("_reduce_scatter_base", output, source, *([] if options is None else [options]))
        whole, how = source if spends else source.clone(), dist.AllreduceOptions()
        if options is not None:
            how.reduceOp = options.reduceOp
        with collective("reduce_scatter"):
            work = self._works.begun(self._present().allreduce([whole], how))
        parts = whole.view(self.size(), -1)
        return _Awaited(work, self._works, lambda: output.copy_(parts[self.rank()].view_as(output)))

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]


def _forwarding(name: str) -> Callable[..., _Awaited]:
    return lambda self, *arguments: self._call(name, *arguments)


for _name in _CALLS:
    setattr(LastingGroup, _name, _forwarding(_name))
for _name, _real in _FUNCTIONAL.items():
    setattr(LastingGroup, _name, _forwarding(_real))


class LastingMesh(DeviceMesh):
    """A mesh whose numbers are places in the shard group.

    DeviceMesh looks itself up by torch's global rank, which is none before the first round and changes with each.
    """

    gate: threading.Event | None = None
    """Set while groups may be taken: in parallelizing(), and once there was a round."""

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

    @property
    def mesh(self) -> torch.Tensor:
        full = self._layout.remap_to_tensor(self._rank_map)
        return DeviceMesh._get_mesh_tensor_from_full_mesh(full, self._place)

    def _hash_key(self) -> tuple[Any, ...]:
        """DTensor's caches hand out what they made for an *equal* mesh: with its groups, and its place."""
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
    """How the ranks of a shard group are arranged, and which of its places this process has; for its life.

    The ranks of a node, or of several, are divided into shard groups of ``size`` consecutive ranks; ``number`` is that
    of this process among them. ``node_size`` is how many ranks a node has.
    """

    def __init__(self, device: str, shape: Sequence[int], names: Sequence[str], number: int, node_size: int) -> None:
        self.shape, self.names, self.node_size = tuple(shape), tuple(names), node_size
        self.size = math.prod(self.shape)
        self.place, self.spans_nodes = number % self.size, self.size > node_size
        numbers = torch.arange(self.size).reshape(self.shape)
        self.coordinate = tuple(int(each) for each in (numbers == self.place).nonzero()[0])
        nccl = device == "cuda"
        self.whole = LastingGroup("all", self.place, self.size, nccl=nccl)
        self.dims = [
            LastingGroup(name, mine, size, nccl=nccl)
            for name, mine, size in zip(self.names, self.coordinate, self.shape, strict=True)
        ]
        self.mesh = LastingMesh(device, numbers, mesh_dim_names=self.names, _rank=self.place)
        self.mesh._dim_group_names = [group.group_name for group in self.dims]
        self.mesh._pg_registry.update({group.group_name: group for group in self.dims})
        self.mesh.gate = self._gate = threading.Event()
        self._met = False

    def members(self, dim: int) -> tuple[int, ...]:
        """The places that differ from this one in ``dim`` only."""
        numbers = torch.arange(self.size).reshape(self.shape)
        index: list[Any] = list(self.coordinate)
        index[dim] = slice(None)
        return tuple(numbers[tuple(index)].tolist())

    @contextmanager
    def parallelizing(self) -> Iterator[None]:
        """The shard group stands in for torch's default group, which FSDP over tensor parallel asks for its rank."""
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
        """FSDP over tensor parallel joins parts of a mesh; the result must last like these."""
        joined = joins(parts)
        if isinstance(parts[0], LastingMesh):
            joined.__class__ = LastingMesh
            joined._place = self.place  # type: ignore[attr-defined]
        return joined

    def enter(self, whole: Any, dims: Sequence[Any], works: InterruptibleWaits) -> None:
        """A round begins, with these real groups."""
        self._met = True
        self._gate.set()
        for lasting, real in zip((self.whole, *self.dims), (whole, *dims), strict=True):
            lasting.register()
            lasting.point_at(real, works)

    def leave(self) -> None:
        """The round is over."""
        for lasting in (self.whole, *self.dims):
            lasting.point_at(None, InterruptibleWaits())
            lasting.unregister()


def checked_shape(
    shape: Sequence[int], names: Sequence[str] | None, node_size: int, nodes: int = 1, *, launched: bool
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The mesh's shape and names; -1 is what the other dimensions leave of the ``nodes`` that hold a model together.

    Pure; raises ConfigError. A process that no launcher started is alone: each dimension is 1 then.
    """
    wanted = tuple(shape)
    if names is None or len(names) != len(wanted) or len(set(names)) != len(wanted) or not wanted:
        raise ConfigError(
            f"a device mesh of shape {wanted} with the dimension names {names}",
            hint="name each dimension, say mesh_dim_names=('dp_shard', 'tp')",
        )
    if not launched:
        return (1,) * len(wanted), tuple(names)
    size = node_size * nodes
    if wanted.count(-1) == 1:
        others = -math.prod(wanted)
        wanted = tuple(size // others if each == -1 and others > 0 else each for each in wanted)
    if min(wanted) < 1 or size % math.prod(wanted):
        where = "this node" if nodes == 1 else f"{nodes} nodes (--rdzv-conf shard_nodes={nodes})"
        raise ConfigError(
            f"a device mesh of shape {tuple(shape)} does not divide the {size} processes of {where}",
            hint="a model is sharded within a node, or shard_nodes of them; its replicas are the session's own",
        )
    return wanted, tuple(names)
