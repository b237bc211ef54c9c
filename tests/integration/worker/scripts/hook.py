"""Compares gradients summed by the session's hook with those of DistributedDataParallel, on two ranks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.control import InterruptibleWaits
from elastic_trainer.worker.model.replica import Gradients

Backward = Callable[[torch.Tensor], None]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4))


def train(backward: Backward, parallel: DistributedDataParallel, begin: Callable[[], None], sync: list[bool]) -> None:
    """One step of as many passes as ``sync`` has entries; each says whether its gradients are summed at once."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    begin()
    for summed in sync:
        with nullcontext() if summed else parallel.no_sync():
            backward(parallel(torch.randn(8, 64, generator=generator)).square().mean())


def gradients(hooked: bool, sync: list[bool]) -> list[torch.Tensor]:
    module = model()
    parallel = DistributedDataParallel(module, bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    if hooked:
        ours = Gradients(parallel, InterruptibleWaits(interruptible=True))
        train(lambda loss: ours.backward(loss * ours.share), parallel, ours.begin_step, sync)
    else:
        train(lambda loss: loss.backward(), parallel, lambda: None, sync)  # type: ignore[no-untyped-call]
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def main() -> None:
    dist.init_process_group("gloo")
    for sync in ([True], [False, True], [False, False, True], [True, True], [True, False, True]):
        for mine, theirs in zip(gradients(True, sync), gradients(False, sync), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
        sys.stdout.write(f"equal {dist.get_rank()} {sync}\n")
        sys.stdout.flush()
    gc.collect()  # the wrapped models hold the group
    groups.abandon(None)  # its threads end before the interpreter does, as in a session; else C++ may abort it


if __name__ == "__main__":
    main()
