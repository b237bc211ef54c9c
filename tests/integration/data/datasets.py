"""Data sets that misbehave in data worker processes."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from elastic_trainer.errors import DataError


class Noisy(Dataset[Any]):
    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(), torch.rand(())


class Counted(Noisy):
    def __init__(self, length: int = 20) -> None:
        super().__init__(length)
        self.fetched = torch.zeros(length, dtype=torch.int64)
        self.fetched.share_memory_()  # type: ignore[no-untyped-call]

    def __getitem__(self, index: int) -> Any:
        self.fetched[index] += 1
        return torch.tensor(float(index))


class OddError(Exception):
    """Cannot be pickled: it wants two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


class Raising(Noisy):
    """Raises something else for each of the first samples; sample 13 ends its process, sample 15 sleeps."""

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            raise LookupError("zero")
        if index == 1:
            raise DataError("one", hint="advice")
        if index == 2:
            raise OddError("two", "three")
        if index == 3:
            return {"lock": threading.Lock()}
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 15:
            threading.Event().wait(60.0)
        if index == 6:
            raise RuntimeError("gloo: connection closed by peer")
        return index


class Large(Noisy):
    def __getitem__(self, index: int) -> Any:
        return bytes(1 << 22)


class Holed(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index in (1, 2, 3):
            raise ValueError(f"bad {index}")
        return torch.tensor(float(index))


class Inherited(Noisy):
    """A sample is what a data worker has of its parent: sockets, handlers, wakeup descriptor."""

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            threading.Event().wait(0.3)  # so that a signal that was sent meanwhile has arrived
        sockets = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            except OSError:
                continue
        return (
            sockets, int(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN),
            int(signal.getsignal(signal.SIGINT) is signal.SIG_IGN),
            int(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN),
            int(signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL), signal.set_wakeup_fd(-1), os.getpid(),
        )  # fmt: skip


class Words:
    """A stream that tells in which process a sample was read."""

    def __len__(self) -> int:
        return 20

    def read_from(self, epoch: int, position: int) -> Iterator[Any]:
        info = get_worker_info()
        for number in range(position, 20):
            yield number, info.id if info is not None else -1


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


class Collecting(Noisy):
    """Collects garbage whenever a sample is read; a sample tells whether that ended something of the parent's."""

    def __init__(self, told: Path) -> None:
        super().__init__()
        self._told = told

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        return torch.tensor(float(self._told.exists()))


class Cycle:
    """Garbage that only a collection finds, and that tells when it is ended in another process than its own."""

    def __init__(self, told: Path) -> None:
        self._told, self._owner, self._itself = told, os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self._owner:
            self._told.touch()
