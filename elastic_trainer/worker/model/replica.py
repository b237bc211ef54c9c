"""This rank's copy of the model: the bare module, what the script calls, what is trained, how gradients become one.

Each mode is a type of :class:`Replica` with the same methods: here :class:`DdpReplica`, the default; beside it tree,
sharded, stages, several and local.

DistributedDataParallel is built with ``init_sync=False``: states are already equal, and its broadcast would overwrite
a rank that is ahead. It sends rank 0's buffers (BatchNorm statistics) to all ranks in the first forward pass after a
synchronised one, so once per step at any number of micro-batches; rank 0's buffers are the ones that count and are
saved. Rank 0 always has samples of its own, never a filler.

*Runs in* the worker's main thread.
*Fails by* ConfigError for a change of the script that cannot be followed, naming the first parameter; RoundBrokenError
when the round is over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elastic_trainer import torch_internals
from elastic_trainer.checkpoint.codec import local
from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError, RoundBrokenError
from elastic_trainer.torch_internals import BatchNorm
from elastic_trainer.worker.comm.control import Control, EqualityCheck, InterruptibleWaits, Purpose, Work, collective
from elastic_trainer.worker.comm.groups import Group, all_reduce
from elastic_trainer.worker.comm.lasting import ShardLayout
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.report import HeartbeatReporter


def bare(module: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given, if ``module`` is compiled."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


_BARE = "give session.wrap() the bare model and call what it returns: it averages the gradients of all ranks"


def check_bare(model: nn.Module) -> None:
    """ConfigError if ``model`` sums gradients by itself."""
    for each in model.modules():
        if isinstance(each, DistributedDataParallel | nn.DataParallel):
            raise ConfigError(f"session.wrap() of a model in {type(each).__name__}", hint=_BARE)


def refuse_ddp(module: nn.Module) -> None:
    """Before ``DistributedDataParallel(module)`` in an open session: ConfigError if it cannot work there."""
    if isinstance(module, WrappedModel) or not dist.is_initialized():
        raise ConfigError("DistributedDataParallel inside a session", hint=_BARE)


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters of ``module`` are DTensors."""
    return any(hasattr(each, "device_mesh") for each in module.parameters())


Call = Callable[[Callable[..., Any], Any, Any], Any]
"""Makes a call in place of the runner; gets what to call, and the arguments."""
_TABLES = ("_parameters", "_buffers", "_modules")


