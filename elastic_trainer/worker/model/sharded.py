"""This rank's part of a model that FSDP2 or tensor parallel has sharded within a node, with replicas on other nodes.

FSDP sums gradients over the shard group; its hook starts the second sum, over the replicas. All sums are plain: the
share of the global batch is in the loss, so that the number of replicas may change. Native HSDP would put that number
into every DTensor.

The hook may start the second sum only if FSDP neither casts nor adds up what it then stores as ``.grad``; else finished
gradients are summed after the last pass.

*Runs in* the worker's main thread; on CUDA the hook runs in autograd's.
*Fails by* ConfigError for a model that is not wholly sharded over the session's mesh, RoundBrokenError when a peer is
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel

from elastic_trainer import torch_internals
from elastic_trainer.checkpoint.codec import local
from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError, RoundBrokenError
from elastic_trainer.worker.comm.control import Control, InterruptibleWaits, Pending, Purpose, collective
from elastic_trainer.worker.comm.groups import FormTimeouts, Group, ShardGroups, form_shard_groups
from elastic_trainer.worker.comm.lasting import ShardLayout
from elastic_trainer.worker.comm.node_sums import on_this_node
from elastic_trainer.worker.comm.placement import NCCL, Placement
from elastic_trainer.worker.model.replica import DataPart, Pass, Replica, Use, by_kind, checked_decay, share, unflatten


def check_parameter(name: str, parameter: nn.Parameter, layout: ShardLayout) -> None:
    """ConfigError unless it is a shard over the mesh of ``layout``, with memory."""
    if not isinstance(parameter, DTensor):
        raise ConfigError(
            f"parameter {name!r} is not sharded, and others are",
            hint="call fully_shard() on the whole model too, or give its module a place in parallelize_module()",
        )
    used = torch_internals.group_names(parameter.device_mesh) or [""]
    if not {group.group_name for group in layout.groups.values()}.issuperset(used):
        raise ConfigError(
            f"parameter {name!r} is sharded over another mesh than the session's",
            hint="shard with mesh=session.init_device_mesh(...), inside `with session.parallelizing():`",
        )
    if local(parameter).is_meta:
        raise ConfigError(
            f"parameter {name!r} is on the meta device",
            hint="call model.to_empty(device=session.device) and initialise the model before session.wrap()",
        )


def warm_up(device: torch.device) -> None:
    """Make the first step of FSDP, with its imports, before others wait for this process: it takes up to a second."""
    alone, toy = ShardLayout(device.type, (1,), ("alone",), 0, 1), nn.Linear(2, 2, device=device)
    with alone.parallelizing():
        fully_shard(toy, mesh=alone.mesh)
    alone.enter(None, [None], InterruptibleWaits())
    toy(torch.ones(1, 2, device=device)).sum().backward()
    torch.optim.AdamW(toy.parameters()).step()
    alone.leave()


class ShardedReplica(Replica):
    """See the module. ``layout`` is that of the session's mesh; ``patience`` limits the forming of groups."""

    refused: Mapping[Use, tuple[str, str]] = {
        Use.CLOSURE: ("a sharded model does not go with a closure", "call optimizer.step() after step.backward(loss)"),
        Use.FUSED_SCALER: (
            "a GradScaler with a fused optimizer does not go with a sharded model",
            "leave fused=True out",
        ),
        Use.MANUAL_STEP: (
            "begin_step() of a sharded model, which no rank can compute alone",
            "use `with session.step()`",
        ),
        Use.AUDIT: ("audit_every does not go with a model that is sharded or in stages", "leave it out"),
    }
    fitted = True

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        layout: ShardLayout,
        patience: FormTimeouts,
        *,
        in_place: bool,
    ) -> None:
        self._check(module, layout)
        if in_place:
            warm_up(placement.device)
        super().__init__(module, placement, in_place=in_place)
        self.layout = self._layout = layout
        self._patience = patience
        self._fsdp = [each for each in self._modules(module) if isinstance(each, FSDPModule)]
        for each in self._fsdp:
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
            each.set_all_reduce_hook(partial(self._reduced, each))
            if placement.device.type == "cpu" and len(torch_internals.fsdp_groups(each)) == 1:
                torch_internals.call_collectives_directly(each)
        self._parameters = [each for each in module.parameters() if isinstance(each, DTensor)]
        groups = (group for each in self._fsdp for group in torch_internals.fsdp_groups(each))
        names = {name for group in groups for name in group.mesh_info.mesh.mesh_dim_names or ()}
        self._data_dims = sorted({dim for name in names for dim in layout.axes.get(name, ())})
        """The dimensions of the mesh along which ranks draw different samples."""
        self._groups: ShardGroups | None = None
        self._begun: list[Any] = []
        self._begun_in: set[int] = set()
        """Memory whose sum over the replicas was started."""
        self._starts = self._holds = self.summed = False
        self._passes: list[Pending] | None = None
        """What was announced of forward passes since the last meeting; None outside of steps."""
        self.runner.go_through(self._called)
        self._control = Control()
        kept = ((each, torch_internals.saved_buffers(each)) for each in self._modules(module))
        self._with_buffers = [(each, tuple(sorted(names))) for each, names in kept if names]

    def _modules(self, module: nn.Module) -> list[nn.Module]:
        """Those that this rank computes."""
        return list(module.modules())

    def _check(self, module: nn.Module, layout: ShardLayout) -> None:
        for name, parameter in module.named_parameters():
            check_parameter(name, parameter, layout)

    def averaged(self, wanted: float | AveragedModel | None) -> AveragedModel | None:
        return None if wanted is None else ShardedAverage(self.module, checked_decay(wanted))

    # ---- rounds

    @property
    def groups(self) -> ShardGroups:
        """Those of the present round."""
        if self._groups is None:
            raise RoundBrokenError("the round of this rank has been left")
        return self._groups

    def join(self, group: Group) -> None:
        groups = group.shards
        if groups is None:
            nccl = self._placement.backend == NCCL and not group.control.alone
            at = group.formation.gloo_addresses()
            groups = form_shard_groups(self._layout, group.fresh, group.control, self._patience, at, nccl=nccl)
        limit = timedelta(seconds=self._patience.working_s)
        if not self._layout.spans_nodes:
            groups = replace(groups, peers=on_this_node(groups.peers, limit))
        self._groups, self._begun = groups, []
        self._layout.enter(groups.whole, groups.parts, groups.works, limit)

    def alike(self, control: Control) -> Control:
        return self.groups.copies

    @property
    def peers(self) -> Control | None:
        return self.groups.peers

    def part(self, control: Control) -> DataPart:
        mine, size = 0, 1
        for dim in self._data_dims:
            mine, size = mine * self._layout.shape[dim] + self._layout.coordinate[dim], size * self._layout.shape[dim]
        first = all(
            self._layout.coordinate[dim] == 0 for dim in range(len(self._layout.shape)) if dim not in self._data_dims
        )
        groups, alike = self.groups, self._layout.size // size
        mine += groups.number * size
        return DataPart(mine, groups.count * size, alike, first=first, even=True, always_even=True)

    def bind(self, control: Control) -> None:
        super().bind(control)
        self.share, self._control = 1.0 / self.averaged_over, control

    def release(self) -> None:
        """FSDP may be anywhere inside a pass. Finished gradients stay: a peer may have committed the step."""
        self._groups = self._passes = None
        self._begun = []
        torch_internals.leave_fsdp_pass(self._fsdp)
        self._layout.leave()

    def fit(self, control: Control, change: str) -> None:
        raise ConfigError(
            f"{change} after session.wrap(), and a sharded model keeps what is trained",
            hint="freeze parameters before fully_shard(); lr=0 holds a group still",
        )

    # ---- steps

    def begin_step(self, *, counts: bool = True) -> None:
        super().begin_step(counts=counts)
        self.summed = self._holds = False
        self._passes = []
        self.reshard()

    def reshard(self) -> None:
        """A forward pass without a backward pass (an evaluation) leaves the root's parameters whole."""
        for each in self._fsdp:
            each.reshard()

    def undo(self) -> None:
        super().undo()
        self.summed = self._holds = False
        self._passes = None

    def before_backward(self, part: Batch | None, done: Collection[int]) -> float:
        self._meet(Purpose.BACKWARD)
        return super().before_backward(part, done)

    def _called(self, *inputs: Any, **named: Any) -> Any:
        """The model. In a step the call is announced: if peers call it less often, they find out where they meet next.

        This rank would wait for them in its first layer.
        """
        if self._passes is not None:
            self._passes.append(self.groups.peers.start(Purpose.FORWARD, []))
        return self.runner.called(*inputs, **named)

    def _meet(self, purpose: Purpose, *values: float) -> None:
        """Wait for the shard group; ConfigError if a rank of it does something else."""
        passes, self._passes = self._passes or [], []
        for each in passes:
            each.wait()
        self.groups.peers.sum(purpose, values)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes sum over the shard group only: the whole gradient has no place in memory."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    def backward(self, loss: torch.Tensor, about: Pass | None = None) -> float | None:
        self._pass(loss.backward)
        return None

    def _pass(self, backward: Callable[[], object]) -> None:
        if self.summed and self.groups.count > 1:  # the sum will be summed again together with what is new
            self.scale_gradients(1.0 / self.groups.count)
        self._starts = not self._holds and all(each.grad is None for each in self._parameters)
        self._begun_in.clear()
        backward()
        if not self._holds:
            self._sum_over_replicas()
            self.summed = True

    def _reduced(self, module: FSDPModule, output: torch.Tensor) -> None:
        """FSDP has summed a parameter group's gradient over the shard group; ``.grad`` will be views of ``output``."""
        groups = self.groups
        params = [each for group in torch_internals.fsdp_groups(module) for each in group.fsdp_params]
        if groups.replicas is None or not self._starts:
            return
        if any(each.offload_to_cpu or (each.orig_dtype or output.dtype) != output.dtype for each in params):
            return
        with collective("all_reduce"):
            work = groups.works.begun(groups.replicas.allreduce([output]))
            if groups.on_stream:
                work.wait()
            else:
                self._begun.append(work)
        self._begun_in.add(output.untyped_storage().data_ptr())

    def _sum_over_replicas(self) -> None:
        groups = self.groups
        for each in self._parameters:  # tensor parallel alone may leave gradients that its ranks have not added up
            if isinstance(each.grad, DTensor) and each.grad.placements != each.placements:
                each.grad = each.grad.redistribute(placements=each.placements)
        begun, self._begun = self._begun, []
        with collective("all_reduce"):
            for work in begun:
                groups.works.wait(work)
        if groups.replicas is None:
            return
        here = [local(each.grad) for each in self._parameters if each.grad is not None]
        left = (each for each in here if each.untyped_storage().data_ptr() not in self._begun_in and each.numel())
        for gradients in by_kind(left):
            flat = torch.cat([each.reshape(-1) for each in gradients])
            with collective("all_reduce"):
                groups.works.wait(groups.works.begun(groups.replicas.allreduce([flat])))
            unflatten(flat, gradients)

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, over all shards; parameters may be on different parts of the mesh."""
        held = [(local(each.grad), self._copies_of(each)) for each in self._parameters if each.grad is not None]
        norms = torch._foreach_norm([each for each, _ in held], 2, dtype=torch.float64) if held else ()
        found = torch.stack([each.cpu() for each in norms]).tolist() if norms else []
        squares = [norm**2 / copies for (_, copies), norm in zip(held, found, strict=True)]
        total = self.groups.peers.sum(Purpose.NORM, [sum(squares)])[0] ** 0.5
        self.scale_gradients(min(1.0, max_norm / (total + 1e-6)))
        return torch.tensor(total, dtype=torch.float32)

    def _copies_of(self, parameter: DTensor) -> int:
        """How many ranks of the shard group hold what this one does."""
        stages = self._layout.shape[self._layout.stages] if self._layout.stages is not None else 1
        shape, placements = parameter.device_mesh.shape, parameter.placements
        sharded = [size for size, each in zip(shape, placements, strict=True) if not isinstance(each, Replicate)]
        return self._layout.size // stages // int(torch.Size(sharded).numel())

    def commit_together(self, number: int) -> None:
        """The commit barrier: passed by one rank of the shard group only when all are ready to commit step ``number``.

        A shard behind its peers is in no whole state. With groups of several nodes all ranks have to be ready:
        survivors of two groups may have to form a whole one, and then all make the step that one of them has made.
        """
        self.prepared = number
        self._meet(Purpose.COMMIT, float(number))
        self._passes = None
        if self._layout.spans_nodes:
            self.groups.copies.sum(Purpose.COMMIT, [float(number)])

    def anywhere(self, flag: bool) -> bool:
        return self.groups.peers.sum(Purpose.NORM, [float(flag)])[0] > 0.0

    # ---- what ranks share

    def level(self) -> None:
        """Give all ranks of the shard group the first one's values of parameters that they have in common."""
        for each in self._parameters:
            held = zip(each.device_mesh.mesh_dim_names or (), each.placements, strict=True)
            cut = {dim for name, how in held if not isinstance(how, Replicate) for dim in self._layout.axes[name]}
            for dim, group in enumerate(self._layout.dims):
                if dim != self._layout.stages and dim not in cut:
                    group.broadcast([local(each.detach())], dist.BroadcastOptions()).wait()

    @property
    def _saved_buffers(self) -> list[torch.Tensor]:
        found = [torch_internals.buffers_of(module)[name] for module, names in self._with_buffers for name in names]
        return [each for each in found if each is not None]

    def share_buffers(self) -> None:
        """Give all ranks rank 0's."""
        share(self._control, self._saved_buffers)

    def align_buffers(self, control: Control, average: nn.Module | None) -> None:
        """An average computes with the live buffers."""
        self.reshard()
        self.share_buffers()


