"""A small in-place training whose end the test decides: it leaves when the file ``stop`` is there.

``--poison N``: the process kills itself whenever sample N is in its batch. ``--bad N``: it raises then.
``--nowhere``: it has no checkpoint directory. ``--slow S``: each checkpoint takes S seconds more to be written.
``--linger``: after the session it waits for the file ``go``, rank 0 alone; with a file ``fail`` it raises then.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.checkpoint import Event
from elastic_trainer.clock import pause
from elastic_trainer.worker.steps.options import GroupOptions, SavingOptions

SAMPLES, BATCH = 320, 32


def begun() -> torch.utils.data.TensorDataset:
    """The process is set up as those of all trainings here; their data."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(SAMPLES, 16), torch.arange(SAMPLES) % 4)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--poison", type=int, default=-1)
    parser.add_argument("--bad", type=int, default=-1)
    parser.add_argument("--linger", action="store_true")
    parser.add_argument("--nowhere", action="store_true")
    parser.add_argument("--slow", type=float, default=0.0)
    options = parser.parse_args()

    def slow_disk(event: Event) -> None:
        pause(options.slow)

    data = begun()
    with Session(
        checkpoint_dir=None if options.nowhere else options.directory / "checkpoints",
        checkpoint_every_s=None,
        saving=SavingOptions(on_event=slow_disk),
        group=GroupOptions(stop_timeout_s=60.0),
    ) as session:
        model, optimizer = built()
        model = session.wrap(model, optimizer=optimizer)
        rank = session.rank
        for batch in session.batches(data, global_batch_size=BATCH, epochs=10_000):
            with session.step() as step:
                if options.poison in batch.ids:
                    os.kill(os.getpid(), signal.SIGKILL)
                if options.bad in batch.ids:
                    raise ValueError(f"sample {options.bad} is bad")
                step.backward(nn.functional.cross_entropy(model(batch.x), batch.y))
                end = session.all_reduce(torch.tensor(float((options.directory / "stop").exists())))
                optimizer.step()
            if step.committed and end.item():
                break
            rank = session.rank
            pause(0.06)
    while options.linger and rank == 0 and not (options.directory / "go").exists():
        pause(0.05)
    if options.linger and rank == 0 and (options.directory / "fail").exists():
        raise OSError("the export failed")


if __name__ == "__main__":
    main()
