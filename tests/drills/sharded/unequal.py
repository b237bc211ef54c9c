"""Under torchrun: ``unequal.py WHAT``: rank 0 calls the model more often: ``forward`` alone, or a ``step`` of both."""

from __future__ import annotations

import sys

import torch

from elastic_trainer import Session
from tests.drills.sharded.train import built, optimized


def main(what: str) -> None:
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 48), torch.randn(8, 7))
    with Session(device="cpu") as session:
        model = built(session, {})
        optimizer = optimized(model, {})
        model = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(data, global_batch_size=4, epochs=1):
            with session.step() as step:
                loss = ((model(batch.x) - batch.y) ** 2).mean()
                if what == "forward" and session.rank == 0:
                    loss = loss + model(batch.x).mean()
                step.backward(loss)
                if what == "step" and session.rank == 0:
                    step.backward(model(batch.x).mean())
                optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
