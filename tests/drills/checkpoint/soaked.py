"""A training that copies its state all the time: ``soaked.py DIRECTORY STEPS [PAUSE_S [SAVED_AT]]``.

With a pause between two steps it saves each second, or only behind step SAVED_AT. It ends behind step STEPS, or where
the file ``stop`` appears, and leaves that step and the digest of its parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.checkpoint.codec import fingerprint
from elastic_trainer.clock import pause
from elastic_trainer.worker.steps.options import SavingOptions

SAMPLES, BATCH, WIDTH = 96, 16, 4096
SNAPSHOT_EVERY_S, SAVE_EVERY_S = 0.2, 1.0


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    saved_at = int(sys.argv[4]) if len(sys.argv) > 4 else None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 64), torch.arange(SAMPLES) % 4)
    model: nn.Module = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    saving = SavingOptions(snapshot_every_s=SNAPSHOT_EVERY_S)
    every_s = SAVE_EVERY_S if pause_s and saved_at is None else None
    with Session(directory / "checkpoints", seed=1, device="cpu", checkpoint_every_s=every_s, saving=saving) as session:
        model = session.wrap(model, optimizer=optimizer, reduction="tree")
        for batch in session.batches(data, global_batch_size=BATCH, micro_batch_size=4, epochs=1_000_000):
            with session.step() as step:
                for micro in step.micro_batches(batch):
                    step.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
                (ended,) = session.all_reduce(torch.tensor([float((directory / "stop").exists())])).tolist()
                optimizer.step()
            if not step.committed:
                continue
            if session.step_number == saved_at:
                session.save(wait=True)
            if ended or session.step_number >= steps:
                break
            pause(pause_s)
        digest = fingerprint(session.module.state_dict())
        (directory / f"digest-{session.rank}").write_text(f"{session.step_number} {digest}")


if __name__ == "__main__":
    main()
