"""What a script gives ``session.wrap``, and which replica trains it.

*Runs in* the worker's main thread.
*Fails by* ConfigError for what does not go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.lasting import ShardLayout
from elastic_trainer.worker.model.local import Apart, LocalReplica
from elastic_trainer.worker.model.replica import Reduction, Replica, is_sharded
from elastic_trainer.worker.model.several import SeveralReplica
from elastic_trainer.worker.state.optimizer_set import OptimizerSet
from elastic_trainer.worker.state.training_state import Stateful
from elastic_trainer.worker.steps.engine import Workplace
from elastic_trainer.worker.steps.options import OnShortage


@dataclass(frozen=True, slots=True)
class Wrapped:
    """What a script trains. ``user`` are its registered objects, ``pending`` states of those not registered yet."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    sync_batchnorm: bool
    reduction: Reduction
    apart: Apart | None
    average: float | AveragedModel | None
    ddp_options: Mapping[str, Any]
    layout: ShardLayout | None
    stages: Sequence[Any]
    user: dict[str, Stateful]
    pending: dict[str, Any]


def replica_of(place: Workplace, wrapped: Wrapped) -> Replica:
    """The replica for what was ``wrapped``."""
    reduction, lasting = wrapped.reduction, place.environment.in_place
    if wrapped.apart is not None:
        _check_apart(place, wrapped, wrapped.apart)
        return LocalReplica(wrapped.model, place.placement, place.tracker, wrapped.apart, lasting=lasting)
    if isinstance(wrapped.optimizer, OptimizerSet):
        _check_several(wrapped, reduction)
        return SeveralReplica(wrapped.model, place.placement, place.tracker, lasting=lasting)
    if not is_sharded(wrapped.model) and not wrapped.stages:
        return Replica(
            wrapped.model,
            place.placement,
            wrapped.ddp_options,
            place.tracker,
            sync=wrapped.sync_batchnorm,
            lasting=lasting,
            reduction=reduction,
        )
    _refuse(
        ("reduction='tree'", reduction is Reduction.TREE),
        ("ddp_options", bool(wrapped.ddp_options)),
        ("sync_batchnorm", wrapped.sync_batchnorm),
        to="a sharded model",
        hint="leave it out: FSDP sums the gradients there",
    )
    if wrapped.layout is None:
        raise ConfigError(
            "the model is sharded, and not over a mesh of the session's",
            hint="shard it with mesh=session.init_device_mesh(...), inside `with session.parallelizing():`",
        )
    # slow to import, and what most jobs do not need
    if wrapped.stages:
        if wrapped.average is not None:
            raise ConfigError("average does not go with stages", hint="leave it out")
        from elastic_trainer.worker.model.stages import StagedReplica

        return StagedReplica(
            wrapped.model,
            place.placement,
            place.tracker,
            wrapped.layout,
            place.timeouts,
            wrapped.stages,
            lasting=lasting,
        )
    from elastic_trainer.worker.model.sharded import ShardedReplica

    return ShardedReplica(
        wrapped.model, place.placement, place.tracker, wrapped.layout, place.timeouts, lasting=lasting
    )


def _check_several(wrapped: Wrapped, reduction: Reduction) -> None:
    _refuse(
        ("a sharded model", is_sharded(wrapped.model)),
        ("reduction='tree'", reduction is Reduction.TREE),
        ("ddp_options", bool(wrapped.ddp_options)),
        ("sync_batchnorm", wrapped.sync_batchnorm),
        ("a GradScaler", wrapped.scaler is not None and wrapped.scaler.is_enabled()),
        to="several models or optimizers",
        hint="train one model with one optimizer, whose parameter groups can differ, or leave it out",
    )


def _check_apart(place: Workplace, wrapped: Wrapped, how: Apart) -> None:
    name, options = f"reduction={wrapped.reduction.value!r}", place.options
    _refuse(
        ("a sharded model", is_sharded(wrapped.model) or bool(wrapped.stages)),
        ("several models or optimizers", isinstance(wrapped.optimizer, OptimizerSet)),
        ("ddp_options", bool(wrapped.ddp_options)),
        ("sync_batchnorm", wrapped.sync_batchnorm),
        ("average", wrapped.average is not None),
        ("a GradScaler (use bfloat16)", wrapped.scaler is not None and wrapped.scaler.is_enabled()),
        ("out_of_memory", options.checks.out_of_memory != OnShortage.RAISE),
        to=name,
        hint="leave it out, or average in every step with reduction='ddp'",
    )
    every = options.cadence.every_steps
    if every is not None and every % how.sync_every:
        raise ConfigError(
            f"checkpoint_every_steps is {every}, and {name} has one state of all ranks after each"
            f" {how.sync_every} steps",
            hint="give a multiple of sync_every",
        )


def _refuse(*options: tuple[str, bool], to: str, hint: str) -> None:
    """ConfigError for the first option that is given."""
    for option, given in options:
        if given:
            raise ConfigError(f"{option} does not go with {to}", hint=hint)
