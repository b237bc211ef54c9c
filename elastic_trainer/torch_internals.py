"""The one door to torch's private parts, which may change with each release.

Nothing else in this package names one. :data:`PARTS` lists them by capability, each with what is done where this torch
lacks one; :func:`lacking` says it in a sentence at start. Sharded models and pipeline stages are refused then; all else
goes on without.

*Runs in* any process that has imported torch. *Owns* the methods of torch that it replaces.
*Fails by* ConfigError for a capability that this torch does not have (:func:`require`).
"""

from __future__ import annotations

import functools
import getpass
import importlib
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from typing import Any, Final, Self, cast

import torch
import torch.distributed as dist

# Documented in torch.distributed, whose type annotations hide them.
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map as tree_map

from elastic_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TorchPart:
    """What one capability needs of torch."""

    capability: str
    without: str
    """What follows if this torch lacks a name."""
    names: tuple[str, ...]
    """Each ``module:attribute.attribute``, with the parameters of a method that is replaced."""
    since: str = ""
    """The first torch that has all of them, if a supported one does not."""

    def lacks(self) -> str:
        """The first of the names that this torch does not have in this form; empty if it has all."""
        return next((name.partition(":")[2] for name in self.names if not _has(name)), "")


_START = "torch.distributed.elastic.multiprocessing.subprocess_handler:SubprocessHandler._popen(self, args, env)"
WARM_STARTS = TorchPart("warm starts", "are off: each worker imports its modules anew", (_START,))
ORPHANS = TorchPart(
    "the end of orphans", "is off: workers without a Session may outlive an agent that is killed", (_START,)
)
GLOO_ADDRESSES = TorchPart(
    "an address for each gloo group",
    "is off: gloo uses that of this host's name, or GLOO_SOCKET_IFNAME",
    tuple(f"torch.distributed:ProcessGroupGloo.{name}" for name in ("_Options", "create_device")),
)
GROUPS = TorchPart(
    "numbers of process groups",
    "are torch's: ranks may not find each other after a round that failed to form",
    ("torch.distributed.distributed_c10d:_world.group_count",),
)
DATA_WORKERS = TorchPart(
    "data workers",
    "are off: samples are read in the training process",
    (
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._shutdown_workers",
        *(f"torch._C:{name}" for name in ("_set_worker_pids", "_remove_worker_pids")),
    ),
)
SHARDED = TorchPart(
    "sharded models",
    "are refused",
    (
        *(f"torch.distributed.device_mesh:DeviceMesh.{name}" for name in (
            "_hash_key", "_create_sub_mesh(self, layout, submesh_dim_names)", "_concatenate", "_get_root_mesh",
            "_get_mesh_tensor_from_full_mesh",
        )),
        *(f"torch.distributed.fsdp:FSDPModule.{name}" for name in ("_get_fsdp_state", "reset_iter_state")),
        "torch.distributed.fsdp._fully_shard._fsdp_api:AllGather",
        "torch.distributed.fsdp._fully_shard._fsdp_api:ReduceScatter",
        "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultAllocMixin",
        *(f"torch.distributed:ProcessGroup.{name}" for name in (
            "_get_backend", "_register_backend", "_set_default_backend",
        )),
        *(f"torch._C._distributed_c10d:{name}" for name in ("_register_process_group", "_unregister_process_group")),
        "torch.distributed.distributed_c10d:_update_default_pg",
    ),
    since="2.13",
)  # fmt: skip
FLATTENED = TorchPart(
    "flattened device meshes",
    "are refused",
    (
        "torch.distributed.device_mesh:DeviceMesh._flatten(self, mesh_dim_name, backend_override)",
        "torch.distributed._mesh_layout:_MeshLayout.collapse",
    ),
)
STAGES = TorchPart(
    "pipeline stages",
    "are refused",
    (
        "torch.distributed.pipelining.schedules:PipelineScheduleSingle._initialize_stage",
        "torch.distributed.pipelining.schedules:PipelineScheduleMulti._initialize_stages",
    ),
)
LOSS_SCALING = TorchPart("loss scaling", "is refused", ("torch.amp:GradScaler._unscale_grads_",))
PARTS = (WARM_STARTS, ORPHANS, GLOO_ADDRESSES, GROUPS, DATA_WORKERS, SHARDED, FLATTENED, STAGES, LOSS_SCALING)


