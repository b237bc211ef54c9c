"""The replica of ranks that train apart, each on its share of every batch, and average only now and then.

LocalSGD (Stich 2018, arXiv 1805.09767) goes on from the mean of the ranks' parameters. DiLoCo (Douillard et al. 2023,
arXiv 2311.08105) takes the last synchronised parameters minus that mean as a gradient, and an outer optimizer steps
along it. Only trained parameters are sent, once for each synchronisation; buffers follow rank 0.

A rank's gradient keeps the weight that its share has in the global batch. So the mean of one step of SGD is the step of
DistributedDataParallel, however unevenly the samples are divided.

*Runs in* the worker's main thread. *Owns* the outer optimizer.
*Fails by* ConfigError for what cannot be trained apart, RoundBrokenError when the round is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.model.replica import Reduction, Replica, Use, share
from elastic_trainer.worker.model.several import add_up

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""Those of the DiLoCo paper."""
Anchor = Mapping[str, torch.Tensor]
"""The last synchronised parameters, by name."""
_EITHER = "reduction='local_sgd' or 'diloco'"


@dataclass(frozen=True, slots=True)
class LocalSgd:
    """How ranks train apart: ``sync_every`` steps of their own. ``lr`` None: their mean is what they go on from."""

    sync_every: int
    lr: float | None = None
    momentum: float = 0.0

    @classmethod
    def of(
        cls, reduction: Reduction, sync_every: int | None, lr: float | None, momentum: float | None
    ) -> LocalSgd | None:
        """What the arguments of ``session.wrap`` say; None: gradients are averaged in every step."""
        if reduction is not Reduction.DILOCO and (lr is not None or momentum is not None):
            raise ConfigError("outer_lr and outer_momentum without reduction='diloco'", hint="leave them out")
        if not reduction.apart:
            if sync_every is not None:
                raise ConfigError(
                    f"sync_every with reduction={reduction.value!r}, which averages in every step",
                    hint="say reduction='diloco' or 'local_sgd', or leave it out",
                )
            return None
        if sync_every is None or sync_every < 1:
            raise ConfigError(
                f"reduction={reduction.value!r} with sync_every={sync_every}",
                hint="say after how many steps the ranks average: sync_every=30",
            )
        if reduction is Reduction.LOCAL_SGD:
            return cls(sync_every)
        lr, momentum = OUTER_LR if lr is None else lr, OUTER_MOMENTUM if momentum is None else momentum
        if not lr > 0.0 or not 0.0 <= momentum < 1.0:
            raise ConfigError(
                f"outer_lr is {lr:g} and outer_momentum {momentum:g}",
                hint="the first must be positive, the second between 0 and 1",
            )
        return cls(sync_every, lr, momentum)


class OuterSGD(torch.optim.SGD):
    """SGD with Nesterov momentum; a loaded state is the momentum alone, and the options stay the script's."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "param_groups": self.state_dict()["param_groups"]})


class LocalReplica(Replica):
    """See the module."""

    refused: Mapping[Use, tuple[str, str]] = {
        Use.CLOSURE: (f"{_EITHER} does not go with a closure", "call optimizer.step() after step.backward(loss)"),
        Use.MANUAL_STEP: (
            "begin_step() of ranks that train apart, whose steps a fault may undo together",
            "use `with session.step()`",
        ),
        Use.STREAMS: (f"{_EITHER} does not go with Streams", "leave it out"),
        Use.AUDIT: (f"audit_every does not go with {_EITHER}", "leave it out"),
    }
    fitted = own_optimizer = True

    def __init__(self, module: nn.Module, placement: Placement, how: LocalSgd, *, in_place: bool = False) -> None:
        super().__init__(module, placement, in_place=in_place)
        self._control, self._inside = Control(), False
        self._live: dict[str, nn.Parameter] = {}
        """What is trained until the next synchronisation, by name."""
        parameters = [each for each in self.module.parameters() if each.is_floating_point()]
        self.outer: OuterSGD | None = None
        if how.lr is not None:
            self.outer = OuterSGD(parameters, lr=how.lr, momentum=how.momentum, nesterov=how.momentum > 0.0)

    def bind(self, control: Control) -> None:
        super().bind(control)
        self._control, self._inside, self.averaged_over = control, False, 1

    def begin_step(self, *, counts: bool = True) -> None:
        super().begin_step(counts=counts)
        if not self._inside:
            self._inside, self._live = True, self.trained()

    def fit(self, control: Control, change: str) -> None:
        if self._inside:
            raise ConfigError(
                f"{change} between two synchronisations, while the ranks train apart",
                hint="do it where step.number is a multiple of sync_every",
            )
        self.bind(control)

    def counting(self, control: Control) -> Control:
        """Each rank alone."""
        return Control()

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def anchor(self) -> Anchor:
        """What the next synchronisation needs of the present state."""
        return {} if self.outer is None else {name: each.detach().clone() for name, each in self.trained().items()}

    def synchronise(self, anchor: Anchor, check: Callable[[], None]) -> None:
        """Make all ranks hold one set of parameters; until all have arrived here, nothing is changed.

        ``check`` raises unless what a device has summed is of all ranks.
        """
        live = self._live
        means = {name: each.detach().clone() for name, each in live.items()}
        if not self._control.alone:
            add_up(self._control, list(means.values()))
            check()
            torch._foreach_div_(list(means.values()), self._control.world_size)
            share(self._control, list(self.module.buffers()))
        with torch.no_grad():
            for name, each in live.items():
                each.grad = None if self.outer is None else anchor[name] - means[name]
                each.copy_(means[name] if self.outer is None else anchor[name])
            if self.outer is not None:
                self.outer.step()
                self.outer.zero_grad()
        self._inside = False
