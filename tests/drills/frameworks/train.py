"""A tiny training as the users of a framework write it: ``train.py FRAMEWORK DIRECTORY STEPS PACE_S``.

All train the same model on the same data, two micro-batches a step, with a norm of at most 1 and a schedule by steps.
A sample takes PACE_S until the file DIRECTORY/fast is there.
``plain`` does it by hand with a Session, and is what the others are compared with.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from elastic_trainer import Session

SAMPLES, BATCH, ACCUMULATED = 240, 6, 2
EPOCHS = 10**4


class Points(Dataset[Any]):
    """Points with a value each; the names are those that transformers looks for."""

    def __init__(self, directory: Path, pace_s: float, named: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True)
        self.pace_s, self.named, self.fast = pace_s, named, directory / "fast"

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        if self.pace_s and not self.fast.exists():
            time.sleep(self.pace_s)
        x, y = self.x[number], self.y[number]
        return {"x": x, "labels": y} if self.named else (x, y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.body(x)
        return out if labels is None else {"loss": nn.functional.mse_loss(out, labels)}


def parts(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)


def loader(directory: Path, pace_s: float) -> DataLoader[Any]:
    return DataLoader(Points(directory, pace_s), batch_size=BATCH, shuffle=True)


def plain(session: Session, directory: Path, steps: int, pace_s: float) -> nn.Module:
    model = Net()
    optimizer, scheduler = parts(model)
    wrapped = session.wrap(model, optimizer=optimizer, scheduler=scheduler)
    data = Points(directory, pace_s)
    for _ in session.batches(data, global_batch_size=BATCH * ACCUMULATED, passes=ACCUMULATED, epochs=EPOCHS):
        with session.step() as step:
            for part in step.micro_batches():
                step.backward(nn.functional.mse_loss(wrapped(part.x), part.y))
            step.clip(1.0)
            optimizer.step()
        if session.step_number >= steps:
            break
    return model


def accelerate(session: Session, directory: Path, steps: int, pace_s: float) -> nn.Module:
    from elastic_trainer.integrations.accelerate import ElasticAccelerator

    accelerator = ElasticAccelerator(session, gradient_accumulation_steps=ACCUMULATED)
    bare = Net()
    optimizer, scheduler = parts(bare)
    model, optimizer, data, scheduler = accelerator.prepare(bare, optimizer, loader(directory, pace_s), scheduler)
    for _ in range(EPOCHS):
        for x, y in data:
            assert accelerator.is_main_process == session.is_rank0
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if session.is_rank0 and session.step_number >= steps:
                    accelerator.set_trigger()
                if accelerator.check_trigger():
                    return bare
    raise RuntimeError("too few epochs")


def fabric(session: Session, directory: Path, steps: int, pace_s: float) -> nn.Module:
    from lightning.fabric import Fabric

    from elastic_trainer.integrations.fabric import ElasticFabricStrategy

    framework = Fabric(strategy=ElasticFabricStrategy(session, accumulate=ACCUMULATED), accelerator="cpu", devices=1)
    bare = Net()
    optimizer, scheduler = parts(bare)
    session.register("schedule", scheduler)
    model, optimizer = framework.setup(bare, optimizer)
    data = framework.setup_dataloaders(loader(directory, pace_s))
    number = 0
    while True:
        for x, y in data:
            number += 1
            assert framework.is_global_zero == session.is_rank0
            waits = number % ACCUMULATED != 0
            with framework.no_backward_sync(model, enabled=waits):
                framework.backward(nn.functional.mse_loss(model(x), y))
            if waits:
                continue
            framework.clip_gradients(model, optimizer, max_norm=1.0)
            if optimizer.step():
                scheduler.step()
            optimizer.zero_grad()
            if session.step_number >= steps:
                return bare


def lightning(session: Session, directory: Path, steps: int, pace_s: float) -> nn.Module:
    session.hide_ranks()
    import lightning as L

    from elastic_trainer.integrations import lightning as integration

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def on_train_batch_start(self, batch: Any, number: int) -> None:
            done, cursor = number * BATCH * ACCUMULATED, session.cursor
            assert (self.trainer.global_step, done % SAMPLES) == (session.step_number, cursor.samples % SAMPLES)
            assert self.trainer.is_global_zero == session.is_rank0
            assert self.trainer.current_epoch == cursor.epoch + cursor.samples // SAMPLES

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = parts(self.net)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Counting(L.Callback):
        made = 0

        def state_dict(self) -> dict[str, Any]:
            return {"made": self.made}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.made = state["made"]

        def on_train_batch_end(self, *args: Any) -> None:
            self.made += 1
            assert self.made == session.step_number
            assert trainer.strategy.reduce_boolean_decision(session.is_rank0, all=False), "rank 0 is for it"

    module = Module()
    trainer = L.Trainer(
        callbacks=[Counting()],
        strategy=integration.NAME,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(module, loader(directory, pace_s))
    assert trainer.global_step == session.step_number
    return module.net


def transformers(session: Session, directory: Path, steps: int, pace_s: float) -> nn.Module:
    session.hide_ranks()
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from elastic_trainer.integrations.transformers import ElasticTrainer

    arguments = TrainingArguments(
        str(directory / "out"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )

    class Watch(TrainerCallback, ExportableState):
        made = 0

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"made": self.made}}

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.made += 1
            assert state.global_step == session.step_number == self.made
            assert state.is_world_process_zero == args.should_save == session.is_rank0

    model = Net()
    trainer = ElasticTrainer(
        session,
        callbacks=[Watch()],
        model=model,
        args=arguments,
        train_dataset=Points(directory, pace_s, named=True),
        optimizers=parts(model),
    )
    trainer.train()
    assert trainer.state.global_step == session.step_number
    return model


PROGRAMS = {
    "plain": plain,
    "accelerate": accelerate,
    "fabric": fabric,
    "lightning": lightning,
    "transformers": transformers,
}


def main(framework: str, directory: Path, steps: int, pace_s: float) -> None:
    torch.set_num_threads(1)
    with Session(None, seed=3, device="cpu") as session:
        model = PROGRAMS[framework](session, directory, steps, pace_s)
        result = {"step": session.step_number, "parameters": dict(model.state_dict())}
    torch.save(result, directory / f"result-{session.environment.node}-{os.getpid()}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