# ---- the average of its parameters


class _Averaged(nn.Module):
    """The live module, computing with the averaged parameters; without gradients."""

    def __init__(self, live: nn.Module) -> None:
        super().__init__()
        self.live = live
        self.parameters_here = list(live.parameters())
        self.averaged = [each.detach().clone() for each in self.parameters_here]

    @torch.no_grad()
    def forward(self, *inputs: Any, **named: Any) -> Any:
        self._reshard()
        held = [local(each.detach()) for each in self.parameters_here]
        own = [each.clone() for each in held]
        torch._foreach_copy_(held, [local(each) for each in self.averaged])
        try:
            return self.live(*inputs, **named)
        finally:
            self._reshard()
            torch._foreach_copy_(held, own)

    def _reshard(self) -> None:
        for each in self.live.modules():
            if isinstance(each, FSDPModule):
                each.reshard()

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: mine if mine is not None else each.detach() for name, each, mine in self._kept()}

    def _kept(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Live tensors and their averages, under their names in a state dict: wrappers change the other names."""
        mine = {id(own): each for own, each in zip(self.parameters_here, self.averaged, strict=True)}
        for name, each in self.live.state_dict(keep_vars=True).items():
            yield name, each, mine.get(id(each))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        for name, _, mine in self._kept():
            if mine is not None:
                mine.copy_(state_dict[name])


class ShardedAverage(AveragedModel):
    """As torch's AveragedModel with an exponential average of this ``decay``, and with its state dict."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        nn.Module.__init__(self)
        self._decay = decay
        self.module = self._inner = _Averaged(module)
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        mine = [local(each) for each in self._inner.averaged]
        present = [local(each.detach()) for each in self._inner.parameters_here]
        if self.n_averaged == 0:
            torch._foreach_copy_(mine, present)
        else:
            torch._foreach_lerp_(mine, present, 1.0 - self._decay)
        self.n_averaged += 1

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        inner = {f"module.{name}": each for name, each in self.module.state_dict().items()}
        return {"n_averaged": self.n_averaged, **inner}

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        self.module.load_state_dict({name.removeprefix("module."): each for name, each in state_dict.items()})
        self.n_averaged.copy_(state_dict["n_averaged"])
