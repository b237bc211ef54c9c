"""Training scripts as users of a framework write them: ``programs_job.py FRAMEWORK DIRECTORY PACE_S``.

They know nothing of this project but its helpers for checkpoints: each saves every SAVE_EVERY steps, resumes from the
newest, and trains until somebody ends it. A sample takes PACE_S. Their twins in place are
``tests/drills/frameworks/train.py``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from elastic_trainer import resume
from tests.drills.frameworks.train import BATCH, EPOCHS, Net, Points, parts

SAVE_EVERY = 20
ENDLESS = 10**6


def ddp(directory: Path, data: Points) -> None:
    """torch alone."""
    dist.init_process_group("gloo")
    model = Net()
    optimizer, _ = parts(model)
    number = 0
    if path := resume.latest(directory, "step-*.pt"):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        number = saved["number"]
    wrapped, sampler = nn.parallel.DistributedDataParallel(model), DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    while True:
        sampler.set_epoch(number // len(loader))
        for x, y in loader:
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            number += 1
            if number % SAVE_EVERY == 0 and dist.get_rank() == 0:
                with resume.saving(directory / f"step-{number}.pt") as place:
                    torch.save(
                        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "number": number}, place
                    )


def transformers(directory: Path, data: Points) -> None:
    """The Trainer, saving as it does."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(directory),
        max_steps=ENDLESS,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        save_steps=SAVE_EVERY,
        save_total_limit=3,
        disable_tqdm=True,
    )
    trainer = Trainer(model=Net(), args=arguments, train_dataset=data)
    path = resume.latest(directory, "checkpoint-*", marker="trainer_state.json")
    trainer.train(resume_from_checkpoint=str(path) if path else None)


def lightning(directory: Path, data: Points) -> None:
    """The Trainer with DDP and a ModelCheckpoint."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return parts(self.net)[0]

    saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=EPOCHS,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    dist.init_process_group("gloo")
    path = resume.latest(directory, "step=*.ckpt")
    trainer.fit(Module(), DataLoader(data, batch_size=BATCH, shuffle=True), ckpt_path=path)


def fabric(directory: Path, data: Points) -> None:
    """A loop of one's own with Fabric."""
    from lightning.fabric import Fabric

    framework = Fabric(accelerator="cpu", strategy="ddp", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]))
    framework.launch()
    model, optimizer = framework.setup(bare := Net(), parts(bare)[0])
    loader = framework.setup_dataloaders(DataLoader(data, batch_size=BATCH, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "number": 0}
    if path := resume.latest(directory, "step-*.ckpt"):
        framework.load(path, state)
    while True:
        for x, y in loader:
            framework.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            state["number"] += 1
            if state["number"] % SAVE_EVERY == 0:
                framework.save(directory / f"step-{state['number']}.ckpt", state)


def ignite(directory: Path, data: Points) -> None:
    """Ignite's Engine with idist and its Checkpoint."""
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    with idist.Parallel(backend="gloo"):
        model = idist.auto_model(Net())
        optimizer = idist.auto_optim(parts(model)[0])
        loader = idist.auto_dataloader(data, batch_size=BATCH, shuffle=True)

        def update(engine: Any, batch: Any) -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return float(loss)

        trainer = Engine(update)
        state = {"model": model, "optimizer": optimizer, "trainer": trainer}
        saver = DiskSaver(str(directory), create_dir=True, require_empty=False)
        checkpoint = Checkpoint(state, saver, n_saved=3, global_step_transform=lambda engine, _: engine.state.iteration)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=SAVE_EVERY), checkpoint)
        if path := resume.latest(directory, "checkpoint_*.pt"):
            Checkpoint.load_objects(to_load=state, checkpoint=torch.load(path))
        trainer.run(loader, max_epochs=EPOCHS)


FRAMEWORKS = {each.__name__: each for each in (ddp, transformers, lightning, fabric, ignite)}


def train(framework: str, directory: Path, pace_s: float) -> None:
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    FRAMEWORKS[framework](directory, Points(directory, pace_s, named=framework == "transformers"))


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