def _has(name: str) -> bool:
    module, _, path = name.partition(":")
    path, bracket, parameters = path.partition("(")
    try:
        found: Any = importlib.import_module(module)
        for each in path.split("."):
            found = getattr(found, each)
    except (ImportError, AttributeError):
        return False
    return not bracket or ", ".join(inspect.signature(found).parameters) == parameters.rstrip(")")


def lacking(parts: Iterable[TorchPart] = PARTS) -> list[str]:
    """What does not work for lack of each of ``parts``: a sentence for each that this torch lacks."""
    return [
        f"{part.capability} {part.without}: torch {torch.__version__} has no {lacks}"
        for part in parts
        if (lacks := part.lacks())
    ]


def require(part: TorchPart) -> None:
    """ConfigError if this torch lacks the part."""
    lacks = part.lacks()
    if not lacks:
        return
    newer = f"torch {part.since} or newer" if part.since and version() < _numbers(part.since) else "another torch"
    raise ConfigError(
        f"{part.capability} need {newer}: torch {torch.__version__} has no {lacks}",
        hint="install a version from the table in https://elastic-trainer.github.io/elastic_trainer/explanation/map/",
    )


def header_directory() -> Path:
    """Where Inductor keeps the headers that it has precompiled for C++: for all scripts of a user, with no variable for
    another place (codecache's _HEADER_DIR). Its own function would cost the import of Inductor, a second."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user), "precompiled_headers")


def version() -> tuple[int, int]:
    """Of this torch: (2, 13)."""
    return _numbers(str(torch.__version__))


def _numbers(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


# ---- workers that torchrun starts

WorkerStart = Callable[[Any, tuple[str, ...], dict[str, str]], "Popen[bytes]"]


def worker_start() -> WorkerStart:
    """torchrun's way to start a worker, if this torch lacks nothing for it (:data:`WARM_STARTS`)."""
    return cast("WorkerStart", _subprocess_handler()._popen)


def replace_worker_start(start: WorkerStart) -> None:
    """From now on torchrun starts workers of this process by ``start``."""
    _subprocess_handler()._popen = start


def output_of(handler: Any) -> tuple[int, int]:
    """File descriptors for a worker's output and errors: the files that torchrun has opened for them, or its own."""
    out, errors = handler._stdout, handler._stderr
    return (out.fileno() if out else 1, errors.fileno() if errors else 2)


def _subprocess_handler() -> Any:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    return SubprocessHandler


def error_outputs(agent: Any) -> dict[int, Path]:
    """The files of its own that each worker of torchrun's ``agent`` has for error output, by local rank."""
    files = getattr(getattr(agent, "_pcontext", None), "stderrs", None) or {}
    return {rank: Path(file) for rank, file in files.items() if file}


IN_GLOO: Final = re.compile(r"gloo/\S*\.(?:cc|h):\d+\]")
"""gloo's errors are plain RuntimeErrors: they name a line of its source."""
OWN_DEVICE: Final = re.compile(r"out of memory|\bECC error|GPU is lost|fallen off the bus")
"""What NCCL's errors say of the device that raises them."""


# ---- models


def check_before_ddp(check: Callable[[torch.nn.Module], object]) -> None:
    """From now on ``check(module)`` comes before each ``DistributedDataParallel(module)``. Only the first counts."""
    build: Any = DistributedDataParallel.__init__
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def checked(self: DistributedDataParallel, module: torch.nn.Module, *arguments: Any, **named: Any) -> None:
        check(module)
        build(self, module, *arguments, **named)

    kind: Any = DistributedDataParallel
    kind.__init__ = checked


# ---- process groups

