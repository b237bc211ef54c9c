"""This rank's stages of a model that is computed in stages, one behind the other (``torch.distributed.pipelining``).

The script builds the whole model on the meta device on all ranks, and gives memory to its own stages alone; what stays
on the meta device is other stages'. So parameters, the optimizer's groups and checkpoints have the names and the order
of the whole model on every rank. Each stage is sharded by FSDP, over one process or several. Stages draw the same
samples, and a schedule of torch's sends micro-batches through them, over the group of their dimension of the mesh. With
several stages on each rank the schedule is interleaved.

*Runs in* the worker's main thread.
*Fails by* ConfigError for a model that is not divided into stages, RoundBrokenError when a peer is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    schedules,
)

from elastic_trainer import torch_internals
from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.control import Control, packed_tensor, unpacked_tensor
from elastic_trainer.worker.comm.groups import FormTimeouts
from elastic_trainer.worker.comm.lasting import ShardLayout
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.model.replica import share
from elastic_trainer.worker.model.sharded import ShardedReplica, check_parameter

Inputs = tuple[torch.Tensor, ...]
_OF_ONE: dict[str, Any] = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
_OF_SEVERAL: dict[str, Any] = {"Interleaved1F1B": ScheduleInterleaved1F1B, "LoopedBFS": ScheduleLoopedBFS}
"""With one stage on each rank, and with several. The first one is the default."""


class StagedReplica(ShardedReplica):
    """See the module. ``stages`` were made with the group of a dimension of the session's mesh."""

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        layout: ShardLayout,
        patience: FormTimeouts,
        stages: Sequence[PipelineStage],
        *,
        in_place: bool,
    ) -> None:
        self._stages = sorted(stages, key=lambda each: each.stage_index)
        self._count, groups = self._stages[-1].num_stages, {id(each.group) for each in stages}
        layout.stages = next((dim for dim, group in enumerate(layout.dims) if groups == {id(group)}), None)
        torch_internals.require(torch_internals.STAGES)
        if layout.stages is None:
            raise ConfigError(
                "the pipeline stages are not over a dimension of the session's mesh",
                hint="PipelineStage(..., mesh['pp'].get_local_rank(), mesh['pp'].size(), group=mesh.get_group('pp'))",
            )
        self._rank, self._ranks = layout.coordinate[layout.stages], layout.shape[layout.stages]
        here = [each.stage_index for each in self._stages]
        if here != list(range(self._rank, self._count, self._ranks)) or self._count % self._ranks:
            raise ConfigError(
                f"rank {self._rank} of {self._ranks} has the pipeline stages {here} of {self._count}",
                hint=f"give it {self._rank}, {self._rank + self._ranks} and so on: equally many on each rank",
            )
        self.loss_weight = self._ranks if self._stages[-1].is_last else 0
        self._schedule: tuple[Any, Any] | None = None
        """The present one, and what it was made for."""
        super().__init__(module, placement, layout, patience, in_place=in_place)

    def _modules(self, module: nn.Module) -> list[nn.Module]:
        return [each for stage in self._stages for each in stage.submod.modules()]

    def _moved(self, module: nn.Module, device: torch.device) -> nn.Module:
        for stage in self._stages:
            stage.submod.to(device)
        return module

    def _check(self, module: nn.Module, layout: ShardLayout) -> None:
        if not all(isinstance(stage.submod, FSDPModule) for stage in self._stages):
            raise ConfigError(
                "the module of a pipeline stage is not sharded",
                hint="call fully_shard(stage, mesh=mesh['dp_shard']) on all of it; that dimension may be 1",
            )
        here = {id(each) for stage in self._stages for each in stage.submod.parameters()}
        for name, parameter in module.named_parameters():
            if id(parameter) in here:
                check_parameter(name, parameter, layout)
            elif not parameter.is_meta:
                raise ConfigError(
                    f"parameter {name!r} has memory on this rank and is in no stage of it",
                    hint="build the whole model on the meta device, and call to_empty() on this rank's stages alone",
                )
        if here - {id(each) for each in module.parameters()}:
            raise ConfigError(
                "a pipeline stage has parameters that the model does not have",
                hint="give session.wrap() the whole model, of whose modules each rank's stages are made",
            )

    # ---- rounds

    def release(self) -> None:
        super().release()
        self._end_pass()

    def undo(self) -> None:
        super().undo()
        self._end_pass()

    def _end_pass(self) -> None:
        self._schedule = None
        torch_internals.leave_schedule(self._stages)
        self.reshard()

    def level(self) -> None:
        """Each parameter has to be in the stages of one rank."""
        mine = bytes(not each.is_meta for each in self.module.parameters())
        rows = self.groups.peers.gather_bytes(mine)
        dim: Any = self._layout.stages
        numbers = self._layout.mesh.mesh.movedim(dim, 0).flatten(1)
        of_stages = [[rows[rank] for rank in ranks] for ranks in numbers.tolist()]
        for position, (name, _) in enumerate(self.module.named_parameters()):
            stages = sum(all(row[position] for row in rows) for rows in of_stages)
            if stages != 1 or sum(any(row[position] for row in rows) for rows in of_stages) != 1:
                raise ConfigError(
                    f"parameter {name!r} is in the stages of {stages} ranks",
                    hint="put each module into a stage of one rank",
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
        mine, dim = {stage.stage_index: stage for stage in self._stages}, self._layout.stages or 0
        for stage in self._stages:
            stage.submod.training = self.module.training
        control = Control(self.groups.parts[dim], self._rank, self._ranks, self.groups.works)
        for number in range(self._count):
            found = mine[number].submod(*inputs) if number in mine else ()
            outputs, owner = found if isinstance(found, tuple) else (found,), number % self._ranks
            (count,) = control.broadcast_bytes(bytes([len(outputs)]), owner)
            given = outputs or (torch.empty(0),) * count
            packed = [control.broadcast_bytes(packed_tensor(each), owner) for each in given]
            inputs = outputs or tuple(unpacked_tensor(each).to(self._placement.device) for each in packed)
        return inputs if len(inputs) > 1 else inputs[0]

    def run(
        self, schedule: str | None, inputs: Sequence[Inputs], loss_of: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> None:
        """Send micro-batches through all stages and back; gradients are then summed over the replicas.

        ``inputs`` are those of the first stage, and ``loss_of(output, number)`` is called on the last one, for each
        micro-batch.
        """
        rows = max(len(each[0]) for each in inputs)
        alike = [_padded(each, rows) for each in inputs]
        given = [torch.cat(each) for each in zip(*alike, strict=True)] if self._stages[0].is_first else []
        numbers = torch.arange(len(inputs)) if self._stages[-1].is_last else None
        self._loss_of = loss_of
        chosen = self._for(schedule, alike, numbers)
        self._pass(lambda: chosen.step(*given, target=numbers, return_outputs=False))

    def _for(self, name: str | None, inputs: Sequence[Inputs], numbers: torch.Tensor | None) -> Any:
        """The schedule for micro-batches like these, kept until they change."""
        wanted = name, len(inputs), [(each.shape, each.dtype) for each in inputs[0]]
        if self._schedule is None or self._schedule[1] != wanted:
            kind, several = schedule_for(name, len(inputs), self._count, self._ranks), len(self._stages) > 1
            made = kind(
                self._stages if several else self._stages[0], len(inputs), loss_fn=self._loss, scale_grads=False
            )
            buffers = [(each, each.clone()) for stage in self._stages for each in stage.submod.buffers()]
            first = inputs[0] if self._stages[0].is_first else ()
            # torch 2.15 takes this process's rank in the default group for its shard rank.
            with torch_internals.default_group(self._layout.whole):
                torch_internals.begin_schedule(made, several, first, None if numbers is None else numbers[:1])
            for each, before in buffers:
                each.copy_(before)
            self._schedule = made, wanted
        return self._schedule[0]

    def _loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """What the schedule calls; each micro-batch's target is its number."""
        return self._loss_of(output, int(number))

    # ---- what ranks share

    def share_buffers(self) -> None:
        """Give all ranks of a stage those of its first one."""
        if not self._with_buffers:
            return
        held = self._saved_buffers
        for dim, group in enumerate(self._layout.dims):
            for each in held if dim != self._layout.stages and group.size() > 1 else []:
                group.broadcast([each.detach()], dist.BroadcastOptions()).wait()
        share(self.groups.copies, held)


def schedule_for(name: str | None, micro_batches: int, stages: int, ranks: int) -> Any:
    """torch's schedule ``name``, or one that takes any number of micro-batches where that one would refuse theirs.

    1F1B needs one for each stage; Interleaved1F1B equally many in each of its rounds, which have one or more for each
    rank.
    """
    one = stages == ranks
    known = _OF_ONE if one else _OF_SEVERAL
    default, other = known.values()
    if name is not None and name not in known:
        raise ConfigError(
            f"step.pipeline(schedule={name!r}), and each rank has {'one stage' if one else 'several stages'}",
            hint=f"known are {', '.join(_OF_ONE)} with one stage, {', '.join(_OF_SEVERAL)} with several",
        )
    fits = micro_batches >= stages if one else micro_batches % max(1, micro_batches // ranks) == 0
    return (default if name is None else known[name]) if fits else other


# Each fault in a pass is an exception there. It would log the whole schedule, and the exception says where it was.
logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)


def _padded(inputs: Inputs, rows: int) -> Inputs:
    """``inputs`` with as many rows as the stages expect; nobody looks at what comes out of the added ones."""
    return tuple(
        each if len(each) == rows else torch.cat([each, each[:1].expand(rows - len(each), *each.shape[1:])])
        for each in inputs
    )