class WrappedModel(nn.Module):
    """What ``session.wrap`` returns: one type for the whole life of a script, alone, on many ranks and across rounds.

    Calling it goes through what averages gradients in the present round. All else is the bare model's: its attributes
    and methods (``wrapped.generate()``), its parameters under their own names, its state dict.

    ``module`` is the bare model; ``called`` the compiled one, if it was compiled, else the same.
    """

    module: nn.Module
    called: nn.Module

    def __init__(self, module: nn.Module, called: nn.Module) -> None:
        own, training = self.__dict__, module.training
        own.update(module=module, called=called, _through=called, _call=None)
        super().__init__()
        module.training = training
        own.update({name: module.__dict__[name] for name in _TABLES})  # shared, so that names are the bare model's

    def forward(self, *inputs: Any, **named: Any) -> Any:
        through, call = self.__dict__["_through"], self.__dict__["_call"]
        return through(*inputs, **named) if call is None else call(through, inputs, named)

    def go_through(self, parallel: Callable[..., Any] | None) -> None:
        """Call ``parallel``, which calls the model, from now on; None: the model itself."""
        self.__dict__["_through"] = self.called if parallel is None else parallel

    def intercept(self, call: Call | None) -> None:
        """Route each call through ``call`` from now on; None: call directly."""
        self.__dict__["_call"] = call

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in here only add up locally, as in DistributedDataParallel."""
        through = self.__dict__["_through"]
        return through.no_sync() if isinstance(through, DistributedDataParallel) else nullcontext()

    @property
    def training(self) -> bool:
        """Of the bare model."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __getitem__(self, key: Any) -> Any:
        module: Any = self.module
        return module[key]

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["module"], name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy is of the bare model: a round's groups cannot be copied."""
        return copy.deepcopy(self.module, memo)


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """ConfigError for an optimizer that talks to other ranks itself, or trains what is not in the model."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.distributed.optim"):
            raise ConfigError(
                f"{kind.__name__} communicates with other ranks and cannot survive a change of ranks",
                hint="use the ordinary optimizer that it wraps",
            )
    check_members(optimizer, module)


def check_members(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """ConfigError for an optimizer that trains what is not in the model."""
    known = set(map(id, module.parameters()))
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in known for parameter in group["params"]):
            raise ConfigError(
                f"parameter group {number} of the optimizer holds a parameter that is not in the model",
                hint="make the optimizer from this model's parameters, and put all trained modules in one model",
            )


_required = attrgetter("requires_grad")


class Trainable:
    """The parameters of ``module``, and which of them are in the groups of ``optimizer``.

    The reduction over ranks is built for the parameters that require a gradient. If another one is unfrozen later, each
    rank would use its own gradient, and the models would drift apart: changes by the script are noticed before.
    Checking all flags takes 30 ns per parameter, about as long as dropping a gradient.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._names, self.parameters = _listed(module)
        self.read_flags()

    def read_flags(self) -> None:
        """Take the present flags and groups as what is trained. ConfigError if a parameter is not the model's."""
        groups = self._optimizer.param_groups
        check_members(self._optimizer, self._module)
        names, parameters = _listed(self._module)
        if list(map(id, parameters)) != list(map(id, self.parameters)):
            before = set(map(id, self.parameters))
            added = [name for name, each in zip(names, parameters, strict=True) if id(each) not in before]
            first = [*added, *sorted(set(self._names) - set(names)), *names][0]
            raise ConfigError(
                f"parameter {first!r} is not the one that session.wrap() was given",
                hint="make all parameters before wrap(), and freeze those that are to be trained later",
            )
        self._flags, self.groups = list(map(_required, parameters)), len(groups)
        held = {id(each) for group in groups for each in group["params"]}
        self.outside = [each for each in parameters if id(each) not in held]
        """Those in no group of the optimizer."""

    @property
    def switched(self) -> bool:
        """Whether a parameter was frozen or unfrozen since :meth:`read_flags`."""
        return list(map(_required, self.parameters)) != self._flags

    def switch(self) -> str:
        """The first such parameter and its change, in words."""
        pairs = zip(self._names, self.parameters, self._flags, strict=True)
        name, now = next((name, each.requires_grad) for name, each, flag in pairs if each.requires_grad != flag)
        return f"parameter {name!r} was {'unfrozen' if now else 'frozen'}"

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that must be equal on all ranks (a model can exclude some from DDP)."""
        ignored = getattr(self._module, "_ddp_params_and_buffers_to_ignore", ())
        pairs = zip(self._names, self.parameters, strict=True)
        return [(name, local(each)) for name, each in pairs if name not in ignored and not each.is_meta]

    # ---- between ranks

    def check_alike(self, control: Control) -> None:
        """ConfigError on all ranks unless they train the same parameters; all call it in the same step."""
        flags = bytes(self._flags)
        if control.alone or EqualityCheck(control, Purpose.TRAINED, xxhash.xxh3_64_intdigest(flags)).wait():
            return
        rows = control.gather_bytes(flags)
        if len({len(row) for row in rows}) > 1:
            raise ConfigError("ranks train models of different sizes", hint="make the same model on all ranks")
        rank, number = next(
            (rank, number)
            for rank, row in enumerate(rows)
            for number, flag in enumerate(row)
            if flag != rows[0][number]
        )
        raise ConfigError(
            f"parameter {self._names[number]!r} is trained on rank {rank if rows[rank][number] else 0} and frozen on"
            f" rank {0 if rows[rank][number] else rank}",
            hint="freeze and unfreeze parameters at the same step on all ranks",
        )


def _listed(module: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    named = list(module.named_parameters())
    return [name for name, _ in named], [parameter for _, parameter in named]


class Buffers:
    """The buffers of a model at the start of a step, so that what its body does to them can be undone.

    A forward pass may change them in place (BatchNorm) or replace them (``self.ema = ...``). A step that replaces none
    costs one copy of all of them, and one look at each. ``live`` are the model's tensors, ``kept`` their values at the
    step's start; the lists stay.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = {name: torch_internals.buffers_of(each) for name, each in module.named_modules()}
        self._owners, self._tables = list(owners), list(owners.values())
        self._present: list[torch.Tensor | None] = []
        self._before: list[dict[str, torch.Tensor | None]] = []
        self.live: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        self._renew(self._look())

    def keep(self) -> str | None:
        """At the start of a step; returns the name of a buffer that was replaced since the previous step, if any."""
        if not self._tables:
            return None
        present, replaced = self._look(), None
        if len(present) != len(self._present) or not all(map(is_, present, self._present)):
            replaced = self._replaced()
            self._renew(present)
        if self.live:
            torch._foreach_copy_(self.kept, self.live)
        return replaced

    def restore(self) -> None:
        """Put the kept values back into the tensors that the step began with."""
        if self.live:
            torch._foreach_copy_(self.live, self.kept)

    def undo(self) -> None:
        """Put back the tensors that the step began with, and their values."""
        for table, before in zip(self._tables, self._before, strict=True):
            table.clear()
            table.update(before)
        self.restore()

    def _look(self) -> list[torch.Tensor | None]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def _replaced(self) -> str | None:
        for owner, now, then in zip(self._owners, self._tables, self._before, strict=True):
            for name in {**now, **then}:
                if now.get(name) is not then.get(name):
                    return f"{owner}.{name}" if owner else name
        return None

    def _renew(self, present: list[torch.Tensor | None]) -> None:
        self._present, self._before = present, [dict(table) for table in self._tables]
        once = {id(each): each for each in present if each is not None}.values()
        self.live[:] = [each.detach() if each.requires_grad else each for each in once]
        self.kept[:] = [torch.empty_like(each) for each in self.live]