_NCCL2 = "TORCH_DIST_USE_NCCL2"
"""The variable by which torch 2.14 chooses the new NCCL backend, nccl2, and torch 2.15 the old one."""


def survive_nccl_errors() -> None:
    """NCCL leaves workers that this process starts alive when a peer is lost. Call it before workers import torch.

    torchrun exports 1 for the first variable, with which NCCL's watchdog would kill the survivors of a failed
    collective. nccl2 reads it too, but connects all ranks anew as soon as a group is made, and recovery in place was
    written for the older backend: torch 2.15 is asked for that one. A user's own choice of the backend wins.
    """
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"
    if version() >= (2, 15):
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")


def nccl_is_nccl2() -> bool:
    """Whether torch makes the backend "nccl" a ProcessGroupNCCL2 in this process."""
    by_default = version() >= (2, 15)
    chosen = os.environ.get(_NCCL2)
    return hasattr(dist, "ProcessGroupNCCL2") and (chosen != "0" if by_default else chosen == "1")


def nccl(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta | None = None) -> Any:
    """An NCCL backend of the kind that torch makes for "nccl" in this process; ``timeout`` None is torch's."""
    options = dist.ProcessGroupNCCL.Options()
    if timeout is not None:
        options._timeout = timeout
    if nccl_is_nccl2():
        bound = (device,) if version() >= (2, 15) else ()  # 2.14 connects at the first operation, on its device
        return cast("Any", dist).ProcessGroupNCCL2(store, rank, size, options, *bound)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def gloo_options(timeout: timedelta, address: str, threads: int) -> Any:
    """Options for a gloo backend at ``address``; RuntimeError if gloo refuses it."""
    private: Any = dist.ProcessGroupGloo
    options = private._Options()
    options._devices = [private.create_device(hostname=address)]
    options._timeout, options._threads = timeout, threads
    return options


def group_of(store: Any, rank: int, size: int, backends: Mapping[torch.device, Any]) -> Any:
    """A process group that uses a backend for each device; that of the CPU is gloo, and is the default one."""
    group = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    for device, backend in backends.items():
        kind = kinds.GLOO if isinstance(backend, dist.ProcessGroupGloo) else kinds.NCCL
        group._register_backend(device, kind, backend)
    group._set_default_backend(kinds.GLOO)
    return group


def backend_of(group: Any, device: torch.device) -> Any:
    """What ``group`` uses for tensors on ``device``."""
    return group._get_backend(device)


def is_gloo(group: Any, device: torch.device) -> bool:
    """Whether ``group`` uses gloo for tensors on ``device``."""
    return isinstance(backend_of(group, device), dist.ProcessGroupGloo)


def limit_gloo(group: Any, timeout: timedelta) -> None:
    """Limit all later collectives of a gloo backend, or of the one that ``group`` has."""
    backend = group if isinstance(group, dist.ProcessGroupGloo) else backend_of(group, torch.device("cpu"))
    backend._set_default_timeout(timeout)


def number_groups_anew() -> None:
    """torch numbers the groups of a process, and ranks find each other by that number.

    A failed attempt increments it only on ranks that got that far: ranks would then wait for each other under
    different numbers.
    """
    if not GROUPS.lacks():
        c10d._world.group_count = 0


def register(group: dist.ProcessGroup, name: str, ranks: Sequence[int], kind: str) -> None:
    """torch knows ``group`` by ``name``; ``ranks`` are the global ranks that it is to believe its members have."""
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    world, known = c10d._world, c10d.GroupName(name)
    with suppress(RuntimeError):
        _unregister_process_group(known)
    _register_process_group(known, group)
    world.pg_map[group] = (kind, None)  # type: ignore[assignment]
    world.pg_names[group] = known
    world.pg_to_tag[group] = f"ptd:{name}"
    world.tags_to_pg[f"ptd:{name}"] = [group]
    world.pg_group_ranks[group] = {shard_rank: rank for rank, shard_rank in enumerate(ranks)}
    world.pg_backend_config[group] = f"cpu:{kind}"


