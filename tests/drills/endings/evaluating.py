"""A small in-place training of ``EPOCHS`` epochs, each with an evaluation; it lasts while the file ``hold`` is there.

Who evaluates has written ``evaluating-NODE``; the mean label that each evaluation has found is in ``mean-NODE``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.clock import pause
from tests.drills.endings.train import BATCH, begun, built

EPOCHS = 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    data = begun()
    with Session(device="cpu") as session:
        module, optimizer = built()
        model, node = session.wrap(module, optimizer=optimizer), session.environment.node

        def count(_: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
            (directory / f"evaluating-{node}").touch()
            while (directory / "hold").exists():
                pause(0.02)
            return {"label": (batch.y.sum(), len(batch))}

        for _ in session.epochs(EPOCHS):
            for batch in session.batches(data, global_batch_size=BATCH):
                with session.step() as step:
                    step.backward(nn.functional.cross_entropy(model(batch.x), batch.y))
                    optimizer.step()
                pause(0.04)
            mean = session.evaluate(model, data, BATCH, count)["label"]
            with (directory / f"mean-{node}").open("a") as file:
                file.write(f"{mean}\n")


if __name__ == "__main__":
    main()
