"""A training of a fixed length that saves seldom and copies its state often: ``rescued.py DIRECTORY STEPS [PAUSE_S]``.

It leaves in DIRECTORY the digest of the parameters at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.checkpoint.fingerprint import fingerprint
from elastic_trainer.clock import pause
from elastic_trainer.worker.steps.options import SavingOptions

SAMPLES, BATCH, SAVED_AT = 96, 16, 20
SNAPSHOT_EVERY_S = 0.3


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 64), torch.arange(SAMPLES) % 4)
    model: nn.Module = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    saving = SavingOptions(snapshot_every_s=SNAPSHOT_EVERY_S)
    with Session(directory / "checkpoints", seed=1, device="cpu", checkpoint_every_s=None, saving=saving) as session:
        model = session.wrap(model, optimizer=optimizer, reduction="tree")
        for batch in session.batches(data, global_batch_size=BATCH, micro_batch_size=4, epochs=10_000):
            with session.step() as step:
                for micro in step.micro_batches(batch):
                    step.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
                optimizer.step()
            if not step.committed:
                continue
            if session.step_number == SAVED_AT:
                session.save(wait=True)
            if session.step_number >= steps:
                break
            pause(pause_s)
        (directory / f"digest-{session.rank}").write_text(str(fingerprint(session.module.state_dict())))


if __name__ == "__main__":
    main()