def unregister(group: dist.ProcessGroup, name: str) -> None:
    """Call before destroy_process_group(), which would try to destroy ``group``."""
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_to_tag, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    world.tags_to_pg.pop(f"ptd:{name}", None)


@contextmanager
def default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """``group`` is torch's default one."""
    before = c10d.GroupMember.WORLD
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(before)


def all_gather_flat(group: Any, output: torch.Tensor, source: torch.Tensor) -> Any:
    """The parts ``source`` of all ranks, one after the other, in ``output``; past torch's checks and log entries."""
    return group._allgather_base(output, source)


# ---- device meshes


class PlacedMesh(DeviceMesh):
    """A mesh over the ranks of a shard group; ``_rank`` is this process's.

    DeviceMesh looks itself up by torch's global rank, which is undefined before the first round and changes with each.
    """

    def __init__(self, *arguments: Any, _rank: int, **named: Any) -> None:
        self._shard_rank = _rank
        super().__init__(*arguments, _rank=_rank, _init_backend=False, **named)

    @property
    def root(self) -> Any:
        """The mesh that this one is a part of, or it itself."""
        return self._get_root_mesh()

    def use(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Its dimensions communicate by ``groups``, by their names, in the order of the dimensions."""
        self._dim_group_names = [c10d.GroupName(name) for name in groups]
        self.root._pg_registry.update({c10d.GroupName(name): group for name, group in groups.items()})

    def get_rank(self) -> int:
        return self._shard_rank

    @property
    def mesh(self) -> torch.Tensor:
        full = self._layout.remap_to_tensor(self._rank_map)
        return DeviceMesh._get_mesh_tensor_from_full_mesh(full, self._shard_rank)

    def _hash_key(self) -> tuple[Any, ...]:
        """DTensor's caches return objects made for an *equal* mesh, with that mesh's groups and shard rank."""
        return (*super()._hash_key(), self._shard_rank, tuple(group_names(self)))

    def __hash__(self) -> int:
        return hash(self._hash_key())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PlacedMesh) and self._hash_key() == other._hash_key())

    def _create_sub_mesh(self, layout: Any, submesh_dim_names: tuple[str, ...]) -> DeviceMesh:
        part = self._part(layout, submesh_dim_names)
        groups = dict(zip(self._mesh_dim_names or (), self._dim_group_names, strict=True))
        for name, flat in getattr(self.root, "_flatten_mapping", {}).items():
            groups[name] = flat._dim_group_names[0]
        part._dim_group_names = [groups[name] for name in submesh_dim_names]
        return part

    def _part(self, layout: Any, names: tuple[str, ...]) -> Self:
        root = self._get_root_mesh()
        how = {"_layout": layout, "_rank_map": root._rank_map, "_root_mesh": root, "_rank": self._shard_rank}
        return type(self)(self._device_type, mesh_dim_names=names, **how)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """As torch's, whose mesh would have a group of one round."""
        require(FLATTENED)
        root, names = self.root, self._mesh_dim_names or ()
        name = mesh_dim_name or "_".join(names)
        if names == (name,):
            return self
        flat = self._part(type(self._layout)([self._layout.collapse()]), (name,))
        known = {**dict.fromkeys(root._mesh_dim_names), **root._flatten_mapping}
        if name not in known:
            group = root.group_of_all(name, names)
            flat.use({group.group_name: group})
            root._flatten_mapping[name] = known[name] = flat
        if known[name] is None or known[name]._layout != flat._layout:
            raise ConfigError(
                f"the device mesh has another dimension {name!r}", hint="flatten it under a name of its own"
            )
        found: DeviceMesh = known[name]
        return found

    def group_of_all(self, name: str, names: tuple[str, ...]) -> Any:
        """A group for the dimension ``name``, which takes the place of the dimensions ``names`` of the root mesh."""
        raise NotImplementedError

    @classmethod
    @contextmanager
    def joined(cls, shard_rank: int) -> Iterator[None]:
        """FSDP over tensor parallel joins parts of a mesh; the result of joining such parts is such a mesh too."""
        joins = DeviceMesh._concatenate

        def join(parts: list[DeviceMesh]) -> DeviceMesh:
            joined = joins(parts)
            if isinstance(parts[0], cls):
                joined.__class__ = cls
                cast("PlacedMesh", joined)._shard_rank = shard_rank
            return joined

        DeviceMesh._concatenate = staticmethod(join)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            DeviceMesh._concatenate = joins  # type: ignore[method-assign]


def group_names(mesh: DeviceMesh) -> Sequence[str]:
    """Those of its dimensions' groups; empty if it has none."""
    return getattr(mesh, "_dim_group_names", ())


def seed_shards(seed: int, mesh: DeviceMesh) -> None:
    """DTensor draws random numbers on CUDA; without this it would ask all ranks for a seed."""
    from torch.distributed.tensor._random import manual_seed

    manual_seed(seed, mesh)


# ---- FSDP2


def fsdp_groups(module: Any) -> list[Any]:
    """The parameter groups of one FSDPModule, not of those inside it."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def leave_fsdp_pass(modules: Sequence[Any]) -> None:
    """FSDP may be anywhere inside a pass of a round that is over; the next one begins at its first layer.

    ``modules`` are all FSDPModules of a model. Gradients of shards stay: a peer may have committed their step, and then
    this rank makes it too. torch's own reset drops them from 2.15 on. Up to 2.14 it leaves gradients of *unsharded*
    parameters, and those of the repeated step would be added to them.
    """
    groups = [group for each in modules for group in fsdp_groups(each)]
    shards = [each.sharded_param for group in groups for each in group.fsdp_params]
    finished = [each.grad for each in shards]
    for group in groups:
        group._all_gather_result = None  # nobody waits for it
    for each in modules:
        if each._get_fsdp_state()._is_root:
            each.reset_iter_state()
    for shard, gradient in zip(shards, finished, strict=True):
        shard.grad = gradient
    _clear_stale(groups)


def _clear_stale(groups: Sequence[Any]) -> None:
    for parameter in (each for group in groups for each in group.fsdp_params):
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None
        if "unsharded_accumulated_grad" in vars(parameter):  # from torch 2.15 on it is that gradient
            parameter.unsharded_accumulated_grad = None


def call_collectives_directly(module: Any) -> None:
    """FSDP's own collectives of ``module`` call their group, past torch's checks and log entries."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

    class Gather(DefaultAllocMixin, AllGather):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
        ) -> dist.Work | None:
            return _awaited(all_gather_flat(group, output_tensor, input_tensor), async_op)

    class Scatter(DefaultAllocMixin, ReduceScatter):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
        ) -> dist.Work | None:
            options = dist.ReduceScatterOptions()
            options.reduceOp = op
            # FSDP makes the input for this alone.
            return _awaited(group._reduce_scatter_base(output_tensor, input_tensor, options, spends=True), async_op)

    module.set_custom_all_gather(Gather())
    module.set_custom_reduce_scatter(Scatter())


