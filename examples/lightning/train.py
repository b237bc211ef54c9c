"""A LightningModule whose Trainer trains on when nodes die: which of two spirals is a point on?

elastic-trainer local --nodes 2:3 --recovery in_place --kill-node-at 50 -- examples/lightning/train.py
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_trainer import Session

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--directory", default="runs/lightning", help="checkpoints; started again, the job resumes there")
options = parser.parse_args()


def spirals(count: int) -> TensorDataset:
    """Points of two spirals, (count, 2), and the number of each one's spiral."""
    spiral = torch.arange(count) % 2
    turn = math.pi * (0.5 + 2 * torch.rand(count, generator=torch.Generator().manual_seed(count)))
    angle = turn + math.pi * spiral
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 8, spiral)


with Session(checkpoint_dir=options.directory, seed=0) as session:
    session.hide_ranks()  # before Lightning looks for them
    import lightning

    from elastic_trainer.integrations.lightning import ElasticStrategy

    class Spirals(lightning.LightningModule):
        """As one writes it."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, number):
            hits = (self.net(batch[0]).argmax(1) == batch[1]).float()
            self.log("accuracy", hits.mean(), prog_bar=False, batch_size=len(hits))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            length = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        strategy=ElasticStrategy(session),
        devices=1,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train, test = (DataLoader(spirals(count), batch_size=32, shuffle=count > 1000) for count in (2000, 500))
    trainer.fit(Spirals(), train, test)
    if session.is_rank0:
        accuracy = float(trainer.callback_metrics["accuracy"])
        print(f"{accuracy:.1%} of the points are on the right spiral", flush=True)
