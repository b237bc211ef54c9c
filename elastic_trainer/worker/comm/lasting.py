"""Process groups and device meshes whose identity outlives rounds, for sharded models.

FSDP2 and DTensor keep the groups of their mesh for the life of a model. So a mesh consists of groups whose object,
name, rank and size never change; each round points them at new real groups. A model is sharded over the mesh before the
first round, and without torch's default group.

*Runs in* the worker's main thread (on CUDA also in autograd's).
*Fails by* ConfigError for an invalid mesh, or a model used too early; RoundBrokenError when a peer is lost.
*Invariant*: a real group is used only in its own round.
"""

from __future__ import annotations

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

from elastic_trainer import torch_internals
from elastic_trainer.errors import ConfigError
from elastic_trainer.ipc import gloo
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.torch_internals import HashStore, PrefixStore
from elastic_trainer.worker.comm.control import InterruptibleWaits, ThreadedWork, collective

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
            self._works.forget(self._work)  # some works never report completion
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
            self._works.forget(transfer)
        return super().wait(timeout)


def real_group(store: Any, rank: int, size: int, timeout: timedelta, at: Sequence[str], *, nccl: bool = False) -> Any:
    """A group for one round: a ProcessGroup with backends, since a bare ProcessGroupGloo lacks some calls."""
    host, device = torch.device("cpu"), torch.device("cuda")
    backends = {host: gloo.group(store, rank, size, timeout, at)}
    if nccl:
        index = torch.device("cuda", torch.cuda.current_device())
        backends[device] = torch_internals.nccl(PrefixStore("nccl", store), rank, size, index)
    elif torch.cuda.is_available():
        backends[device] = backends[host]
    return torch_internals.group_of(store, rank, size, backends)


