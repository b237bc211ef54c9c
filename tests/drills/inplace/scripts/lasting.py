"""Trains in place without end, and notes each round: ``lasting.py MEGABYTES BUCKET_MB [GROUP_TIMEOUT_S]``.

Each line of ``NODE.rounds`` tells what the process holds in the middle of a round, and when the main thread was freed
from the round before (on the monotonic clock, which processes of one host share).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.worker.recovery import InPlaceRecovery
from elastic_trainer.worker.steps.options import GroupOptions

WIDTH = 256
FREED = [0.0]


def watch_freedom() -> None:
    """Note when an error has brought the main thread out of a round."""
    is_end = InPlaceRecovery._confirm_end

    def noted(self: InPlaceRecovery, error: BaseException) -> bool:
        FREED[0] = time.monotonic()
        return is_end(self, error)

    InPlaceRecovery._confirm_end = noted  # type: ignore[method-assign]


def holdings() -> dict[str, Any]:
    """Descriptors, threads of the system and of Python, resident bytes."""
    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "python_threads": threading.active_count(),
        "bytes": process.memory_info().rss,
    }


def main(megabytes: float, bucket_mb: float, group_timeout_s: float | None = None) -> None:
    torch.set_num_threads(1)
    watch_freedom()
    layers = max(1, round(megabytes * (1 << 20) / (4 * WIDTH * (WIDTH + 1))))
    with (
        Session(seed=1, device="cpu", group=GroupOptions(timeout_s=group_timeout_s)) as session,
        Path(f"{os.environ['ELASTIC_TRAINER_NODE']}.rounds").open("w") as out,
    ):
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9)
        model = session.wrap(module, optimizer=optimizer, ddp_options={"bucket_cap_mb": bucket_mb})
        x, last, steps = torch.randn(4, WIDTH), 0, 0
        while True:
            with session.step() as step:
                step.backward(model(x).square().mean())
                optimizer.step()
            steps = steps + 1 if session.round == last else 1
            last = session.round
            if steps == 2:
                gc.collect()
                line = {"round": session.round, "step": session.step_number, "freed": FREED[0], **holdings()}
                out.write(json.dumps(line) + "\n")
                out.flush()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
