"""Sharded state: which box of a DTensor this process holds, and which of all boxes it writes.

The processes that hold one copy of a sharded model are the *places* of a shard group, numbered as in its mesh. Each
writes one file of tensors: its shards, and place 0 everything that is not sharded. What several places hold alike is
written by one of them, which each finds out alone::

    places = Places(mesh)                                    # the mesh of the whole shard group, as the model's
    image = manager.encode(state, info, places=places)       # on every place; its own file alone
    manager.commit(image, manager.draft(info))               # place 0
    manager.help(image, manager.draft(info), 0, stop)        # the others, at the same time (see joint)

    manager.load(entry, Live(state))                         # on every rank of any mesh: reads what it holds

Boxes follow from a tensor's mesh and placements as FSDP2 and tensor parallel make them (shards of torch.chunk's sizes,
uneven and empty ones too; the strided shards of the two together). No process asks another.

*Fails by* CheckpointError for a tensor whose part here is not a box.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from elastic_trainer.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""An offset and a shape."""


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor; torch need not be there."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_elsewhere(tensor: Any) -> bool:
    """Whether ``tensor`` is on the meta device: another process holds it."""
    return getattr(getattr(tensor, "device", None), "type", None) == "meta"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of ``tensor``, without history: a DTensor's own shard, else all of it."""
    held: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return held.detach()


def box_of(tensor: DTensor) -> Box:
    """Where in the whole tensor the local one lies. CheckpointError if it is not a box, or not known."""
    coordinate = _coordinate(tensor.device_mesh)
    offset, shape = [0] * tensor.dim(), list(tensor.shape)
    for axis, dimension in _in_order(tensor):
        parts = tensor.device_mesh.size(axis)
        step = -(-shape[dimension] // parts)
        first = min(shape[dimension], step * coordinate[axis])
        offset[dimension] += first
        shape[dimension] = min(step, shape[dimension] - first)
    if tuple(shape) != tuple(local(tensor).shape):
        raise _strange(tensor, f"it holds {list(local(tensor).shape)} where {shape} belongs")
    return tuple(offset), tuple(shape)


def _in_order(tensor: DTensor) -> list[tuple[int, int]]:
    """The axes of the mesh that shard ``tensor``, each with the dimension that it shards, in the order of their cuts.

    Plain shards cut from left to right. FSDP2 cuts what tensor parallel has cut before, though its axis is on the left:
    a strided shard says so, and comes last.
    """
    plain, strided = [], []
    placements: Any = tensor.placements
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise _strange(tensor, "it is a part of a sum", "redistribute it to Replicate() or Shard()")
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            plain.append((axis, placement.dim))
            continue
        behind = 1
        for later in range(axis + 1, len(placements)):
            if getattr(placements[later], "dim", None) == placement.dim:
                behind *= tensor.device_mesh.size(later)
        if factor != behind:
            raise _strange(tensor, "its parts are interleaved", "redistribute it to Shard()")
        strided.append((axis, placement.dim))
    return [*plain, *reversed(strided)]


def _coordinate(mesh: DeviceMesh) -> list[int]:
    found = mesh.get_coordinate()
    if found is None:
        raise CheckpointError("its mesh does not have this process", hint="call this on the ranks that hold it")
    return list(found)


def _strange(tensor: DTensor, what: str, hint: str = "save its .full_tensor()") -> CheckpointError:
    placements = ", ".join(map(str, tensor.placements))
    return CheckpointError(f"it is sharded as ({placements}), and {what}", hint=hint)


class Places:
    """The processes that hold one copy of the state: those of ``mesh``, of which this one is ``index`` of ``count``.

    Along the dimension ``stages`` of the mesh they hold different tensors; those of others are on the meta device here.
    """

    def __init__(self, mesh: DeviceMesh, stages: int | None = None) -> None:
        self._numbers, self._stages = mesh.mesh, stages
        self._coordinate = _coordinate(mesh)
        self.count = self._numbers.numel()
        self.index = 0
        for size, position in zip(self._numbers.shape, self._coordinate, strict=True):
            self.index = self.index * size + position
        self._first_of: dict[DeviceMesh, bool] = {}

    def writes(self, tensor: torch.Tensor) -> bool:
        """Whether this place writes what it holds of ``tensor``."""
        if not is_sharded(tensor) or not tensor.numel():
            return self.index == 0
        sharded: Any = tensor
        coordinate, placements = _coordinate(sharded.device_mesh), sharded.placements
        first = all(not coordinate[axis] for axis, each in enumerate(placements) if each.is_replicate())
        return first and bool(local(tensor).numel()) and self._first(sharded.device_mesh)

    def _first(self, mesh: DeviceMesh) -> bool:
        """Whether ``mesh`` is the first of the like meshes that make up that of all places.

        A tensor that is sharded over some of its dimensions is there once for each coordinate in the others.
        """
        if mesh not in self._first_of:
            where = [(self._numbers == number).nonzero() for number in mesh.mesh.flatten()]
            if not all(len(each) == 1 for each in where):
                raise CheckpointError(
                    "it is sharded over ranks that are no places of this checkpoint",
                    hint="save with the mesh that the whole model is sharded over",
                )
            positions = [each[0].tolist() for each in where]
            fixed = [axis for axis, seen in enumerate(zip(*positions, strict=True)) if len(set(seen)) == 1]
            self._first_of[mesh] = not any(self._coordinate[axis] for axis in fixed if axis != self._stages)
        return self._first_of[mesh]