class LastingGroup(dist.ProcessGroup):
    """See the module. ``ranks`` are its members' ranks in the shard group; torch takes them for global ranks."""

    def __init__(self, name: str, rank: int, ranks: Sequence[int], *, nccl: bool = False) -> None:
        size, self._ranks = len(ranks), ranks
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = f"elastic/{next(_NUMBERS)}/{name}"
        self._real: Any = None
        self._works, self._limit, self._coalesces = InterruptibleWaits(), _ALONE, False
        if size == 1:  # a group of one needs no round
            self._real = real_group(HashStore(), 0, 1, _ALONE, gloo.ONE_HOST, nccl=nccl)
        self.register()

    def register(self) -> None:
        """Register the group with torch; again after each destroy_process_group(), which forgets all groups."""
        torch_internals.register(self, self._name, self._ranks, "lasting")

    def unregister(self) -> None:
        """Call before destroy_process_group(), which would try to destroy this group."""
        torch_internals.unregister(self, self._name)

    def point_at(self, real: Any, works: InterruptibleWaits, limit: timedelta = _ALONE) -> None:
        """From now on ``real`` performs the operations (None: there is no round); ``limit`` is for each transfer."""
        if self.size() > 1:
            self._real, self._works, self._limit, self._coalesces = real, works, limit, False

    def getBackendName(self) -> str:
        return "lasting"

    def _get_backend(self, device: torch.device) -> Any:
        """torch asks it how to send several tensors at once (from 2.14 on)."""
        return torch_internals.backend_of(self._present(), device)

    @property
    def group_name(self) -> Any:
        return self._name

    def _present(self) -> Any:
        if self._real is None:
            raise ConfigError(
                "a sharded model communicates before it is wrapped",
                hint="pass src_data_rank=None to parallelize_module(), and compute only after session.wrap()",
            )
        return self._real

    def _start_coalescing(self, device: torch.device) -> None:
        """What follows until ``_end_coalescing`` is one operation; the work of that is waited for."""
        self._present()._start_coalescing(device)
        self._coalesces = True

    def _end_coalescing(self, device: torch.device) -> _InterruptibleWork:
        self._coalesces = False
        work: _InterruptibleWork = self._call("_end_coalescing", device)
        return work

    def _call(self, name: str, *arguments: Any) -> Any:
        with collective(name):
            if self._coalesces:
                return getattr(self._present(), name)(*arguments)
            return _InterruptibleWork(self._works.begun(getattr(self._present(), name)(*arguments)), self._works)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._transfer("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._transfer("recv", tensors, peer, tag)

    def _transfer(self, name: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if not torch_internals.is_gloo(self._present(), tensors[0].device):
            return self._call(name, tensors, peer, tag)
        with collective(name):
            return _Transfer(
                self._works.begun(getattr(self._present(), name)(tensors, peer, tag)), self._works, self._limit
            )

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, options: Any = None, *, spends: bool = False
    ) -> Any:
        """As gloo does it (all-reduce a copy, keep one part): the wait for gloo's own cannot be interrupted.

        ``spends``: the ``source`` is not needed afterwards, so it is not copied.
        """
        if not torch_internals.is_gloo(self._present(), output.device):
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


class LastingMesh(torch_internals.PlacedMesh):
    """A mesh of lasting groups."""

    gate: threading.Event | None = None
    """Set while get_group() is allowed: in parallelizing(), and after the first round has begun."""
    flatten: Callable[[str, tuple[str, ...]], LastingGroup]
    """Of the root mesh: :meth:`ShardLayout.flatten`."""

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        gate = self.root.gate
        if gate is not None and not gate.is_set():
            raise ConfigError(
                "a model is sharded outside of session.parallelizing()",
                hint="call fully_shard() and parallelize_module() inside `with session.parallelizing():`",
            )
        return super().get_group(mesh_dim)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Known before any round, and the same in each."""
        return self.get_group(mesh_dim).rank()

    def group_of_all(self, name: str, names: tuple[str, ...]) -> LastingGroup:
        return self.flatten(name, names)


class ShardLayout:
    """The arrangement of the ranks of a shard group, and this process's rank in it, fixed for its life.

    The ranks of a node, or of several, are divided into shard groups of ``size`` consecutive ranks; ``number`` is the
    index of this process among them. ``node_size`` is the number of ranks of a node.
    """

    def __init__(self, device: str, shape: Sequence[int], names: Sequence[str], number: int, node_size: int) -> None:
        self.shape, self.names, self.node_size = tuple(shape), tuple(names), node_size
        self.size = math.prod(self.shape)
        self.shard_rank, self.spans_nodes = number % self.size, self.size > node_size
        numbers = torch.arange(self.size).reshape(self.shape)
        self.coordinate = tuple(int(each) for each in (numbers == self.shard_rank).nonzero()[0])
        self._nccl = device == "cuda"
        self.axes: dict[str, tuple[int, ...]] = {name: (dim,) for dim, name in enumerate(self.names)}
        """Which dimensions of the mesh each name stands for: one, or several that were flattened into it."""
        self.whole = LastingGroup("all", self.shard_rank, range(self.size), nccl=self._nccl)
        self.groups = {name: self._group(name) for name in self.names}
        """Those of all these names; the first are those of the dimensions."""
        self.mesh = LastingMesh(device, numbers, mesh_dim_names=self.names, _rank=self.shard_rank)
        self.mesh.use({group.group_name: group for group in self.dims})
        self.mesh.flatten = self.flatten
        self.mesh.gate = self._gate = threading.Event()
        self._met = False
        self.stages: int | None = None
        """The dimension along which ranks hold different stages of the model, if any."""

    @property
    def dims(self) -> list[LastingGroup]:
        """The groups of the mesh's dimensions."""
        return [self.groups[name] for name in self.names]

    def members(self, name: str) -> tuple[int, ...]:
        """The shard ranks that differ from this one only in what ``name`` stands for."""
        numbers = torch.arange(self.size).reshape(self.shape)
        index = tuple(slice(None) if dim in self.axes[name] else at for dim, at in enumerate(self.coordinate))
        return tuple(numbers[index].flatten().tolist())

    def _group(self, name: str) -> LastingGroup:
        members = self.members(name)
        return LastingGroup(name, members.index(self.shard_rank), members, nccl=self._nccl)

    def flatten(self, name: str, names: Sequence[str]) -> LastingGroup:
        """A group for ``name``, which from now on stands for the dimensions of ``names`` together."""
        if self._met:
            raise ConfigError(
                "a device mesh is flattened after session.wrap(), which forms its groups",
                hint="flatten it before, where the model is sharded",
            )
        self.axes[name] = tuple(dim for each in names for dim in self.axes[each])
        self.groups[name] = self._group(name)
        return self.groups[name]

    @contextmanager
    def parallelizing(self) -> Iterator[None]:
        """The shard group replaces torch's default group, whose rank FSDP over tensor parallel uses."""
        self._gate.set()
        try:
            with torch_internals.default_group(self.whole), LastingMesh.joined(self.shard_rank):
                yield
        finally:
            if not self._met:
                self._gate.clear()

    def enter(self, whole: Any, parts: Sequence[Any], works: InterruptibleWaits, limit: timedelta = _ALONE) -> None:
        """A round begins with these real groups, ``parts`` in the order of :attr:`groups`.

        ``limit`` is for each send and receive.
        """
        self._met = True
        self._gate.set()
        for lasting, real in zip((self.whole, *self.groups.values()), (whole, *parts), strict=True):
            lasting.register()
            lasting.point_at(real, works, limit)

    def leave(self) -> None:
        """The round is over."""
        for lasting in (self.whole, *self.groups.values()):
            lasting.point_at(None, InterruptibleWaits())
            lasting.unregister()


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
