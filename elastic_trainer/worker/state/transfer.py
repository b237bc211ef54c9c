"""Sends one rank's state to all ranks, as the bytes of the checkpoint format, in pieces of bounded size.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* RoundBrokenError when a peer is gone, CheckpointError naming a value that cannot be saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from elastic_trainer.checkpoint import codec, tensorfile, tensors
from elastic_trainer.checkpoint.image import FileImage
from elastic_trainer.checkpoint.layout import STATE_FILE, TENSORS_FILE
from elastic_trainer.worker.comm.control import Control

CHUNK = 32 << 20
"""Bytes per broadcast."""
_WHERE = "the state of another rank"


def share_state(control: Control, source: int, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """The ``state`` of rank ``source`` on every rank; other ranks' argument is ignored. Tensors are on the CPU."""
    with control.agreed():
        image = codec.encode(state) if state is not None and control.rank == source else None
    if control.alone:
        return dict(state or {})
    if image is None:
        return _receive(control, source)
    files = {file.name: file for file in image.files}
    _send(control, source, files[STATE_FILE], files[TENSORS_FILE])
    return dict(state or {})


def packed(state: Mapping[str, Any]) -> bytes:
    """A small ``state`` as one piece. CheckpointError naming a value that cannot be saved."""
    files = {file.name: file for file in codec.encode(state).files}
    skeleton, data = b"".join(files[STATE_FILE].body()), files[TENSORS_FILE]
    sizes = json.dumps([len(skeleton), len(data.head), data.body_size]).encode()
    return b"".join([sizes, b"\n", skeleton, data.head, *data.body()])


def unpacked(data: bytes) -> dict[str, Any]:
    """What :func:`packed` packed; tensors are on the CPU."""
    sizes, _, rest = data.partition(b"\n")
    skeleton, head, size = json.loads(sizes)
    begin = skeleton + head
    arriving = _Arriving(rest[:skeleton], rest[skeleton:begin], size)
    for target in arriving.targets:
        target[:] = rest[begin : begin + len(target)]
        begin += len(target)
    return arriving.state()


def _send(control: Control, source: int, skeleton: FileImage, data: FileImage) -> None:
    control.broadcast_bytes(json.dumps([data.body_size]).encode(), source)
    control.broadcast_bytes(b"".join(skeleton.body()), source)
    control.broadcast_bytes(data.head, source)
    buffer = torch.empty(min(CHUNK, max(1, data.body_size)), dtype=torch.uint8)
    view, filled = buffer.numpy().data, 0
    for piece in _cut(data.body()):
        begin = 0
        while begin < len(piece):
            size = min(len(piece) - begin, len(view) - filled)
            view[filled : filled + size] = piece[begin : begin + size]
            begin, filled = begin + size, filled + size
            if filled == len(view):
                control.broadcast(buffer, source)
                filled = 0
    if filled:
        control.broadcast(buffer[:filled], source)


def _receive(control: Control, source: int) -> dict[str, Any]:
    (size,) = json.loads(control.broadcast_bytes(b"", source))
    skeleton = control.broadcast_bytes(b"", source)
    head = control.broadcast_bytes(b"", source)
    arriving = _Arriving(skeleton, head, size)
    target, left = memoryview(b""), size
    buffer = torch.empty(min(CHUNK, max(1, size)), dtype=torch.uint8)
    while left:
        part = buffer[: min(left, len(buffer))]
        control.broadcast(part, source)
        view = part.numpy().data
        while len(view):
            if not len(target):
                target = next(arriving.targets)
            count = min(len(view), len(target))
            target[:count] = view[:count]
            view, target = view[count:], target[count:]
        left -= len(part)
    return arriving.state()


class _Arriving:
    """A state whose tensors are still to be written into ``targets``, ``size`` bytes in all."""

    def __init__(self, skeleton: bytes, head: bytes, size: int) -> None:
        self._skeleton, self._placed = skeleton, tensorfile.parse(head, size, _WHERE)
        self._slabs = tensors.allocate(self._placed)
        self.targets = _cut(slab.view for slab in self._slabs)

    def state(self) -> dict[str, Any]:
        return codec.decode(self._skeleton, tensors.build(self._placed, self._slabs), _WHERE)


def _cut(views: Iterable[memoryview]) -> Iterator[memoryview]:
    return (view for view in views if len(view))
