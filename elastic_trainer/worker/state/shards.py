"""The state of a sharded model as this rank's shards, which ranks with the same shard rank give each other, and back.

*Runs in* the worker's main thread.
*Fails by* CheckpointError for an optimizer whose state is sharded unlike its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from elastic_trainer.checkpoint.codec import is_elsewhere, local
from elastic_trainer.errors import CheckpointError

SHARD, SHAPE = "elastic_trainer.shard", "shape"
Tree = Mapping[str, Any]


def shards_of(node: Any) -> Any:
    """``node`` with this rank's shard, marked, in place of each sharded tensor; the shards are the live ones."""
    if is_elsewhere(node):
        return None
    if isinstance(node, DTensor):
        return {SHARD: local(node), SHAPE: list(node.shape)}
    if isinstance(node, dict):
        found = {key: shards_of(each) for key, each in node.items()}
        changed = type(node)(found) if type(node) is not dict else found
        if hasattr(node, "_metadata"):
            changed._metadata = node._metadata  # type: ignore[attr-defined]
        return changed
    if isinstance(node, (list, tuple)):
        return type(node)(shards_of(each) for each in node)
    return node


def placed_model(saved: Tree, live: Tree) -> dict[str, Any]:
    """The tensors of ``saved``, with shards as those of ``live`` are; what is no shard is left as it is."""
    return {name: _like(each, live.get(name), name) for name, each in saved.items()}


def placed_optimizer(saved: Tree, parameters: list[torch.Tensor]) -> dict[str, Any]:
    """The state dict of an optimizer for ``parameters``, in its order."""
    state = {
        number: {name: _like(each, owner, f"{number}/{name}") for name, each in entry.items()}
        if (owner := _owner(number, parameters)) is not None
        else entry  # of the whole optimizer
        for number, entry in saved["state"].items()
        if not is_elsewhere(_owner(number, parameters))
    }
    return {**saved, "state": state}


def completed_optimizer(state: Tree, parameters: list[torch.Tensor]) -> dict[str, Any]:
    """The state dict of an optimizer with entries for the parameters that other stages hold.

    They have what a parameter of the same group has here: tensors without data, and its numbers.
    """
    known = {number: each for number, each in state["state"].items() if isinstance(number, int)}
    others = {name: each for name, each in state["state"].items() if name not in known}
    for group in state["param_groups"]:
        like = next((number for number in (*group["params"], *known) if number in state["state"]), None)
        for number in group["params"]:
            absent = parameters[number]
            if like is not None and is_elsewhere(absent) and absent.requires_grad:
                entry, shape = state["state"][like], parameters[like].shape
                known[number] = {name: _absent(each, absent, shape) for name, each in entry.items()}
    return {**state, "state": {**dict(sorted(known.items())), **others}}


def _absent(value: Any, parameter: torch.Tensor, shape: torch.Size) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_like(parameter, dtype=value.dtype) if value.shape == shape else value.clone()


def _owner(number: Any, parameters: list[torch.Tensor]) -> torch.Tensor | None:
    return parameters[number] if isinstance(number, int) and number < len(parameters) else None


def _like(value: Any, live: Any, name: str) -> Any:
    """``value``, if it is a shard, as a part of a tensor that is sharded as ``live`` is."""
    if is_elsewhere(live) and (value is None or value.shape == live.shape):
        return live
    if not isinstance(live, DTensor) or not (isinstance(value, dict) and SHARD in value):
        return value
    if value[SHAPE] != list(live.shape):
        raise CheckpointError(
            f"the optimizer's state {name!r} is sharded as {value[SHAPE]}, its parameter as {list(live.shape)}",
            hint="use an optimizer whose state has the shape of its parameters, such as AdamW",
        )
    like = local(live)
    return DTensor.from_local(
        value[SHARD].to(like.device).view(like.shape),
        live.device_mesh,
        live.placements,
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )
