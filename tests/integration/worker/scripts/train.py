"""A whole small training job: ``train.py DIRECTORY EPOCHS [--option value ...]``. Writes its final parameters."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from elastic_trainer import Session
from elastic_trainer.clock import pause
from elastic_trainer.worker.steps.options import GroupOptions


class Noisy(Dataset[Any]):
    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(length, 6, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.01 * torch.randn(6), self.x[index].sum().view(1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("epochs", type=int)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--die-at", type=int, help="this step's commit is followed by a SIGKILL, once per --mark")
    parser.add_argument("--die-rank", type=int, default=0)
    parser.add_argument("--mark", type=Path)
    parser.add_argument("--stop-timeout-s", type=float, default=10.0)
    parser.add_argument("--freeze-at", type=int, help="rank --die-rank stops itself with SIGSTOP after this step")
    parser.add_argument("--init-method")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--allow-changed", nargs="*", default=())
    return parser.parse_args()


def accident(args: argparse.Namespace, session: Session) -> None:
    if session.rank != args.die_rank:
        return
    if args.freeze_at == session.step_number:
        os.kill(os.getpid(), signal.SIGSTOP)
    if args.die_at == session.step_number and not args.mark.exists():
        args.mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    with Session(
        args.directory / "checkpoints",
        seed=3,
        device="cpu",
        checkpoint_every_steps=args.save_every,
        checkpoint_every_s=None,
        group=GroupOptions(stop_timeout_s=args.stop_timeout_s),
        allow_changed=args.allow_changed,
        init_method=args.init_method,
        rank=args.rank,
        world_size=args.world_size,
    ) as session:
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        wrapped = session.wrap(model, optimizer=optimizer, scheduler=scheduler)
        data = Noisy(86)
        for epoch in session.epochs(args.epochs):
            for batch in session.batches(data, global_batch_size=16, micro_batch_size=args.micro_batch):
                with session.step() as step:
                    for part in step.micro_batches(batch):
                        step.backward(nn.functional.mse_loss(wrapped(part.x), part.y))
                    step.clip(5.0)
                    optimizer.step()
                if args.step_s:
                    pause(args.step_s)
                accident(args, session)
            result = session.evaluate(wrapped, data, 7, lambda module, batch: {"y": (batch.y.sum(), len(batch))})
            session.save({"y": result["y"]}, best=epoch == 0)
        torch.save(model.state_dict(), args.directory / f"final-{session.rank}.pt")
        print("finished", session.rank, session.world_size, session.step_number, flush=True)


if __name__ == "__main__":
    main()