def share(control: Control, buffers: Sequence[torch.Tensor]) -> None:
    """Give all ranks rank 0's ``buffers``, as DistributedDataParallel does; those that are saved."""
    if control.alone:
        return
    for alike in by_kind([each.detach() for each in buffers]):
        flat = torch.cat([each.reshape(-1) for each in alike]).cpu()
        control.broadcast(flat, 0)
        unflatten(flat, alike)


def by_kind(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """``tensors`` of one type on one device together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for each in tensors:
        kinds.setdefault((each.dtype, each.device), []).append(each)
    return kinds.values()


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy what ``flat`` holds, one tensor behind another, into ``tensors``."""
    parts = torch.split(flat, [each.numel() for each in tensors])
    torch._foreach_copy_(list(tensors), [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)])


class Reduction(StrEnum):
    """How the gradients of micro-batches become one."""

    DDP = "ddp"
    """By DistributedDataParallel: fastest; rounding depends on the number of ranks."""
    TREE = "tree"
    """In one fixed order: the same bits at any number of ranks (see tree)."""
    LOCAL_SGD = "local_sgd"
    """Not at all: each rank makes updates of its own, and parameters are averaged now and then (see local)."""
    DILOCO = "diloco"
    """As LOCAL_SGD, and an outer optimizer steps along what that changes."""

    @property
    def apart(self) -> bool:
        """Whether ranks hold different parameters between two synchronisations."""
        return self in (Reduction.LOCAL_SGD, Reduction.DILOCO)


@dataclass(frozen=True, slots=True)
class DataPart:
    """Which part of the data a rank draws: part ``rank`` of ``world``, as do ``alike`` ranks together.

    ``first``: it is the one of them that counts the samples. ``even``: its passes in training are collectives, so all
    ranks need equally many; ``always_even``: those of an evaluation too. ``fixed``: nothing that is drawn may depend on
    the number of ranks.
    """

    rank: int
    world: int
    alike: int = 1
    first: bool = True
    even: bool = False
    always_even: bool = False
    fixed: bool = False


class Pass(NamedTuple):
    """A backward pass: the ``part`` of a batch that it is about, the unscaled ``loss`` with its ``weight`` in the mean
    over the global batch, and whether it is the ``last`` one of the batch.
    """

    part: Batch | None
    loss: torch.Tensor
    weight: float
    last: bool


class Use(StrEnum):
    """What a script may ask for that not every replica goes with."""

    CLOSURE = "optimizer.step(closure)"
    FUSED_SCALER = "a GradScaler whose optimizer unscales by itself"
    MANUAL_STEP = "session.begin_step()"
    STREAMS = "session.batches(Streams(...))"
    AUDIT = "audit_every"
    HALVING = "out_of_memory='halve'"


