"""A process group that behaves like NCCL, for machines without CUDA devices, and a worker that takes it for NCCL.

Its operations on float32 tensors, and all-to-alls of any, start at once and run one after the other, as kernels on a
stream do. A peer that is gone never shows: the kernel hangs until the communicator is aborted, whatever happens to
sockets. Then it ends without an error, and leaves garbage in its outputs (NaN, or a large negative number), so that a
step that counts nevertheless cannot go unnoticed. Later operations fail. A wait stands for the order of the stream: who
waits goes on when the kernel has ended. Everything else (the agreement of ranks) is gloo's, as beside NCCL.

Backward passes run in a thread of their own, as they do on a device.
"""

from __future__ import annotations

import os
import platform
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from elastic_trainer.worker.comm import groups, placement
from elastic_trainer.worker.comm.placement import NCCL
from elastic_trainer.worker.model.sharded import ShardedReplica
from elastic_trainer.worker.recovery import InPlaceRecovery

_KERNELS = ("allreduce", "allgather", "_allgather_base", "broadcast", "send", "recv", "alltoall_base")
_GARBAGE = -(1 << 40)


class Kernel(dist.Work):
    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.outputs, self.ended = outputs, threading.Event()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.ended.wait(timeout.total_seconds() or None):
            raise RuntimeError("the kernel is still running")
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class LikeNccl(dist.ProcessGroup):
    """See the module. ``aborts`` are those that hung until they were aborted, in this process."""

    alive: list[LikeNccl] = []  # noqa: RUF012 - of the process
    aborts = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timeout)
        self._wire = dist.ProcessGroupGloo(PrefixStore("device", store), rank, size, timedelta(hours=1))
        self._aborted = threading.Event()
        self._stream: queue.Queue[tuple[Callable[[], Any], Kernel] | None] = queue.Queue()
        self._running: Kernel | None = None
        LikeNccl.alive.append(self)
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cuda" else self._gloo

    def getBackendName(self) -> str:
        return "likenccl"

    def abort(self) -> None:
        """All kernels end, and nothing is right in what they have not finished."""
        self._aborted.set()
        self._stream.put(None)

    def shutdown(self) -> None:
        self.abort()

    def drained(self) -> bool:
        return self._stream.empty() and self._running is None

    def call(self, name: str, *arguments: Any) -> Any:
        tensors = list(_tensors(arguments))
        if tensors and tensors[0].dtype != torch.float32 and name != "alltoall_base":
            return getattr(self._gloo, name)(*arguments)
        if self._aborted.is_set():
            raise RuntimeError(f"NCCL communicator was aborted on rank {self.rank()}.")
        kernel = Kernel(tensors)
        self._stream.put((lambda: getattr(self._wire, name)(*arguments), kernel))
        return kernel

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """That of the last: kernels end in their order."""
        return [self.call("_allgather_base", *each) for each in zip(outputs, inputs, strict=True)][-1]

    def lost_peer(self) -> None:
        """Nobody learns it."""

    def _run(self) -> None:
        while (item := self._stream.get()) is not None:
            call, self._running = item
            kernel = item[1]
            if not self._aborted.is_set():
                self._compute(call, kernel)
            else:
                _spoil(kernel)
            kernel.ended.set()
            self._running = None
        while not self._stream.empty():
            item = self._stream.get()
            if item is not None:
                _spoil(item[1])
                item[1].ended.set()
        LikeNccl.alive.remove(self)

    def _compute(self, call: Callable[[], Any], kernel: Kernel) -> None:
        """The wire's own wait may not end when the kernel is aborted, so it has a thread."""
        outcome: list[bool] = []
        ended = threading.Event()

        def transfer() -> None:
            try:
                call().wait()
                outcome.append(True)
                ended.set()
            except RuntimeError:
                self.lost_peer()

        threading.Thread(target=transfer, name="kernel", daemon=True).start()
        while not ended.wait(0.005) and not self._aborted.is_set():
            pass
        if not outcome:
            LikeNccl.aborts += 1
            _spoil(kernel)


class LikeNccl2(LikeNccl):
    """As nccl2, which torch 2.15 takes for "nccl": a watchdog learns of a lost peer.

    ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` says what it does: 0 nothing, 2 abort the communicator, 1 or 3 (if it is not
    set) abort the process. Operations after an error raise. It says that it can be reconfigured.
    """

    supports_reconfigure = True
    failed = False

    def lost_peer(self) -> None:
        if self._aborted.is_set():
            return
        handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        if handling in ("1", "3"):
            os.abort()
        self.failed = True
        if handling == "2":
            self.abort()

    def call(self, name: str, *arguments: Any) -> Any:
        if self.failed:
            raise RuntimeError(f"NCCL communicator of rank {self.rank()} has failed.")
        return super().call(name, *arguments)


def _tensors(arguments: Any) -> Any:
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _spoil(kernel: Kernel) -> None:
    with torch.no_grad():
        spoiled = kernel.outputs[0].detach()
        spoiled.fill_(torch.nan if spoiled.is_floating_point() else _GARBAGE)


def _kernel(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self.call(name, *arguments)


for _name in _KERNELS:
    setattr(LikeNccl, _name, _kernel(_name))


def _like_real(
    kind: type[LikeNccl], store: Any, rank: int, size: int, timeout: timedelta, at: Any, *, nccl: bool = False
) -> Any:
    assert nccl
    return kind(store, rank, size, timeout)


def _synchronize() -> None:
    """As the host's wait for the device's present stream."""
    for group in list(LikeNccl.alive):
        while not group.drained():
            threading.Event().wait(0.001)


def _beside(act: Callable[[], object]) -> None:
    """Do it in another thread, as autograd does for a device."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="autograd")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def use(directory: Path, version: int) -> None:
    """This process takes its groups for NCCL's; how many kernels were aborted stands in ``aborts-HOST-PID``.

    ``version`` 2: for nccl2's."""
    kind = {1: LikeNccl, 2: LikeNccl2}[version]
    changed: Any = SimpleNamespace(take=placement.take, init=dist.init_process_group, passed=ShardedReplica._pass)
    dist.Backend.register_backend("likenccl", kind, devices=["cpu"])

    def take(*given: Any, **named: Any) -> Any:
        return replace(changed.take(*given, **named), backend=NCCL)

    def init(backend: str, *, device_id: Any = None, **named: Any) -> None:
        changed.init("likenccl", **named)
        world: Any = dist.group.WORLD
        c10d._world.pg_map[world] = (NCCL, c10d._world.pg_map[world][1])

    def check(self: Any) -> None:
        (directory / f"aborts-{platform.node()}-{os.getpid()}").write_text(str(LikeNccl.aborts))
        torch.cuda.current_stream().synchronize()
        self._require_round()

    places: Any = (placement, dist, groups, ShardedReplica, InPlaceRecovery, torch.cuda)
    places[0].take, places[1].init_process_group, places[2].real_group = take, init, partial(_like_real, kind)
    places[3]._pass = lambda self, backward: changed.passed(self, lambda: _beside(backward))
    places[4].check_gradients = check
    places[5].current_stream = lambda device=None: SimpleNamespace(synchronize=_synchronize)
