"""A program of a framework that stops anywhere and starts again ends as one that never stopped.

What the frameworks' own pages show (schedules by steps, early stopping, the best model, ...) is played here too.
"""

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
Seen = dict[str, Any]
Life = Callable[[Session, Path, Callable[[str, int], None]], Seen]


class Killed(Exception):
    """In the place of a SIGKILL: what was saved before is all that is left."""


def accelerate(session: Session, directory: Path, reach: Callable[[str, int], None]) -> Seen:
    """A schedule by epochs, which the script steps itself."""
    from elastic_trainer.integrations.accelerate import ElasticAccelerator

    accelerator, bare = ElasticAccelerator(session), Net()
    real = torch.optim.SGD(bare.parameters(), lr=0.05)
    schedule = StepLR(real, 1, 0.5)
    loader: Any = DataLoader(Points(directory, 0.0), batch_size=BATCH, shuffle=True)
    model, optimizer, data = accelerator.prepare(bare, real, loader)
    accelerator.register_for_checkpointing(schedule)
    for _ in session.epochs(4):
        for x, y in accelerator.skip_first_batches(data, session.step_number):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
            reach("step", session.step_number)
        schedule.step()
    return {**bare.state_dict(), "rate": real.param_groups[0]["lr"]}


def fabric(session: Session, directory: Path, reach: Callable[[str, int], None]) -> Seen:
    """A schedule by steps, given to ``setup``."""
    from lightning.fabric import Fabric

    from elastic_trainer.integrations.fabric import ElasticFabricStrategy

    framework, bare = Fabric(strategy=ElasticFabricStrategy(session), accelerator="cpu", devices=1), Net()
    real = torch.optim.SGD(bare.parameters(), lr=0.05)
    model, optimizer, schedule = framework.setup(bare, real, scheduler=StepLR(real, 1, 0.8))
    data = framework.setup_dataloaders(DataLoader(Points(directory, 0.0), batch_size=BATCH, shuffle=True))
    for _ in session.epochs(4):
        for x, y in data:
            framework.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            schedule.step()
            reach("step", session.step_number)
    return {**bare.state_dict(), "rate": real.param_groups[0]["lr"]}


