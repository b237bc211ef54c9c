"""The Trainer of transformers in place: :class:`ElasticTrainer`, with the arguments of ``Trainer`` after the session.

::

    with Session("runs/a") as session:
        session.hide_ranks()
        arguments = TrainingArguments("out", max_steps=1000, per_device_train_batch_size=32)
        ElasticTrainer(session, model=model, args=arguments, train_dataset=dataset).train()

*Runs in* the worker's main thread.
*Fails by* ConfigError for what a session cannot train.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from accelerate.state import PartialState
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError
from elastic_trainer.integrations.loading import Advanced, SessionLoader, Still, require_hidden, train
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.engine import Step

_log = logging.get_logger(__name__)
_KEPT = (
    "global_step",
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Of the TrainerState: what is of the run, and neither of its arguments nor of one rank."""


class ElasticTrainer(Trainer):
    """A step that a change of ranks interrupts is made again inside ``training_step``, so the Trainer counts it once.

    ``per_device_train_batch_size * gradient_accumulation_steps`` is the global batch: each rank gets its part of it.
    The session resumes, also the state of the Trainer and of its stateful callbacks; checkpoints of the Trainer are
    copies to keep or publish. Each rank evaluates on all data.
    """

    args: Any
    control: Any
    optimizer: Any

    def __init__(self, session: Session, **arguments: Any) -> None:
        require_hidden("transformers")
        self.session = session
        super().__init__(**arguments)
        if self.args.world_size > 1 or self.args.n_gpu > 1 or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ConfigError(
                "the Trainer divides the training itself", hint="session.hide_ranks() before TrainingArguments; no FSDP"
            )
        self._passes, self.args = self.args.gradient_accumulation_steps, copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self._norm: float | None = None
        self._loader: SessionLoader | None = None
        self._owes_end = self._has_stopped = False
        """Of a resumed state: whether what follows its last step is still to be done, and whether no step comes."""
        self.add_callback(_Follow(session))
        session.on_ranks_changed(self._ranks_changed)

    def _ranks_changed(self) -> None:
        shared = PartialState._shared_state
        shared["process_index"], shared["local_process_index"] = self.session.rank, self.session.local_rank
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.session.is_rank0

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **named: Any) -> Any:
        if resume_from_checkpoint:
            raise ConfigError(
                "train(resume_from_checkpoint=...) beside a session, which resumes by itself",
                hint="leave it out, and give the Session a checkpoint_dir",
            )
        return super().train(None, *args, **named)

    def get_train_dataloader(self) -> Any:
        """The batches of the session, one for each step."""
        if self.train_dataset is None:
            raise ConfigError("there is nothing to train on", hint="give the Trainer a train_dataset")
        if self.args.data_seed is not None:
            raise ConfigError(
                f"data_seed={self.args.data_seed}, and the session's seed orders the samples",
                hint="leave it out, and say Session(seed=...)",
            )
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        loader = DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            sampler=self._get_train_sampler(self.train_dataset),
            drop_last=self.args.dataloader_drop_last,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
        )
        self._loader = SessionLoader(self.session, loader, self._passes)
        return self._loader

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Now model and optimizer are whole: the session takes them, and resumes."""
        real = getattr(self.optimizer, "optimizer", self.optimizer)
        scheduler = super().create_scheduler(num_training_steps, real)
        memory = _Memory(self)
        self.session.register("transformers", memory)
        self._wrapped = self.session.wrap(
            self.model, optimizer=real, scheduler=scheduler, scaler=getattr(self.accelerator, "scaler", None)
        )
        self._real, self.optimizer, self.lr_scheduler = real, Still(real), Advanced(scheduler)
        self.state.global_step = self.session.step_number
        self._owes_end = memory.step is not None and memory.step < self.session.step_number
        self._has_stopped = memory.stopped or self.session.step_number >= num_training_steps
        return self.lr_scheduler

    def _run_epoch(self, *args: Any, **named: Any) -> None:
        """What is left of the epoch: nothing if it is trained already, its end if the run has not come further.

        A state may have been saved right after a step. What follows the step, and the epoch if it was its last one, is
        then done here: to log, evaluate and save.
        """
        cursor, epoch, loader = self.session.cursor, named["epoch"], self._loader
        if loader is None or cursor.epoch > epoch:
            return
        if owes := self._owes_end:
            self._owes_end = False
            self.state.epoch = epoch + loader.made(cursor) / len(loader)
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._follow_up(named)
        elif self._has_stopped:
            self.control.should_training_stop = True
            _log.warning("The training had ended at step %s: nothing is left to train.", self.session.step_number)
        over = cursor.epoch == epoch and loader.at_end(cursor)
        if not (over or self.control.should_training_stop or self.control.should_epoch_stop):
            super()._run_epoch(*args, **named)
        elif owes:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._follow_up(named)

    def _follow_up(self, named: dict[str, Any]) -> None:
        names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
        self._maybe_log_save_evaluate(self._tr_loss, self._norm, **{name: named[name] for name in names})

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], None]:
        """Items are counted pass by pass."""
        return super().get_batch_samples(epoch_iterator, num_batches, device)[0], None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Make the whole step, again if the ranks change inside it."""
        model.train()

        def compute(step: Step, part: Batch, first: bool) -> None:
            data = self._prepare_inputs(part.data)
            items = self._get_num_items_in_batch([data], self.args.device)
            with self.compute_loss_context_manager():
                one = None if items is None else torch.ones_like(torch.as_tensor(items))
                loss = self.compute_loss(self._wrapped, data, num_items_in_batch=one)
            step.backward(loss, None if items is None else float(items))

        def update(step: Step) -> None:
            self._norm = float(step.clip(self.args.max_grad_norm)) if self.args.max_grad_norm else None
            self._real.step()

        step = train(self.session, compute, update)
        self.state.global_step = self.session.step_number - 1  # the Trainer counts this one next
        return torch.tensor(step.local_mean() or 0.0, device=self.args.device)

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self._norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        return self._norm

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        """On this rank, on all data."""
        with self.session.phase("evaluation"):
            return super().evaluate(*args, **named)  # type: ignore[no-any-return]


class _Follow(TrainerCallback):
    """Shows how far the session has come."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        cursor = self._session.cursor
        loader = named.get("train_dataloader")
        if loader is not None:
            state.epoch = cursor.epoch + loader.made(cursor) / len(loader)


class _Memory:
    """What the Trainer and its stateful callbacks remember, as a part of the session's state: JSON, as they save it.

    ``step`` is the last step whose end they have seen, ``stopped`` whether they ended the training early; as loaded.
    """

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer
        self.step: int | None = None
        self.stopped = False

    def _stateful(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]

    def state_dict(self) -> dict[str, str]:
        trainer = self._trainer
        kept = {
            "state": {name: getattr(trainer.state, name) for name in _KEPT},
            "callbacks": [[type(each).__name__, each.state()["attributes"]] for each in self._stateful()],
            "stopped": trainer.control.should_training_stop and trainer.state.global_step < trainer.state.max_steps,
        }
        return {"json": json.dumps(kept, default=float)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        kept = json.loads(state["json"])
        values = kept["state"]
        self.step, self.stopped = values.pop("global_step"), kept["stopped"]
        for name, value in values.items():
            setattr(self._trainer.state, name, value)
        waiting = kept["callbacks"]
        for each in self._stateful():
            found = next((pair for pair in waiting if pair[0] == type(each).__name__), None)
            if found is not None:
                waiting.remove(found)
                for name, value in found[1].items():
                    setattr(each, name, value)
