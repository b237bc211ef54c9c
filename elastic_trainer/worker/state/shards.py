"""The state of a sharded model: as this rank's shards, as whole tensors, and back into live ones.

Ranks of one place give each other shards. Checkpoints hold whole tensors under the names that an unsharded model has,
so they load at any number of ranks, and at none.

*Runs in* the worker's main thread; putting tensors together is done by all ranks of a shard group at once.
*Fails by* CheckpointError for an optimizer whose state is sharded unlike its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from elastic_trainer.errors import CheckpointError
from elastic_trainer.worker.comm.lasting import local

SHARD, SHAPE = "elastic_trainer.shard", "shape"
Tree = Mapping[str, Any]


def shards_of(tree: Any) -> Any:
    """``tree`` with this rank's shard, marked, in place of each sharded tensor; the shards are the live ones."""
    return _mapped(tree, lambda each: {SHARD: local(each.detach()), SHAPE: list(each.shape)})


def whole_of(tree: Any) -> Any:
    """``tree`` with whole tensors, on the CPU; all ranks of the shard group call it at once."""
    return _mapped(tree, lambda each: each.full_tensor().detach().cpu())


@torch.no_grad()
def _mapped(node: Any, change: Callable[[DTensor], Any]) -> Any:
    if isinstance(node, DTensor):
        return change(node)
    if isinstance(node, dict):
        found = {key: _mapped(each, change) for key, each in node.items()}
        changed = type(node)(found) if type(node) is not dict else found
        if hasattr(node, "_metadata"):
            changed._metadata = node._metadata  # type: ignore[attr-defined]
        return changed
    if isinstance(node, (list, tuple)):
        return type(node)(_mapped(each, change) for each in node)
    return node


def placed_model(saved: Tree, live: Tree) -> dict[str, Any]:
    """The tensors of ``saved`` (shards or whole) as those of ``live`` are; what does not fit is left as it is."""
    return {name: _like(each, live.get(name), name) for name, each in saved.items()}


def placed_optimizer(saved: Tree, parameters: list[torch.Tensor]) -> dict[str, Any]:
    """The state dict of an optimizer for ``parameters``, in its order."""
    state = {
        number: {name: _like(each, _owner(number, parameters), f"{number}/{name}") for name, each in entry.items()}
        for number, entry in saved["state"].items()
    }
    return {**saved, "state": state}


def _owner(number: Any, parameters: list[torch.Tensor]) -> torch.Tensor | None:
    return parameters[number] if isinstance(number, int) and number < len(parameters) else None


def _like(value: Any, live: Any, name: str) -> Any:
    """``value`` sharded as ``live`` is, if both are of one shape."""
    marked = isinstance(value, dict) and SHARD in value
    if not isinstance(live, DTensor):
        return value
    shape = value[SHAPE] if marked else list(value.shape) if isinstance(value, torch.Tensor) else None
    if shape != list(live.shape):
        if marked:
            raise CheckpointError(
                f"the optimizer's state {name!r} is sharded as {shape}, its parameter as {list(live.shape)}",
                hint="use an optimizer whose state has the shape of its parameters, such as AdamW",
            )
        return value
    here = value[SHARD] if marked else _cut(value, live)
    like = local(live.detach())
    return DTensor.from_local(
        here.to(like.device).view(like.shape),
        live.device_mesh,
        live.placements,
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )


def _cut(whole: torch.Tensor, live: DTensor) -> torch.Tensor:
    """This rank's shard of ``whole``."""
    shape, offset = compute_local_shape_and_global_offset(live.shape, live.device_mesh, live.placements)
    for dim, (size, begin) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, min(begin, whole.shape[dim]), size)
    return whole.contiguous()
