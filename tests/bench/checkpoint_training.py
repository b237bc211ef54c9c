"""Saves in a training loop: how long one stops it, and what it costs in all until storage has it, ours and torch's.

The model is a stack of wide layers with AdamW. What a save costs in all is the time from the call of save until the
checkpoint is durable and the step at that moment has ended, less what as many steps take without a save, before and
after it. The same of no save at all says how much of that is the machine's own unrest. The loop trains with one thread,
so that a second core, where there is one, is free as it is beside a GPU. On a CUDA device all times end when the device
has done what was asked of it, and the copy goes to pinned memory.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from elastic_trainer.worker.comm.placement import GLOO, NCCL
from elastic_trainer.worker.session import Session
from tests.bench.report import alternate, median

WIDTH = 512
TOKENS = 64
STEPS_BESIDE = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that training stood still, and that it lost in all."""

    stall_s: float
    lost_s: float


class Block(nn.Module):
    """The feed-forward half of a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def measure_training(place: Path, megabytes: int, repeats: int, device: str = "cpu") -> dict[str, Any]:
    """Costs of a save of ``megabytes`` MB of model and Adam state, and of a copy in memory, each ``repeats`` times."""
    torch.manual_seed(1)
    blocks = max(1, round(megabytes * 1e6 / (12 * 8 * WIDTH * WIDTH)))
    network = nn.Sequential(*(Block() for _ in range(blocks)))
    inputs = torch.randn(TOKENS, WIDTH, device=device)
    place.mkdir()
    dist.init_process_group(GLOO if device == "cpu" else NCCL, store=HashStore(), rank=0, world_size=1)
    with Session(place / "ours", device=device, checkpoint_every_s=None, keep_last=1) as session:
        optimizer = torch.optim.AdamW(network.parameters())
        model = session.wrap(network, optimizer=optimizer)

        def step() -> None:
            with session.step() as step:
                step.backward(model(inputs).square().mean())
                optimizer.step()

        def state() -> dict[str, Any]:
            return {"model": network.state_dict(), "optimizer": optimizer.state_dict()}

        for _ in range(2):
            step()
        size = sum(each.nbytes for each in network.parameters()) * 3
        variants: dict[str, Callable[[], Cost]] = {
            "elastic_trainer": lambda: _cost(step, lambda: _ours(session, place / "ours")),
            "torch_save": lambda: _cost(step, lambda: _torch_save(place, state())),
            "dcp_async": lambda: _cost(step, lambda: _dcp(place / "dcp", state())),
            "no_save": lambda: _cost(step, _nothing),
            "memcpy": _copier(size, device),
        }
        for warm_up in variants.values():  # makes the arena, and others' staging memory
            warm_up()
        costs = alternate(variants, repeats)
    dist.destroy_process_group()
    shutil.rmtree(place)
    memcpy = median(each.stall_s for each in costs["memcpy"])
    return {
        "bytes": size,
        "stall_s": {who: [each.stall_s for each in found] for who, found in costs.items()},
        "lost_s": {who: [each.lost_s for each in found] for who, found in costs.items()},
        "stall_over_memcpy": {who: median(each.stall_s for each in found) / memcpy for who, found in costs.items()},
        "lost_over_memcpy": {who: median(each.lost_s for each in found) / memcpy for who, found in costs.items()},
    }


def _cost(step: Callable[[], None], save: Callable[[], Callable[[], bool]]) -> Cost:
    """Of ``save``, which returns what says whether the checkpoint is durable."""
    os.sync()
    step()
    _settle()
    usual = [_clocked(step) for _ in range(STEPS_BESIDE)]
    began = time.perf_counter()
    durable = save()
    _settle()
    stall_s = time.perf_counter() - began
    steps = 0
    while not durable() or steps < 1:
        step()
        steps += 1
    _settle()
    took_s = time.perf_counter() - began
    usual += [_clocked(step) for _ in range(STEPS_BESIDE)]
    return Cost(stall_s, took_s - steps * median(usual))


def _nothing() -> Callable[[], bool]:
    """It lasts as many steps as the others are compared with."""
    left = iter(range(STEPS_BESIDE))
    return lambda: next(left, None) is None


def _clocked(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    _settle()
    return time.perf_counter() - began


def _settle() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _ours(session: Session, directory: Path) -> Callable[[], bool]:
    name = session.save()
    return lambda: (directory / str(name)).exists()


def _torch_save(place: Path, state: dict[str, Any]) -> Callable[[], bool]:
    with (place / "torch.tmp").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    (place / "torch.tmp").rename(place / "torch.pt")
    return lambda: True


def _dcp(directory: Path, state: dict[str, Any]) -> Callable[[], bool]:
    shutil.rmtree(directory, ignore_errors=True)
    writer = FileSystemWriter(directory, sync_files=True)
    future = async_save(state, storage_writer=writer)
    return future.done  # type: ignore[union-attr]


def _copier(size: int, device: str) -> Callable[[], Cost]:
    act: Callable[[], object]
    if device == "cpu":
        source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        act = lambda: np.copyto(target, source)  # noqa: E731
    else:
        there = torch.ones(size, dtype=torch.uint8, device=device)
        here = torch.ones(size, dtype=torch.uint8).pin_memory()
        act = lambda: here.copy_(there, non_blocking=True)  # noqa: E731

    def copy() -> Cost:
        took_s = _clocked(act)
        return Cost(took_s, took_s)

    return copy
