"""Lightning's Trainer in place: ``Trainer(strategy=ElasticStrategy(session))``, or ``strategy="elastic"``.

*Runs in* the worker's main thread.
*Fails by* ConfigError for what a session cannot train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError
from elastic_trainer.integrations.loading import Advanced, SessionLoader, Still, require_hidden, train
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.step import Step

NAME = "elastic"


class ElasticStrategy(SingleDeviceStrategy):
    """A step that a change of ranks interrupts is made again inside ``optimizer_step``, so Lightning counts it once.

    Batches are those of one process, times ``accumulate_grad_batches``: each rank gets its part of them. Each rank
    validates on all data. Without a ``session`` it is the one that is open.
    """

    strategy_name = NAME
    optimizers: Any

    def __init__(self, session: Session | None = None, **options: Any) -> None:
        self.session = session if session is not None else Session.opened()
        require_hidden("Lightning")
        super().__init__(device=self.session.device, **options)
        self._trainer: Any = None
        self._step: Step | None = None
        self._part: Batch | None = None
        self._passes = 1
        self.session.on_ranks_changed(self._ranks_changed)

    def _ranks_changed(self) -> None:
        self.global_rank, self.local_rank = self.session.rank, self.session.local_rank
        rank_zero_only.rank = self.session.rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module = self.lightning_module
        if (
            len(self.optimizers) != 1
            or not module.automatic_optimization
            or self.precision_plugin.precision == "16-mixed"
        ):
            raise ConfigError(
                "strategy='elastic' needs automatic optimization with one optimizer, in 32 bits or bfloat16",
                hint="return one optimizer from configure_optimizers(), and say precision='bf16-mixed'",
            )
        if trainer.ckpt_path is not None:
            raise ConfigError(
                "fit(ckpt_path=...) beside a session, which resumes by itself",
                hint="leave it out, and give the Session a checkpoint_dir",
            )
        if trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run:
            raise ConfigError(
                f"limit_train_batches={trainer.limit_train_batches}, and a session trains on whole epochs",
                hint="say max_steps=..., or give a torch.utils.data.Subset of the data",
            )
        self._trainer = trainer
        self._passes, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1
        real, scheduler = self.optimizers[0], self._scheduler()
        self.optimizers = [Still(real)]  # Lightning drops gradients before each pass
        self.model = self.session.wrap(module, optimizer=real, scheduler=scheduler)
        loop = trainer.fit_loop
        loop.epoch_progress.current.ready = loop.epoch_progress.current.started = self.session.cursor.epoch
        loop.epoch_progress.current.processed = loop.epoch_progress.current.completed = self.session.cursor.epoch
        self._count(self.session.step_number)

    def _scheduler(self) -> Any:
        """The schedule that the session advances, if it is one by steps; those by epochs stay Lightning's."""
        by_steps = None
        for number, each in enumerate(self.lr_scheduler_configs):
            if each.interval == "step" and each.frequency == 1 and by_steps is None:
                by_steps, each.scheduler = each.scheduler, Advanced(each.scheduler)
            else:
                self.session.register(f"lightning-scheduler-{number}", each.scheduler)
        return by_steps

    def _count(self, steps: int) -> None:
        progress = self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        progress.ready = progress.completed = steps

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self._trainer
        if trainer is None or not trainer.training or not isinstance(dataloader, DataLoader):
            return dataloader
        loop = trainer.fit_loop
        if loop._combined_loader is not None and not loop._should_reload_train_dl:
            return dataloader  # to validate on
        return SessionLoader(self.session, dataloader, self._passes, self._begun, lambda: int(trainer.current_epoch))

    def _begun(self, steps: int) -> None:
        """An epoch begins behind its first ``steps``: Lightning counts them too."""
        loop = self._trainer.fit_loop
        loop._data_fetcher.fetched += steps
        for name in ("ready", "started", "processed", "completed"):
            setattr(loop.epoch_loop.batch_progress.current, name, steps)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(self._given(args[0]), *args[1:], **kwargs)

    def _given(self, batch: Any) -> Any:
        """What this pass is about: ``batch``, if the loader gave it."""
        if self._part is None:
            return batch
        return self.batch_to_device(self.lightning_module._on_before_batch_transfer(self._part.data))

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._step is None:
            raise ConfigError("a backward pass outside a step", hint="return the loss from training_step()")
        self._step.backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result: list[Any] = []
        module: Any = self.lightning_module

        def compute(step: Step, part: Batch, first: bool) -> None:
            self._step, self._part = step, None if first else part
            result[:] = [closure()]

        def update(step: Step) -> None:
            self.precision_plugin._after_closure(module, optimizer)
            optimizer.optimizer.step()

        train(self.session, compute, update)
        self._step = self._part = None
        self._count(self.session.step_number - 1)  # Lightning counts this one next
        return result[0] if result else None


StrategyRegistry.register(NAME, ElasticStrategy, description="trains in place with the open Session")