def checked_decay(wanted: float | AveragedModel) -> float:
    """ConfigError for what is no decay."""
    if isinstance(wanted, AveragedModel):
        raise ConfigError("an AveragedModel of a sharded model", hint="give a decay, such as average=0.999")
    if not 0.0 < wanted < 1.0:
        raise ConfigError(f"average is {wanted:g}", hint="give a decay between 0 and 1, such as 0.999")
    return wanted


class Replica:
    """One rank's copy of the model, and how it is kept equal to those of other ranks; each mode is a type.

    What only some modes need is a method that does nothing here. ``in_place``: the process outlives rounds, so what a
    step does to the buffers can be undone.
    """

    refused: Mapping[Use, tuple[str, str]] = {}
    """What does not go with this mode: why, and what to do instead."""
    layout: ShardLayout | None = None
    """How the model is sharded, if it is."""
    anywhere: Callable[[bool], bool] | None = None
    """Whether any rank that holds a part of this state says so; all of them ask at once. None: this rank holds all."""
    fitted = False
    """Whether the reduction was built for a fixed set of trained parameters."""
    share = 1.0
    """Factor for the loss that turns gradients into means over the ranks."""
    averaged_over = 1
    """Over how many ranks gradients are means, with that factor."""
    own_optimizer = False
    """Whether each rank holds a state of its optimizer that is its own."""
    loss_weight = 1
    """For how many ranks this one counts in a sum of losses."""
    summed = True
    """Whether the gradients are sums over all ranks, as far as that is known."""
    prepared = 0
    """The number of the step that a peer may have committed; 0 if there is none."""

    def __init__(self, module: nn.Module, placement: Placement, *, in_place: bool = False) -> None:
        self._placement, self.in_place = placement, in_place
        self.module = self._moved(bare(module), placement.device)
        self.runner = WrappedModel(self.module, self.module if bare(module) is module else module)
        """What the script calls."""
        self._buffers = Buffers(self.module) if in_place else None

    def _moved(self, module: nn.Module, device: torch.device) -> nn.Module:
        return module.to(device)

    def check(self, use: Use) -> None:
        """ConfigError if this mode does not go with ``use``."""
        if use in self.refused:
            sentence, hint = self.refused[use]
            raise ConfigError(sentence, hint=hint)

    def averaged(self, wanted: float | AveragedModel | None) -> AveragedModel | None:
        """The moving average to keep of the parameters: with this decay, the given one, or none.

        With decay d, averaged parameters become d * averaged + (1 - d) * present at each step, from those of the first
        step on; a step that a GradScaler skipped counts too. Buffers are the present ones.
        """
        if wanted is None:
            return None
        if isinstance(wanted, AveragedModel):
            return wanted.to(next(self.module.parameters()).device)
        average = get_ema_multi_avg_fn(checked_decay(wanted))  # type: ignore[no-untyped-call]
        return AveragedModel(self.module, multi_avg_fn=average)

    # ---- rounds

    def join(self, group: Group) -> None:
        """A round was formed."""

    def level(self) -> None:
        """Called before training may start from a state that no checkpoint holds."""

    def alike(self, control: Control) -> Control:
        """The ranks that must hold what this one holds."""
        return control

    @property
    def peers(self) -> Control | None:
        """The ranks that hold one whole state together with this one."""
        return None

    def part(self, control: Control) -> DataPart:
        """What this rank draws of each global batch."""
        return DataPart(control.rank, control.world_size)

    def claims(self, control: Control, resumed: Mapping[str, Any], allowed: Collection[str]) -> dict[str, Any]:
        """What checkpoints say of how this replica computes.

        ConfigError on ranks that compute otherwise than rank 0, or than the fields ``resumed``.
        """
        return {}

    def bind(self, control: Control) -> None:
        """Train with the ranks of the present round, which all hold the same state."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            raise ConfigError("no parameter of the model requires a gradient", hint="unfreeze what is to be trained")
        self.averaged_over = self.part(control).world

    def fit(self, control: Control, change: str) -> None:
        """Follow a ``change`` of the trained parameters, between two steps, on all ranks alike."""
        self.bind(control)

    def release(self) -> None:
        """Leave the round."""

    # ---- steps

    def share_buffers(self) -> None:
        """Before a step; DistributedDataParallel does it in the forward pass."""

    def begin_step(self, *, counts: bool = True) -> None:
        """Before the forward pass, which moves buffers (BatchNorm); ``counts``: the samples are no filler."""
        if self._buffers is not None:
            self._buffers.keep()

    def begin_micro_batch(self, *, counts: bool = True) -> None:
        """Before the forward pass of one of several micro-batches."""

    def accumulating(self) -> AbstractContextManager[None]:
        """A context in which backward passes only add up locally."""
        return nullcontext()

    def before_backward(self, part: Batch | None, done: Collection[int]) -> float:
        """Before any collective of a backward pass: the weight of its loss. ``done`` are starts of earlier parts.

        Where ranks compute together they find out here whether all are there.
        """
        return 1.0 if part is None else part.weight

    def counting(self, control: Control) -> Control:
        """The ranks that add up what they count of a batch."""
        return control

    def backward(self, loss: torch.Tensor, about: Pass | None = None) -> float | None:
        """The backward pass of ``loss``; gradients are averaged over the ranks unless that is left to a later pass.

        Returns the mean loss over the global batch where the pass finds it.
        """
        loss.backward()  # type: ignore[no-untyped-call]
        return None

    def run(
        self,
        schedule: str | None,
        inputs: Sequence[tuple[torch.Tensor, ...]],
        loss_of: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        """All passes of a step at once, where the model is computed in stages."""
        raise ConfigError(
            "step.pipeline() of a model without stages", hint="say session.wrap(..., stage=PipelineStage(...))"
        )

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        grads = [local(each.grad) for each in self.module.parameters() if each.grad is not None]
        if grads and factor != 1.0:
            torch._foreach_mul_(grads, factor)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to a norm of at most ``max_norm`` over all parameters; the norm before."""
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def commit_together(self, number: int) -> None:
        """Before the update of step ``number``: wait for ranks that must make it together with this one."""

    def undo(self) -> None:
        """Put back the buffers that the step began with."""
        if self._buffers is not None:
            self._buffers.undo()

    # ---- between steps

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Passes in here leave no trace in the buffers."""
        if self._buffers is not None:
            self._buffers.keep()
        yield
        self.undo()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The bare module if ``model`` wraps it, else ``model`` itself."""
        model = bare(model)
        if model is self.runner:
            return self.module
        return bare(model.module) if isinstance(model, DistributedDataParallel) else model

    def align_buffers(self, control: Control, average: nn.Module | None) -> None:
        """Give all ranks rank 0's buffers, as the next forward pass would, and those of the ``average``.

        Rank 0's are the ones that are saved, however they came about (``update_bn``).
        """


