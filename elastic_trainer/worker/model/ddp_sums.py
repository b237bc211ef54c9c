"""Sums gradients over the ranks during the backward pass, with waits that the end of a round can interrupt.

DistributedDataParallel waits for its buckets inside the backward pass, where nothing can interrupt it. Here its
communication hook starts a bucket's sum and reports it done at once; gradients are views of the buckets, so nothing is
copied; the session waits for the sums after the pass (:mod:`elastic_trainer.worker.comm.waits`).

The hook does not divide by the number of ranks, which would be another pass over all gradients. The loss is divided
instead (``share``).

*Runs in* the worker's main thread. *Fails by* RoundBrokenError when the round is over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.worker.comm.failures import collective
from elastic_trainer.worker.comm.waits import InterruptibleWaits, Work


class _Sums:
    """The sums of one backward pass. The hook refers to it, so it must not refer to the module: a cycle through C++."""

    def __init__(self, group: Any, works: InterruptibleWaits) -> None:
        self._group, self._works = group, works
        self.begun: list[Work] = []
        self.complete = False
        """Whether the last bucket was started; buckets start in order, when they are full."""
        self._lost: RoundBrokenError | None = None

    def begin(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self.complete = bucket.is_last()
        try:
            with collective("all_reduce"):
                self.begun.append(self._works.begun(self._group.allreduce([buffer])))
        except RoundBrokenError as error:
            self._lost = error  # C++ calls this; raised after the pass
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def wait(self) -> bool:
        """Wait for all sums; whether there were any."""
        begun, self.begun = self.begun, []
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
        with collective("all_reduce"):
            for work in begun:
                self._works.wait(work)
        return bool(begun)


class Gradients:
    """The gradients of one round."""

    def __init__(self, parallel: DistributedDataParallel, works: InterruptibleWaits) -> None:
        self._parallel = parallel
        self._summed = False
        group = parallel.process_group
        self.share = 1.0 / group.size()
        """Factor for the loss that turns summed gradients into those of the mean."""
        self._sums = sums = _Sums(group, works)
        parallel.register_comm_hook(None, lambda state, bucket: sums.begin(bucket))

    def begin_step(self) -> None:
        self._summed = self._sums.complete = False

    @property
    def complete(self) -> bool:
        """Whether the sums hold all gradients of the step."""
        return self._sums.complete

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass and the sums over all ranks, unless sums are left to a later pass."""
        if self._summed:
            self._divide()
        loss.backward()  # type: ignore[no-untyped-call]
        self._summed = self._sums.wait()

    def _divide(self) -> None:
        """Gradients already summed will be summed again together with the new ones."""
        with torch.no_grad():
            grads = [each.grad for each in self._parallel.module.parameters() if each.grad is not None]
            if grads:  # the script may have dropped them
                torch._foreach_mul_(grads, self.share)
