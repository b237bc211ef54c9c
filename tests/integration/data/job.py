"""A job with data worker processes: ``job.py DIRECTORY PORT``. Says on a connection to PORT who they are."""

from __future__ import annotations

import multiprocessing
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from elastic_trainer import Session
from elastic_trainer.clock import pause


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        pause(0.001)
        return torch.randn(4), torch.ones(1)


def main() -> None:
    directory, port = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        Session(directory / "checkpoints", device="cpu", checkpoint_every_s=None) as session,
    ):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(Slow(), global_batch_size=8, epochs=1000, workers=2):
            with session.step() as step:
                step.backward(nn.functional.mse_loss(wrapped(batch.x), batch.y))
                optimizer.step()
            if session.step_number == 3:
                processes = [str(process.pid) for process in multiprocessing.active_children()]
                connection.sendall((" ".join(processes) + "\n").encode())


if __name__ == "__main__":
    main()
