"""Lightning's Trainer in place: ``Trainer(strategy=ElasticStrategy(session))``, or ``strategy="elastic"``.

*Runs in* the worker's main thread.
*Fails by* ConfigError for what a session cannot train.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch.utils.data import DataLoader

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError
from elastic_trainer.integrations.loading import Advanced, SessionLoader, Still, require_hidden, train
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.engine import Step

NAME = "elastic"


class ElasticStrategy(SingleDeviceStrategy):
    """A step that a change of ranks interrupts is made again inside ``optimizer_step``, so Lightning counts it once.

    Batches are those of one process, times ``accumulate_grad_batches``: each rank gets its part of them. Each rank
    validates on all data. The states of callbacks and of the data module are saved and resumed with the session.
    Without a ``session`` it is the one that is open.
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
        self._loader: SessionLoader | None = None
        self._wrapped = False
        self._owes_end = False
        """Whether a state was resumed from right after a step, and what follows the step is still to be done."""
        self.session.on_ranks_changed(self._ranks_changed)

    def _ranks_changed(self) -> None:
        self.global_rank, self.local_rank = self.session.rank, self.session.local_rank
        rank_zero_only.rank = self.session.rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        _refuse_what_differs(trainer)
        self._trainer = trainer  # configure_optimizers() may ask how many steps there will be
        self._passes, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1
        super().setup(trainer)
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
        memory = _Memory(trainer)
        self.session.register("lightning", memory)
        real, scheduler = self.optimizers[0], self._scheduler()
        self.optimizers = [Still(real)]  # Lightning drops gradients before each pass
        self.model = self.session.wrap(module, optimizer=real, scheduler=scheduler)
        self._wrapped = True
        self._owes_end = memory.step is not None and memory.step < self.session.step_number
        trainer.should_stop = memory.stopped
        if memory.stopped:
            rank_zero_info(f"The training had been stopped at step {self.session.step_number}.")
        self._follow()

    def _follow(self) -> None:
        """Lightning counts from where the session is: an epoch whose end was seen is over."""
        cursor, steps, loop = self.session.cursor, self.session.step_number - self._owes_end, self._trainer.fit_loop
        over = self._loader is not None and self._loader.at_end(cursor) and not self._owes_end
        _set_all(loop.epoch_progress.current, cursor.epoch + over)
        _set_all(loop.epoch_loop.batch_progress.total, steps)
        loop.epoch_loop._batches_that_stepped = steps
        self._count(steps)

    def _scheduler(self) -> Any:
        """The schedule that the session advances, if it is one by steps; those by epochs stay Lightning's."""
        by_steps = None
        for number, each in enumerate(self.lr_scheduler_configs):
            if each.interval == "step" and each.frequency == 1 and by_steps is None and not each.reduce_on_plateau:
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
        begun, session = self._begun, self.session
        self._loader = SessionLoader(session, dataloader, self._passes, begun, lambda: int(trainer.current_epoch))
        if self._wrapped:
            self._follow()
        return self._loader

    def _begun(self, steps: int) -> bool:
        """An epoch begins behind its first ``steps``: Lightning counts them too. Whether to go on with it.

        What follows a step that was saved right after it is done here: schedules, validation and its callbacks.
        """
        loop, epoch_loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        loop._data_fetcher.fetched += steps
        _set_all(epoch_loop.batch_progress.current, steps)
        if not self._owes_end:
            return True
        self._owes_end = False
        self._count(self.session.step_number)
        _set_all(epoch_loop.batch_progress.total, self.session.step_number)
        epoch_loop.batch_progress.is_last_batch = loop._data_fetcher.done
        for interval in ("step", "epoch") if epoch_loop._num_ready_batches_reached() else ("step",):
            epoch_loop.update_lr_schedulers(interval, update_plateau_schedulers=False)
        epoch_loop.on_advance_end(loop._data_fetcher)
        return not epoch_loop.done

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch = args[0]
        if self._part is not None:  # this pass is not about what the loader gave
            batch = self.batch_to_device(self.lightning_module._on_before_batch_transfer(self._part.data))
        return super().training_step(batch, *args[1:], **kwargs)

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

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """What all ranks decide together, as to stop early: by what each has seen of its part they may differ."""
        if not self._wrapped or self._trainer.state.fn != TrainerFn.FITTING:
            return decision
        against = self.session.all_reduce(torch.tensor([float(decision != all)], device=self.root_device)).item() > 0
        return against != all


def _set_all(counter: Any, value: int) -> None:
    for name in ("ready", "started", "processed", "completed"):
        setattr(counter, name, value)


def _refuse_what_differs(trainer: Any) -> None:
    """ConfigError for what a session does itself, and for what each rank would decide by a clock of its own."""
    clock = "each rank would go by its own clock; count steps or epochs instead"
    callbacks = trainer.callbacks
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
    if any(isinstance(each, GradientAccumulationScheduler) for each in callbacks):
        raise ConfigError(
            "GradientAccumulationScheduler", hint="a session has one global batch: accumulate_grad_batches=N"
        )
    if any(isinstance(each, Timer) for each in callbacks):
        raise ConfigError("max_time or a Timer with strategy='elastic'", hint=clock)
    if trainer._val_check_time_interval is not None:
        raise ConfigError("val_check_interval as a time with strategy='elastic'", hint=clock)
    if any(isinstance(each, ModelCheckpoint) and each._train_time_interval is not None for each in callbacks):
        raise ConfigError("ModelCheckpoint(train_time_interval=...) with strategy='elastic'", hint=clock)


class _Memory:
    """What callbacks and the data module remember, as a part of the session's state.

    ``step`` is the last step whose end they have seen, ``stopped`` whether they ended the training early; as loaded.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.step: int | None = None
        self.stopped = False

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        return {
            "step": trainer.global_step,
            "stopped": trainer.should_stop,
            "callbacks": {key: state for key, state in states.items() if state},
            "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.stopped = state["step"], state["stopped"]
        for each in self._trainer.callbacks:
            if each.state_key in state["callbacks"]:
                each.load_state_dict(copy.deepcopy(state["callbacks"][each.state_key]))
        if self._trainer.datamodule is not None and state["data"]:
            self._trainer.datamodule.load_state_dict(copy.deepcopy(state["data"]))


StrategyRegistry.register(NAME, ElasticStrategy, description="trains in place with the open Session")
