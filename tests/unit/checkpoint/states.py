"""States to save, and an equality that sees every bit."""

from __future__ import annotations

import os
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from elastic_trainer.checkpoint import CheckpointManager, Event, Loaded, LoadInto, Retention, StateSnapshot
from elastic_trainer.checkpoint.manifest import FileRecord, Image, Manifest, checked, record
from elastic_trainer.checkpoint.memory import LocalMemory
from elastic_trainer.checkpoint.reading import LOAD_NEW
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.restore import StoredStates, restore


def descriptor_of(snapshot: StateSnapshot) -> int:
    """The memory file of this process that it is in."""
    assert isinstance(snapshot.memory, LocalMemory)
    return snapshot.memory.descriptor


def same(left: Any, right: Any) -> bool:
    """Whether both have equal types and equal bits all the way down, in the same order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, dict | OrderedDict | Counter):
        pairs = zip(left.items(), right.items(), strict=True) if len(left) == len(right) else ()
        return len(left) == len(right) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


def training_state(seed: int = 0, width: int = 16) -> dict[str, Any]:
    """Model, optimizer, scheduler and random state after some real steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(), "cursor": {"epoch": 1, "samples": 96},
    }  # fmt: skip


def load_newest(checkpoints: CheckpointManager, live: LoadInto = LOAD_NEW) -> Loaded | None:
    """The newest that is whole, as a job that resumes finds it: bad ones are set aside on the way."""
    state, found = dict[str, Any](), list[Manifest]()

    class Stored(StoredStates):
        def loaded(self, files: Any, manifest: Manifest, *more: Any, **values: Any) -> None:
            found.append(manifest)
            super().loaded(files, manifest, *more, **values)

    stored = Stored(checkpoints, HeartbeatReporter())
    restore(Control(), Control(), stored, dict, state.update, lambda origin: None, live=live)
    return Loaded(state, found[-1]) if found else None


def newest_of(checkpoints: CheckpointManager, live: LoadInto = LOAD_NEW) -> Loaded:
    loaded = load_newest(checkpoints, live)
    assert loaded is not None
    return loaded


def records(image: Image) -> tuple[FileRecord, ...]:
    """The records of the files of ``image``, as a commit would make them."""
    return tuple(map(record, checked(image).files))


class Heard(list[Event]):
    def kinds(self) -> list[str]:
        return [str(event.kind) for event in self]


def manager(directory: Path, keep_last: int = 10, **policy: Any) -> tuple[CheckpointManager, Heard]:
    heard = Heard()
    return CheckpointManager(directory, Retention(keep_last=keep_last, **policy), heard.append), heard


def flip_bit(path: Path, bit: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, bit // 8)[0]
        os.pwrite(descriptor, bytes([byte ^ 1 << bit % 8]), bit // 8)
    finally:
        os.close(descriptor)


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """One bit of ``path`` is wrong inside the block."""
    flip_bit(path, bit)
    try:
        yield
    finally:
        flip_bit(path, bit)


class GroupRank:
    """Shard rank ``index`` of two, which holds all that it is asked about, or the tensors of ``own`` first number."""

    count = 2

    def __init__(self, index: int, own: int | None = None) -> None:
        self.index, self.own = index, own

    def writes(self, tensor: torch.Tensor) -> bool:
        return self.own is None or int(tensor[0]) % 10 == self.own


class Harmful:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)
