"""A training step whose body is a framework's or a script's own loop, between ``session.begin_step()`` and ``end()``.

There is no block that the end of a round could leave. So the step joins the next round in the very call that finds out
that its own has ended. From then on a call of the model computes on this rank alone; ``backward``, ``clip``, ``skip``
and ``update`` do nothing, and ``end()`` returns False. The batch then comes again.

*Runs in* the worker's main thread.
*Fails by* all that a step raises, but for the end of a round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError, RejoinError, TransientError
from elastic_trainer.worker.steps.engine import Step, Steps

Result = TypeVar("Result")


class DrivenStep(Step):
    """See the module. ``lost``: its round has ended, and what it computes is for nothing."""

    def __init__(self, steps: Steps, batch: Batch | None) -> None:
        if steps.replica.layout is not None:
            raise ConfigError(
                "begin_step() of a sharded model, which no rank can compute alone", hint="use `with session.step()`"
            )
        if steps.replica.apart:
            raise ConfigError(
                "begin_step() of ranks that train apart, whose steps a fault may undo together",
                hint="use `with session.step()`",
            )
        if steps.several:
            raise ConfigError("begin_step() with several models or optimizers", hint="use `with session.step()`")
        super().__init__(steps, batch)
        self._driver = steps
        self.lost = self.ended = False
        self.__enter__()
        steps.replica.runner.intercept(self._call)

    def _call(self, through: Callable[..., Any], inputs: Any, named: Any) -> Any:
        return self._unless_lost(lambda: through(*inputs, **named), lambda: self._alone(inputs, named))

    def _alone(self, inputs: Any, named: Any) -> Any:
        with self._driver.replica.aside():
            return self._driver.replica.module(*inputs, **named)

    def _unless_lost(self, act: Callable[[], Result], otherwise: Callable[[], Result]) -> Result:
        if not self.lost:
            try:
                return act()
            except (RejoinError, TransientError, RuntimeError) as error:
                if not self._driver.closed(self, error):
                    self.end()
                    raise
                self.lost = True
        return otherwise()

    def _begin(self, part: Batch) -> None:
        if not self.lost:
            super()._begin(part)

    def backward(self, loss: torch.Tensor, count: float | None = None) -> None:
        self._unless_lost(lambda: super(DrivenStep, self).backward(loss, count), lambda: None)

    def clip(self, max_norm: float) -> torch.Tensor:
        return self._unless_lost(lambda: super(DrivenStep, self).clip(max_norm), lambda: torch.tensor(0.0))

    def skip(self) -> None:
        self._unless_lost(super().skip, lambda: None)

    def update(self) -> None:
        """``optimizer.step()``, unless the round has ended."""
        self._unless_lost(self._driver.update, lambda: None)

    def end(self) -> bool:
        """Whether the step counts; if not, the ranks have changed, and the next batch drawn is this one again.

        ConfigError if the step has neither made its update nor skipped it.
        """
        if not self.ended:
            self.ended = True
            self._driver.replica.runner.intercept(None)
            self._driver.closed(self, None)
        return self.committed

    def abandon(self) -> None:
        """The loop was left in the middle of the step: undo it."""
        if not self.ended:
            self.ended = True
            self._driver.replica.runner.intercept(None)
            self._driver.abandon(self)
