"""Fabric in place: the loop of a script as it is, with ``Fabric(strategy=ElasticFabricStrategy(session))``.

*Runs in* the worker's main thread.
*Fails by* ConfigError for what a session cannot train.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from elastic_trainer.errors import ConfigError
from elastic_trainer.integrations.loading import Advanced, PassLoader
from elastic_trainer.worker.session import Session


class ElasticFabricStrategy(SingleDeviceStrategy):
    """``accumulate`` is how many batches the loop accumulates for each ``optimizer.step()``.

    Batches are those of one process: each rank gets its part of them. Set up the model with its one optimizer; the
    first loader that is set up then is trained on.
    """

    def __init__(self, session: Session, accumulate: int = 1, **options: Any) -> None:
        session.hide_ranks()
        super().__init__(device=session.device, **options)
        self.session, self._accumulate = session, accumulate
        self._loader: PassLoader | None = None
        self._wrapped = False
        session.on_ranks_changed(self._ranks_changed)

    def _ranks_changed(self) -> None:
        self.global_rank, self.local_rank = self.session.rank, self.session.local_rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], *more: Any
    ) -> Any:
        if len(optimizers) != 1:
            raise ConfigError(f"fabric.setup() with {len(optimizers)} optimizers", hint="a session trains with one")
        scheduler = more[0] if more else None
        wrapped = self.session.wrap(module, optimizer=optimizers[0], scheduler=scheduler)
        self._wrapped = True
        advanced = Advanced(scheduler) if scheduler is not None else None
        return (wrapped, optimizers, advanced) if more else (wrapped, optimizers)

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        if not self._wrapped or self._loader is not None:
            return dataloader
        self._loader = PassLoader(self.session, dataloader, self._accumulate)
        return self._loader

    @property
    def _trained(self) -> PassLoader:
        if self._loader is None:
            raise ConfigError(
                "nothing is trained yet", hint="fabric.setup(model, optimizer), then setup_dataloaders(loader)"
            )
        return self._loader

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self._trained.step.backward(tensor)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise ConfigError(
                "optimizer.step(closure) with Fabric", hint="call fabric.backward(), then optimizer.step()"
            )
        if not self._trained.last:
            raise ConfigError(
                "optimizer.step() before the last accumulated batch",
                hint=f"the strategy was given accumulate={self._accumulate}; the last step of an epoch may have fewer",
            )
        return self._trained.update()

    def clip_gradients_norm(self, module: nn.Module, optimizer: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        return self._trained.step.clip(float(max_norm))
