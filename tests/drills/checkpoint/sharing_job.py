"""A training of a large model on a slow disk: ``sharing_job.py DIRECTORY STEPS MB_A_SECOND [own | rank0]``.

Each rank writes what its model holds at each save to DIRECTORY. ``own``: each node saves to a directory of its own.
``rank0``: rank 0 writes all of each checkpoint. With ``stalled`` for MB_A_SECOND the disk stores no tensors until
there is a file DIRECTORY/released.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.checkpoint import manager
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.variables import ENV_NODE
from elastic_trainer.worker.report import process_id
from elastic_trainer.worker.state.saver import SHARED_FROM, Writers
from elastic_trainer.worker.steps.options import SavingOptions
from tests.support.throttled import Stalled, ThrottledStorage

SAVE_EVERY = 4
WIDTH = 2048


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    rate = Stalled(directory / "released") if sys.argv[3] == "stalled" else float(sys.argv[3]) * 1e6
    node = os.environ[ENV_NODE] if sys.argv[4:] == ["own"] else "all"

    def slow(place: str | Path) -> Storage:
        return ThrottledStorage(Path(place), rate)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(96, WIDTH), torch.arange(96) % 4)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)]
    model: nn.Module = nn.Sequential(*layers)
    assert sum(each.nbytes for each in model.parameters()) >= SHARED_FROM
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    writers = Writers.RANK0 if "rank0" in sys.argv[4:] else Writers.AUTO
    saving = SavingOptions(snapshot_every_s=None, writers=writers)
    where = directory / "checkpoints" / node
    with (
        patch.object(manager, "open_storage", slow),
        Session(where, seed=1, device="cpu", checkpoint_every_s=None, saving=saving, keep_last=100) as session,
    ):
        model = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(data, global_batch_size=12, micro_batch_size=2, epochs=10_000):
            with session.step() as step:
                for micro in step.micro_batches(batch):
                    step.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
                optimizer.step()
            if not step.committed:
                continue
            if session.step_number % SAVE_EVERY == 0:
                mine = process_id(session.environment.ledger_dir)
                held = directory / f"held-{session.step_number}-{session.rank}-{mine}"
                torch.save(session.module.state_dict(), held.with_suffix(".part"))
                held.with_suffix(".part").rename(held)
                session.save()
            if session.step_number >= steps:
                break


if __name__ == "__main__":
    main()