def check_options(options: Mapping[str, Any]) -> None:
    """ConfigError for options of DistributedDataParallel that cannot work here."""
    if options.get("static_graph"):
        raise ConfigError("ddp_options: static_graph cannot survive a change of ranks", hint="leave it out")
    for name in ("init_sync", "device_ids", "output_device", "process_group"):
        if name in options:
            raise ConfigError(f"ddp_options: '{name}' is set by the session", hint="leave it out")


class DdpReplica(Replica):
    """Gradients are averaged by DistributedDataParallel, with these ``options``, in every step.

    ``sync_batchnorm``: layers of batch normalization compute over the samples of all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        tracker: HeartbeatReporter,
        options: Mapping[str, Any],
        *,
        sync_batchnorm: bool,
        in_place: bool = False,
    ) -> None:
        check_options(options)
        self._tracker, self._options, self._even, self._context = tracker, dict(options), sync_batchnorm, SyncContext()
        super().__init__(module, placement, in_place=in_place)
        self._parallel: DistributedDataParallel | None = None
        self._sums: GradientSums | None = None
        if sync_batchnorm:
            self.refused = {Use.AUDIT: ("audit_every does not go with sync_batchnorm", "leave it out")}

    def _moved(self, module: nn.Module, device: torch.device) -> nn.Module:
        module = super()._moved(module, device)
        if self._even and device.type == "cuda":
            return nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-any-return, no-untyped-call]
        return share_batchnorm(module, self._context) if self._even else module

    def part(self, control: Control) -> DataPart:
        return DataPart(control.rank, control.world_size, even=self._even)

    def bind(self, control: Control) -> None:
        self.release()
        super().bind(control)
        if control.alone:
            return
        cuda = self._placement.device.type == "cuda"
        if self._even and not cuda:
            self._context.bind(control.rank, control.world_size, partial(all_reduce, control))
        ids = [self._placement.device.index] if cuda else None
        # Else gradients are copied back and held twice. With DDP's mixed precision they do not fit their bucket.
        options = {"gradient_as_bucket_view": "mixed_precision" not in self._options, **self._options}
        self._parallel = DistributedDataParallel(self.runner.called, device_ids=ids, init_sync=False, **options)
        self.fitted = True
        if self.in_place and not cuda and options["gradient_as_bucket_view"]:
            group = self._parallel.process_group
            sums = self._sums = GradientSums(group, control.works)
            self.share = 1.0 / group.size()
            self._parallel.register_comm_hook(None, lambda state, bucket: sums.begin(bucket))
        self.runner.go_through(self._parallel)

    def fit(self, control: Control, change: str) -> None:
        if not self.in_place:
            raise ConfigError(
                f"{change} after session.wrap(), and DistributedDataParallel sums what was trained then",
                hint="decide before wrap() (lr=0 holds a group still), or use reduction='tree' or in-place recovery",
            )
        self.bind(control)

    def release(self) -> None:
        self._context.bind(0, 1, lambda tensor: None)
        self._parallel = self._sums = None
        self.fitted, self.summed, self.share = False, True, 1.0
        self.runner.go_through(None)

    def begin_step(self, *, counts: bool = True) -> None:
        self._context.counts = counts
        if self._buffers is not None:
            self._buffers.keep()
        if self._sums is not None:
            self.summed = self._sums.summed = self._sums.complete = False

    def begin_micro_batch(self, *, counts: bool = True) -> None:
        self._context.counts = counts

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext() if self._parallel is None else self._parallel.no_sync()

    def backward(self, loss: torch.Tensor, about: Pass | None = None) -> float | None:
        if self._sums is not None:
            if self._sums.summed:  # what is summed will be summed again, together with what is new
                self.scale_gradients(self.share)
            loss.backward()  # type: ignore[no-untyped-call]
            self._sums.wait()
            self.summed = self._sums.complete
        elif self._parallel is None or not self._parallel.require_backward_grad_sync or not loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._backward_of_ddp(loss)
        return None

    def _backward_of_ddp(self, loss: torch.Tensor) -> None:
        """DistributedDataParallel waits for its sums in the last callback of the pass, so the first one marks the wait.

        Callbacks run in the order in which they were queued; the loss's own hook comes before any layer's.
        """
        loss.register_hook(lambda gradient: torch_internals.after_backward(self._tracker.begin_wait))  # type: ignore[no-untyped-call]
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._tracker.resumes()

    def align_buffers(self, control: Control, average: nn.Module | None) -> None:
        """As the options of DistributedDataParallel say (torch 2.13 renamed that one)."""
        followed = getattr(self._parallel, "broadcast_buffers", True)
        if self._parallel is None or not getattr(self._parallel, "forward_sync_buffers", followed):
            return
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        models = (self.module, *(() if average is None else (average,)))
        share(control, [each for model in models for name, each in model.named_buffers() if name not in ignored])


class GradientSums:
    """Sums gradients over the ranks during the backward pass, with waits that the end of a round can interrupt.

    DistributedDataParallel waits for its buckets inside the backward pass, where nothing can interrupt it. Here its
    communication hook starts a bucket's sum and reports it done at once; gradients are views of the buckets, so nothing
    is copied; the wait for the sums comes after the pass. The hook does not divide by the number of ranks, which would
    be another pass over all gradients: the replica's ``share`` divides the loss instead.

    The hook refers to this object, which must not refer to the module: a cycle through C++.
    """

    def __init__(self, group: Any, works: InterruptibleWaits) -> None:
        self._group, self._works = group, works
        self.begun: list[Work] = []
        self.summed = self.complete = False
        """Whether the last pass of this step has summed, and whether the last of its buckets, which start in order, was
        started: then the sums hold all gradients of the step."""
        self._lost: RoundBrokenError | None = None

    def begin(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self.complete = bucket.is_last()
        try:
            with collective("all_reduce"):
                self.begun.append(self._works.begun(self._group.allreduce([buffer])))
        except RoundBrokenError as error:
            self._lost = error  # C++ calls this; raised after the pass
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def wait(self) -> None:
        """Wait for all sums of a pass."""
        begun, self.begun = self.begun, []
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
        with collective("all_reduce"):
            for work in begun:
                self._works.wait(work)
        self.summed = bool(begun)


class SyncContext:
    """The ranks of the present round, for all layers of a model; ``reduce`` sums a tensor over them, in place.
    ``counts``: the present samples are no filler."""

    def __init__(self) -> None:
        self.bind(0, 1, lambda tensor: None)

    def bind(self, rank: int, world_size: int, reduce: Callable[[torch.Tensor], None]) -> None:
        self.rank, self.world_size, self.reduce = rank, world_size, reduce
        self.counts = True


def share_batchnorm(module: nn.Module, context: SyncContext) -> nn.Module:
    """``module`` with every layer of batch normalization over all ranks; parameters, buffers and names stay."""
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        shared = SharedBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
        )
        shared.weight, shared.bias = module.weight, module.bias
        shared.running_mean, shared.running_var = module.running_mean, module.running_var
        shared.num_batches_tracked = module.num_batches_tracked
        shared.training = module.training
        shared.context = context
        return shared
    for name, child in module.named_children():
        module.add_module(name, share_batchnorm(child, context))
    return module


class SharedBatchNorm(BatchNorm):
    """As nn.BatchNorm1d, 2d or 3d, over the samples of all ranks while training. Input: (N, C, ...).

    For devices that torch's own SyncBatchNorm does not support. Each rank contributes mean, variance and count; they
    are combined as in Chan, Golub and LeVeque (1979), so no precision is lost by subtracting large squares. Ranks may
    have different numbers of samples; a filler's do not count.

    A single value per channel, as the last batch of an epoch may have, is not an error: its variance is 0.
    """

    context: SyncContext

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """torch's forward() calls it too."""
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        alone = self.context.world_size == 1 and input.numel() > input.shape[1]
        if alone or not self.training:  # in evaluation ranks have different numbers of batches
            return super().forward(input)
        output: torch.Tensor
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.context)  # type: ignore[no-untyped-call]
        if self.track_running_stats:
            self._move(mean, variance, float(count))
        return output

    @torch.no_grad()
    def _move(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)


