"""Which of two spirals is a point on?"""

import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from elastic_trainer import Datasets, Section, Task


def spirals(count, seed):
    """Pairs of a point, (2,), and the number of its spiral, 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    spiral = torch.arange(count) % 2
    turn = math.pi * (0.5 + 2 * torch.rand(count, generator=generator))
    angle = turn + math.pi * spiral
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 8
    return TensorDataset(points, spiral.float())


class Spirals(Task):
    class Data(Section):  # what the job file may say under data:
        count: int = 2000

    class Model(Section):  # and under model:
        width: int = 32

    def datasets(self):
        return Datasets(train=spirals(self.data_options.count, seed=1), test=spirals(500, seed=2))

    def model(self):
        width = self.model_options.width
        return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def loss(self, model, batch):  # the mean over the batch
        return binary_cross_entropy_with_logits(model(batch.x).squeeze(1), batch.y)

    def metrics(self, model, batch):  # a sum, and what to divide it by: exact, however the data is divided
        hits = (model(batch.x).squeeze(1) > 0) == (batch.y > 0.5)
        return {"accuracy": (hits.sum(), len(batch))}