def trainer(session: Session, directory: Path, reach: Callable[[str, int], None]) -> Seen:
    """transformers: evaluations by steps or by epochs, the best model, early stopping that counts."""
    session.hide_ranks()
    from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

    from elastic_trainer.integrations.transformers import ElasticTrainer

    class Places(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            reach("step", state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            reach("evaluated", state.global_step)

    arguments = TrainingArguments(
        str(directory / "out"),
        num_train_epochs=6,
        per_device_train_batch_size=BATCH,
        learning_rate=0.3,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="loss",
        greater_is_better=True,  # so that it stops early
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data, stop = Points(directory, 0.0, named=True), EarlyStoppingCallback(early_stopping_patience=3)
    own = ElasticTrainer(
        session, model=Net(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=[stop, Places()]
    )

    def evaluate(*args: Any, **named: Any) -> Any:
        reach("evaluation", own.state.global_step)
        return ElasticTrainer.evaluate(own, *args, **named)

    own.evaluate = evaluate  # type: ignore[method-assign]
    own.train()
    state = own.state
    return {
        "evaluations": [(each["step"], each["epoch"]) for each in state.log_history if "eval_loss" in each],
        "best": (state.best_metric, state.best_global_step),
        "waited": stop.early_stopping_patience_counter,
        "steps": state.global_step,
    }


def lightning_trainer(session: Session, directory: Path, reach: Any = lambda *_: None, **options: Any) -> Any:
    """A trainer, and a module with a schedule over all steps and one by epochs."""
    session.hide_ranks()
    import lightning as L

    from elastic_trainer.integrations.lightning import ElasticStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            reach("step", self.trainer.global_step)

        def validation_step(self, batch: Any, number: int) -> None:
            reach("evaluation", self.trainer.global_step)
            self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def on_validation_end(self) -> None:
            reach("evaluated", self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            assert self.trainer.estimated_stepping_batches == 4 * EPOCH
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, self.trainer.estimated_stepping_batches)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}, StepLR(optimizer, 1, 0.9)]

    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    strategy = ElasticStrategy(session)
    return L.Trainer(strategy=strategy, devices=1, default_root_dir=directory, **quiet, **options), Module()


def fitted(session: Session, directory: Path, reach: Callable[[str, int], None]) -> Seen:
    """Lightning: schedules, loggers, validation, the best models, early stopping."""
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    stop, best = EarlyStopping("val", patience=5), ModelCheckpoint(directory / "out", monitor="val", save_top_k=2)
    own, module = lightning_trainer(
        session,
        directory,
        reach,
        max_epochs=4,
        accumulate_grad_batches=2,
        limit_val_batches=3,
        val_check_interval=0.5,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        logger=[CSVLogger(directory, "one"), CSVLogger(directory, "two")],
        callbacks=[stop, best, LearningRateMonitor("step")],
    )
    loader: Any = DataLoader(Points(directory, 0.0), batch_size=BATCH // 2, shuffle=True)
    own.fit(module, loader, DataLoader(Points(directory, 0.0), batch_size=BATCH))
    return {
        **module.net.state_dict(),
        "best": (float(stop.best_score), sorted(float(each) for each in best.best_k_models.values())),
        "waited": stop.wait_count,
        "steps": (own.global_step, own.current_epoch),
        "rate": own.optimizers[0].param_groups[0]["lr"],
    }


@pytest.mark.filterwarnings("ignore")  # of the frameworks
@pytest.mark.parametrize(
    ("life", "package"),
    [(accelerate, "accelerate"), (fabric, "lightning"), (trainer, "transformers"), (fitted, "lightning")],
)
def test_a_run_that_was_killed_anywhere_ends_as_one_that_was_not(tmp_path: Path, life: Life, package: str) -> None:
    """In a step, between a step and its evaluation, in the middle of that, behind it: nothing is left out or twice.

    The end of an epoch is followed by the next epoch; what the framework's callbacks have counted goes on.
    """
    needs_framework(package)

    def ran(name: str, place: tuple[str, int] | None = None) -> tuple[Seen, list[tuple[str, int]]]:
        passed: list[tuple[str, int]] = []

        def reach(what: str, step: int) -> None:
            if (what, step) == place:
                raise Killed
            passed.append((what, step))

        (directory := tmp_path / name).mkdir(exist_ok=True)
        with Session(directory / "saved", seed=3, device="cpu", checkpoint_every_steps=1) as session:
            return life(session, directory, reach), passed

    undisturbed, passed = ran("one")
    places = [("step", EPOCH + 2), ("step", 2 * EPOCH), ("evaluation", 2 * EPOCH), ("evaluated", 3 * EPOCH)]
    for place in places if life in (trainer, fitted) else places[:2]:
        assert place in passed
        name = "-".join(map(str, place))
        with pytest.raises(Killed):
            ran(name, place)
        torch.testing.assert_close(ran(name)[0], undisturbed, rtol=0, atol=0)
    again, passed = ran("one")
    torch.testing.assert_close(again, undisturbed, rtol=0, atol=0)
    assert [place for place in passed if place[0] == "step"] in ([], [("step", 4 * EPOCH)]), "the training had ended"


def transformers(session: Session, directory: Path) -> None:
    from transformers import TrainingArguments

    from elastic_trainer.integrations.transformers import ElasticTrainer

    arguments = TrainingArguments(str(directory), report_to=[], use_cpu=True)
    data = Points(directory, 0.0, named=True)
    ElasticTrainer(session, model=Net(), args=arguments, train_dataset=data).train(resume_from_checkpoint=True)


def lightning(session: Session, directory: Path, checkpoint: str | None = None, **options: Any) -> None:
    import lightning as L

    trainer, module = lightning_trainer(session, directory, max_epochs=1, logger=False, **options)
    path = directory / checkpoint if checkpoint is not None else None
    if path is not None:
        torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": L.__version__}, path)
    loader: Any = DataLoader(Points(directory, 0.0), batch_size=BATCH)
    trainer.fit(module, loader, loader, ckpt_path=path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("begin", "message"),
    [
        pytest.param(transformers, "resumes by itself", id="transformers"),
        pytest.param(partial(lightning, checkpoint="old.ckpt"), "resumes by itself", id="lightning"),
        pytest.param(partial(lightning, limit_train_batches=2), "whole epochs", id="lightning-limit"),
        pytest.param(partial(lightning, max_time="00:01:00:00"), "its own clock", id="lightning-time"),
        pytest.param(partial(lightning, val_check_interval="00:01:00:00"), "its own clock", id="lightning-interval"),
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