def _awaited(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


# ---- pipeline stages


def begin_schedule(schedule: Any, several: bool, inputs: tuple[torch.Tensor, ...], target: Any) -> None:
    """Have the stages of a pipeline's schedule compute one micro-batch, to see its shapes."""
    begin = schedule._initialize_stages if several else schedule._initialize_stage
    begin(inputs, {}, target)


def leave_schedule(stages: Sequence[Any]) -> None:
    """The schedule of these stages may be anywhere inside a step of a round that is over.

    Its transfers may still write to their buffers, so the next step gets new ones.
    """
    for stage in stages:
        if getattr(stage, "_gradient_reduction_handle", None) is not None:  # torch 2.15: a sum that nobody waits for
            stage._gradient_reduction_handle = None
            stage.submod.set_manual_backward_finalization(False)
        stage.clear_runtime_states()
        for kept in (stage.bwd_cache, stage.args_recv_info, stage.grad_recv_info):
            kept.clear()


# ---- data workers


def multiprocess_iterator() -> Any:
    """An iterator of a DataLoader with worker processes, before its ``__init__(loader)``.

    Made this way, one whose ``__init__`` fails is known. torch's handler of SIGCHLD raises nothing about its processes,
    but within :func:`telling_of`.
    """
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    class Quiet(_MultiProcessingDataLoaderIter):
        def _reset(self, loader: Any, first_iter: bool = False) -> None:
            if first_iter:  # the processes and torch's handler of SIGCHLD are there: threads are begun now
                forget_processes(self)
            super()._reset(loader, first_iter)

    return Quiet.__new__(Quiet)


def keep_iterator(loader: Any, iterator: Any) -> None:
    """``loader`` takes ``iterator`` for its own, as after ``iter(loader)`` with persistent workers."""
    loader._iterator = iterator


def worker_processes(iterator: Any) -> list[Any]:
    """Those that were begun so far, as :class:`multiprocessing.Process`."""
    return list(getattr(iterator, "_workers", ()))


@contextmanager
def telling_of(iterator: Any, processes: Sequence[Any]) -> Iterator[None]:
    """torch's handler of SIGCHLD raises RuntimeError in the main thread when one of ``processes`` dies."""
    from torch._C import _remove_worker_pids, _set_worker_pids

    try:
        _set_worker_pids(id(iterator), tuple(process.pid for process in processes))
        yield
    finally:
        _remove_worker_pids(id(iterator))


def forget_processes(iterator: Any) -> None:
    """From now on torch's handler of SIGCHLD raises nothing about the processes of ``iterator``."""
    from torch._C import _remove_worker_pids

    with suppress(ValueError):  # it does not know them yet
        _remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False


def end_processes(iterator: Any) -> None:
    """End the processes of a DataLoader's iterator, in peace; one without processes is left alone."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def let_go(iterator: Any) -> None:
    """Nothing waits for ``iterator`` any more, nor does it wait for its processes when it is thrown away."""
    iterator._shutdown = True
    if hasattr(iterator, "_pin_memory_thread_done_event"):
        iterator._pin_memory_thread_done_event.set()


def pinning_ended(iterator: Any) -> bool:
    """Whether the thread that copies data into pinned memory has ended; without one it has not."""
    thread = getattr(iterator, "_pin_memory_thread", None)
    return thread is not None and not thread.is_alive()


# ---- loss scaling, and others

BatchNorm = _BatchNorm
"""The base of torch's batch normalization layers."""


def unscaled(scaler: torch.amp.GradScaler, group: Any) -> Mapping[torch.device, torch.Tensor]:
    """Divide gradients of the parameters of ``group`` by the scale; says for each device whether one overflowed."""
    scale = scaler._scale
    if scale is None:
        raise RuntimeError("the scaler has scaled no loss")
    nothing = torch.zeros((), dtype=torch.float32, device=scale.device)
    found: Mapping[torch.device, torch.Tensor] = scaler._unscale_grads_(
        group, scale.double().reciprocal().float(), nothing, False
    )
    return found


def scaler_states(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """What the scaler knows of each optimizer in this step, by the optimizer's id."""
    return scaler._per_optimizer_states


def after_backward(act: Callable[[], None]) -> None:
    """Call ``act`` at the end of the backward pass that is running; callbacks run in the order of these calls."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Its own buffers, not those of modules inside it; a change of the dictionary changes the module."""
    return module._buffers


def saved_buffers(module: torch.nn.Module) -> tuple[str, ...]:
    """The names of those of them that are part of its state."""
    return tuple(module._buffers.keys() - module._non_persistent_buffers_set)


def loads_its_own_way(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer, or a hook of it, changes what load_state_dict() does."""
    way = getattr(optimizer.load_state_dict, "__func__", None)
    return way is not torch.optim.Optimizer.load_state_dict or bool(optimizer._optimizer_load_state_dict_pre_hooks)


def storage_identity(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)
