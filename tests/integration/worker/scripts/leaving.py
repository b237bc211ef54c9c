"""A training whose rank 1 goes another way than rank 0 after step 6: ``leaving.py HOW``."""

from __future__ import annotations

import sys

import torch

from elastic_trainer import Session
from tests.unit.worker.toys import data, linear, loss_of


def main() -> None:
    how = sys.argv[1]
    with Session(device="cpu") as session:
        torch.manual_seed(0)
        optimizer, model = linear(session)
        odd = session.rank == 1
        for batch in session.batches(data(), global_batch_size=10, epochs=1 if odd and how == "fewer epochs" else 3):
            with session.step() as step:
                step.backward(loss_of(model, batch))
                optimizer.step()
            if not odd or session.step_number != 6:
                continue
            if how == "break":
                break
            if how == "exit":
                sys.exit()
            if how == "evaluate":
                session.evaluate(model, data(), 10, lambda _, part: {"size": (float(len(part.x)), 1.0)})


if __name__ == "__main__":
    main()