class _Normalize(torch.autograd.Function):
    """Statistics of all ranks; the backward pass sums over all ranks again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, context: SyncContext) -> Any:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        axes = [axis for axis in range(x.dim()) if axis != 1]
        mean, variance, count = _joined(wide, axes, context)
        shape = [1, -1] + [1] * (x.dim() - 2)
        scale = torch.rsqrt(variance + eps)
        normal = (wide - mean.view(shape)) * scale.view(shape)
        output = normal
        if weight is not None:
            output = normal * weight.view(shape).to(wide.dtype) + bias.view(shape).to(wide.dtype)
        ctx.save_for_backward(normal, scale, weight)
        ctx.context, ctx.axes, ctx.shape, ctx.count, ctx.counts = context, axes, shape, count, context.counts
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        normal, scale, weight = ctx.saved_tensors
        shape, axes = ctx.shape, ctx.axes
        wide = grad.to(normal.dtype)
        total, along = wide.sum(axes), (wide * normal).sum(axes)
        of_all = torch.cat([total, along])
        ctx.context.reduce(of_all)
        mean_total, mean_along = (of_all / ctx.count).chunk(2)
        back = wide
        if ctx.counts:  # a filler has no part in the statistics
            back = wide - mean_total.view(shape) - normal * mean_along.view(shape)
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        weights = (along.to(weight.dtype), total.to(weight.dtype)) if weight is not None else (None, None)
        return (back * factor.view(shape)).to(grad.dtype), *weights, None, None


def _joined(x: torch.Tensor, axes: list[int], context: SyncContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and (biased) variance per channel over all ranks, and the number of values."""
    channels = x.shape[1]
    stats = x.new_zeros(context.world_size, 2 * channels + 1)
    if context.counts and x.numel():
        variance, mean = torch.var_mean(x, axes, correction=0)
        stats[context.rank] = torch.cat([mean, variance, x.new_tensor([x.numel() / channels])])
    context.reduce(stats)
    means, variances, counts = stats[:, :channels], stats[:, channels:-1], stats[:, -1:]
    count = counts.sum().clamp_(min=1.0)
    mean = (counts * means).sum(0) / count
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
    return mean, variance, count
