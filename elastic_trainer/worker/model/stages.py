"""This rank's stage of a model that is computed in stages, one behind the other (``torch.distributed.pipelining``).

The script builds the whole model on the meta device on all ranks, and gives memory to its own stage alone; what stays
on the meta device is other stages'. So parameters, the optimizer's groups and checkpoints have the names and the order
of the whole model on every rank. Each stage is sharded by FSDP, over one process or several. Stages draw the same
samples, and a schedule of torch's sends micro-batches through them, over the group of their dimension of the mesh.

*Runs in* the worker's main thread.
*Fails by* ConfigError for a model that is not divided into stages, RoundBrokenError when a peer is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.codecs import packed_tensor, unpacked_tensor
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.lasting import ShardLayout
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.comm.shard_groups import FormTimeouts
from elastic_trainer.worker.model.buffers import share
from elastic_trainer.worker.model.sharded import ShardedReplica, check_parameter
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter

Inputs = tuple[torch.Tensor, ...]
_SCHEDULES: dict[str, Any] = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


class StagedReplica(ShardedReplica):
    """See the module. ``stage`` was made with the group of a dimension of the session's mesh."""

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        tracker: HeartbeatReporter,
        layout: ShardLayout,
        patience: FormTimeouts,
        stage: PipelineStage,
        *,
        lasting: bool,
    ) -> None:
        layout.stages = next((dim for dim, group in enumerate(layout.dims) if group is stage.group), None)
        if layout.stages is None or layout.shape[layout.stages] != stage.num_stages:
            raise ConfigError(
                "the pipeline stage is not over a dimension of the session's mesh with one process for each stage",
                hint="PipelineStage(..., mesh['pp'].get_local_rank(), mesh['pp'].size(), group=mesh.get_group('pp'))",
            )
        self._stage, self.stands_for = stage, stage.num_stages if stage.is_last else 0
        self._schedule: tuple[Any, Any] | None = None
        """The present one, and what it was made for."""
        super().__init__(module, placement, tracker, layout, patience, lasting=lasting)

    def _modules(self, module: nn.Module) -> list[nn.Module]:
        return list(self._stage.submod.modules())

    def _moved(self, module: nn.Module, device: torch.device) -> nn.Module:
        self._stage.submod.to(device)
        return module

    def _check(self, module: nn.Module, layout: ShardLayout) -> None:
        if not isinstance(self._stage.submod, FSDPModule):
            raise ConfigError(
                "the module of the pipeline stage is not sharded",
                hint="call fully_shard(stage, mesh=mesh['dp_shard']) on all of it; that dimension may be 1",
            )
        here = {id(each) for each in self._stage.submod.parameters()}
        for name, parameter in module.named_parameters():
            if id(parameter) in here:
                check_parameter(name, parameter, layout)
            elif not parameter.is_meta:
                raise ConfigError(
                    f"parameter {name!r} has memory on this rank and is not in its stage",
                    hint="build the whole model on the meta device, and call to_empty() on this rank's stage alone",
                )
        if here - {id(each) for each in module.parameters()}:
            raise ConfigError(
                "the pipeline stage has parameters that the model does not have",
                hint="give session.wrap() the whole model, of whose modules each rank's stage is made",
            )

    # ---- rounds

    def release(self) -> None:
        super().release()
        self._end_pass()

    def undo(self) -> None:
        super().undo()
        self._end_pass()

    def _end_pass(self) -> None:
        """The schedule may be anywhere; transfers of its round may still write to its buffers, so it gets new ones."""
        self._schedule = None
        self._stage.clear_runtime_states()
        self._stage.bwd_cache.clear()
        self.reshard()

    def level(self) -> None:
        """Each parameter has to be in one stage."""
        mine = bytes(not each.is_meta for each in self.module.parameters())
        rows = self.groups.peers.gather_bytes(mine)
        dim: Any = self._layout.stages
        numbers = self._layout.mesh.mesh.movedim(dim, 0).flatten(1)
        of_stages = [[rows[place] for place in places] for places in numbers.tolist()]
        for position, (name, _) in enumerate(self.module.named_parameters()):
            stages = sum(all(row[position] for row in rows) for rows in of_stages)
            if stages != 1 or sum(any(row[position] for row in rows) for rows in of_stages) != 1:
                raise ConfigError(
                    f"parameter {name!r} is in {stages} stages", hint="put each module into the stage of one rank"
                )
        super().level()

    # ---- steps

    def unwrap(self, model: nn.Module) -> nn.Module:
        """No rank can call the bare module, whose other stages have no memory here."""
        found = super().unwrap(model)
        return self.runner if found is self.module else found

    def _called(self, *inputs: Any, **named: Any) -> Any:
        """Without gradients: one stage after the other, each of which gives what comes out of it to all."""
        if torch.is_grad_enabled() or named:
            raise ConfigError(
                "a call of a model that is computed in stages, with gradients or keyword arguments",
                hint="train with step.pipeline(loss); evaluate with session.evaluate(), or under torch.no_grad()",
            )
        stage, dim = self._stage, self._layout.stages or 0
        stage.submod.training = self.module.training
        control = Control(self.groups.dims[dim], stage.stage_index, stage.num_stages, self.groups.works)
        for number in range(stage.num_stages):
            found = stage.submod(*inputs) if number == stage.stage_index else ()
            outputs = found if isinstance(found, tuple) else (found,)
            (count,) = control.broadcast_bytes(bytes([len(outputs)]), number)
            given = outputs or (torch.empty(0),) * count
            packed = [control.broadcast_bytes(packed_tensor(each.cpu().contiguous()), number) for each in given]
            inputs = outputs or tuple(unpacked_tensor(each).to(stage.device) for each in packed)
        return inputs if len(inputs) > 1 else inputs[0]

    def run(
        self, schedule: str, inputs: Sequence[Inputs], loss_of: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> None:
        """Send micro-batches through all stages and back; gradients are then summed over the replicas.

        ``inputs`` are those of the first stage, and ``loss_of(output, number)`` is called on the last one, for each
        micro-batch.
        """
        rows = max(len(each[0]) for each in inputs)
        alike = [_padded(each, rows) for each in inputs]
        given = [torch.cat(each) for each in zip(*alike, strict=True)] if self._stage.is_first else []
        numbers = torch.arange(len(inputs)) if self._stage.is_last else None
        self._loss_of = loss_of
        chosen = self._for(schedule, alike, numbers)
        self._pass(lambda: chosen.step(*given, target=numbers, return_outputs=False))

    def _for(self, name: str, inputs: Sequence[Inputs], numbers: torch.Tensor | None) -> Any:
        """The schedule for micro-batches like these; 1F1B needs at least as many as there are stages."""
        if name not in _SCHEDULES:
            raise ConfigError(f"step.pipeline(schedule={name!r})", hint=f"known are {', '.join(_SCHEDULES)}")
        kind = _SCHEDULES[name] if len(inputs) >= self._stage.num_stages else ScheduleGPipe
        wanted = kind, len(inputs), [(each.shape, each.dtype) for each in inputs[0]]
        if self._schedule is None or self._schedule[1] != wanted:
            made: Any = kind(self._stage, len(inputs), loss_fn=self._loss, scale_grads=False)
            buffers = [(each, each.clone()) for each in self._stage.submod.buffers()]
            first = inputs[0] if self._stage.is_first else ()
            made._initialize_stage(first, {}, None if numbers is None else numbers[:1])  # computes one, to see shapes
            for each, before in buffers:
                each.copy_(before)
            self._schedule = made, wanted
        return self._schedule[0]

    def _loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """What the schedule calls; each micro-batch's target is its number."""
        return self._loss_of(output, int(number))

    # ---- what places share

    def share_buffers(self) -> None:
        """Give all ranks of a stage those of its first one."""
        if not self._with_buffers:
            return
        found = [module._buffers[name] for module, names in self._with_buffers for name in names]
        held = [each for each in found if each is not None]
        for dim, group in enumerate(self._layout.dims):
            for each in held if dim != self._layout.stages and group.size() > 1 else []:
                group.broadcast([each.detach()], dist.BroadcastOptions()).wait()
        share(self.groups.copies, held)


def _padded(inputs: Inputs, rows: int) -> Inputs:
    """``inputs`` with as many rows as the stages expect; nobody looks at what comes out of the added ones."""
    return tuple(
        each if len(each) == rows else torch.cat([each, each[:1].expand(rows - len(each), *each.shape[1:])])
        for each in inputs
    )
