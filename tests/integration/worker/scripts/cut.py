"""A training whose ranks differ: ``cut.py RANK CHANGES [EPOCH]``.

That rank calls ``batches()`` with these CHANGES (JSON), from EPOCH on; ``{"seed": 4}`` is for its Session. All others
look at a batch first that nobody trains on.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from elastic_trainer import Session
from elastic_trainer.clock import pause
from tests.unit.worker.toys import data, loss_of, model

PACE_S = 0.03


def main() -> None:
    odd = int(os.environ["RANK"]) == int(sys.argv[1])
    changes: dict[str, Any] = json.loads(sys.argv[2]) if odd else {}
    since = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    length, seed = changes.pop("length", 960), changes.pop("seed", 3)
    with Session(seed=seed, device="cpu") as session:
        torch.manual_seed(0)
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        wrapped = session.wrap(module, optimizer=optimizer, sync_batchnorm=True)
        for epoch in session.epochs(2):
            asked = {"global_batch_size": 16, "micro_batch_size": 2} | (changes if epoch >= since else {})
            if not odd:
                next(session.batches(data(), global_batch_size=4))
            for batch in session.batches(data(length), **asked):
                with session.step() as step:
                    for part in step.micro_batches(batch):
                        step.backward(loss_of(wrapped, part))
                    optimizer.step()
                pause(PACE_S)


if __name__ == "__main__":
    main()
