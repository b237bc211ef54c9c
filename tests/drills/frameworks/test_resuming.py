"""A program of a framework that stops in the middle of an epoch and starts again ends as one that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from elastic_trainer import Session
from elastic_trainer.errors import ConfigError
from tests.drills.frameworks.test_frameworks import needs_framework
from tests.drills.frameworks.train import Net, Points

BATCH, EPOCH = 60, 4
STOP = EPOCH + 2
Loop = Callable[[Session, DataLoader[Any], int | None], dict[str, Any]]


def accelerate(session: Session, data: DataLoader[Any], stop: int | None) -> dict[str, Any]:
    """A schedule by epochs, which the script steps itself."""
    from elastic_trainer.integrations.accelerate import ElasticAccelerator

    accelerator, bare = ElasticAccelerator(session), Net()
    real = torch.optim.SGD(bare.parameters(), lr=0.05)
    schedule = StepLR(real, 1, 0.5)
    model, optimizer, data = accelerator.prepare(bare, real, data)
    accelerator.register_for_checkpointing(schedule)
    for _ in session.epochs(3):
        for x, y in accelerator.skip_first_batches(data, session.step_number):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
            if session.step_number == stop:
                return {}
        schedule.step()
    return {**bare.state_dict(), "rate": torch.tensor(real.param_groups[0]["lr"])}


def fabric(session: Session, data: DataLoader[Any], stop: int | None) -> dict[str, Any]:
    """A schedule by steps, given to ``setup``."""
    from lightning.fabric import Fabric

    from elastic_trainer.integrations.fabric import ElasticFabricStrategy

    framework, bare = Fabric(strategy=ElasticFabricStrategy(session), accelerator="cpu", devices=1), Net()
    real = torch.optim.SGD(bare.parameters(), lr=0.05)
    model, optimizer, schedule = framework.setup(bare, real, scheduler=StepLR(real, 1, 0.8))
    data = framework.setup_dataloaders(data)
    for _ in session.epochs(3):
        for x, y in data:
            framework.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            schedule.step()
            if session.step_number == stop:
                return {}
    return {**bare.state_dict(), "rate": torch.tensor(real.param_groups[0]["lr"])}


@pytest.mark.parametrize("loop", [accelerate, fabric])
def test_data_and_schedule_go_on_where_they_were(tmp_path: Path, loop: Loop) -> None:
    needs_framework(loop.__name__)

    def ran(name: str, stop: int | None = None) -> dict[str, Any]:
        with Session(tmp_path / name, seed=3, device="cpu") as session:
            result = loop(session, DataLoader(Points(tmp_path, 0.0), batch_size=BATCH, shuffle=True), stop)
            assert session.step_number == (stop or 3 * EPOCH)
        return result

    undisturbed = ran("one")
    ran("two", STOP)
    torch.testing.assert_close(ran("two"), undisturbed, rtol=0, atol=0)


def transformers(session: Session, directory: Path) -> None:
    from transformers import TrainingArguments

    from elastic_trainer.integrations.transformers import ElasticTrainer

    arguments = TrainingArguments(str(directory), report_to=[], use_cpu=True)
    data = Points(directory, 0.0, named=True)
    ElasticTrainer(session, model=Net(), args=arguments, train_dataset=data).train(resume_from_checkpoint=True)


def lightning(session: Session, directory: Path, checkpoint: str | None = None, **options: Any) -> None:
    import lightning as L

    from elastic_trainer.integrations.lightning import ElasticStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> Any:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        strategy=ElasticStrategy(session),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=directory,
        **quiet,
        **options,
    )
    path = directory / checkpoint if checkpoint is not None else None
    if path is not None:
        torch.save({"state_dict": Module().state_dict(), "pytorch-lightning_version": L.__version__}, path)
    loader: Any = DataLoader(Points(directory, 0.0), batch_size=BATCH)
    trainer.fit(Module(), loader, loader, ckpt_path=path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("begin", "message"),
    [
        pytest.param(transformers, "resumes by itself", id="transformers"),
        pytest.param(partial(lightning, checkpoint="old.ckpt"), "resumes by itself", id="lightning"),
        pytest.param(partial(lightning, limit_train_batches=2), "whole epochs", id="lightning-limit"),
    ],
)
def test_what_a_session_would_train_wrongly_is_refused(
    tmp_path: Path, begin: Callable[[Session, Path], None], message: str
) -> None:
    needs_framework("transformers")
    needs_framework("lightning")
    with Session(None, device="cpu") as session:
        session.hide_ranks()
        with pytest.raises(ConfigError, match=message):
            begin(session, tmp_path)
