"""Accelerate in place: the loop of a script as it is, with an :class:`ElasticAccelerator`.

::

    with Session("runs/a") as session:
        accelerator = ElasticAccelerator(session, gradient_accumulation_steps=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for epoch in range(3):
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_fn(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

*Runs in* the worker's main thread.
*Fails by* ConfigError for what a session cannot train.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from torch import nn
from torch.utils.data import DataLoader

from elastic_trainer.errors import ConfigError
from elastic_trainer.integrations.loading import Advanced, PassLoader, Still
from elastic_trainer.worker.session import Session


class ElasticAccelerator(Accelerator):
    """See the module. Batches are those of one process: each rank gets its part of them.

    It believes that it is alone: ``gather`` and ``reduce`` give what this process has, and each rank evaluates all of
    what it evaluates. ``is_main_process`` is right at any number of ranks.
    """

    flag_tensor: Any

    def __init__(self, session: Session, **options: Any) -> None:
        session.hide_ranks()
        self.session = session
        self._trained: PassLoader | None = None
        self._registered = 0
        super().__init__(cpu=session.device.type == "cpu", **options)
        if self.num_processes > 1:
            raise ConfigError("Accelerate has seen the ranks of this job", hint="make no Accelerator before this one")
        session.on_ranks_changed(self._ranks_changed)

    def _ranks_changed(self) -> None:
        shared = PartialState._shared_state
        shared["process_index"], shared["local_process_index"] = self.session.rank, self.session.local_rank

    @property
    def _loader(self) -> PassLoader:
        if self._trained is None:
            raise ConfigError("nothing is trained yet", hint="prepare(model, optimizer, loader) in one call")
        return self._trained

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """The first loader beside an optimizer is trained on; others are for evaluation, and each rank sees all."""
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        if not optimizers:
            return super().prepare(*objects, device_placement=device_placement)
        models = [each for each in objects if isinstance(each, nn.Module)]
        loaders = [each for each in objects if isinstance(each, DataLoader)]
        schedulers = [each for each in objects if isinstance(each, torch.optim.lr_scheduler.LRScheduler)]
        if len(optimizers) > 1 or len(models) != 1 or not loaders or len(schedulers) > 1:
            raise ConfigError(
                "prepare() needs one model, its one optimizer and the loader to train on, in one call",
                hint="call prepare(model, optimizer, loader, scheduler)",
            )
        scheduler = schedulers[0] if schedulers else None
        model = super().prepare_model(models[0], evaluation_mode=True)
        wrapped = self.session.wrap(model, optimizer=optimizers[0], scheduler=scheduler, scaler=self.scaler)
        passes = self.gradient_accumulation_steps
        self._trained = PassLoader(self.session, loaders[0], passes, self.gradient_state._set_sync_gradients)
        found: dict[int, Any] = {id(models[0]): wrapped, id(optimizers[0]): Still(optimizers[0], self._trained.update)}
        found |= {id(loaders[0]): self._trained, id(scheduler): Advanced(scheduler)}
        others = [each for each in objects if id(each) not in found]
        found |= {id(each): super(ElasticAccelerator, self).prepare(each) for each in others}
        return tuple(found[id(each)] for each in objects)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """The loader knows which pass is the last one of its step."""
        yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """The session sums gradients in the last pass of a step alone."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the gradient of ``loss``, the mean over this pass."""
        self._loader.step.backward(loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """In the last pass of a step: scale all gradients of the model to a norm of at most ``max_norm``."""
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_ with norm_type={norm_type}", hint="the session clips by norm 2")
        return self._loader.step.clip(max_norm) if self._loader.last else None

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The bare model."""
        return super().unwrap_model(getattr(model, "module", model), *args, **kwargs)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step does not count, because the ranks have changed; its batch comes again."""
        return self._trained is not None and not self._loader.step.committed

    def check_trigger(self) -> bool:
        """Whether a rank has called ``set_trigger`` since the last time, on all ranks alike: to stop early together."""
        flag = self.flag_tensor if self.flag_tensor is not None else torch.tensor(0, device=self.device)
        if self._trained is not None:
            flag = self.session.all_reduce(flag.clone())
        if flag.item() == 0:
            return False
        self.flag_tensor = torch.tensor(0, device=self.device)
        return True

    def save_state(self, *args: Any, **kwargs: Any) -> str | None:
        """Save a checkpoint of the session, on all ranks; its name. Nothing in an epoch that is trained already."""
        return self.session.save() if self._loader.reached else None

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """The session has resumed already."""

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """``dataloader``: the session has resumed behind the batches that were trained on."""
        return dataloader if dataloader is self._trained else super().skip_first_batches(dataloader, num_batches)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and resume them with the session; a schedule that was prepared is there already."""
        for each in objects:
            if not isinstance(each, Advanced):
                self.session.register(f"accelerate-{self._registered}", each)
                self._registered += 1
