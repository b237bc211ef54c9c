"""Live tensors into which a checkpoint is read directly, without a second copy in memory.

A tensor of the state is read directly into the one at the same path of the live state, if type and shape are equal. Of
a sharded tensor (DTensor) only the local shard is read. Other tensors are created on the CPU, whole, unless ``like``
has one of equal shape for the path: then they are created with its sharding. Live tensors on the meta device belong to
another process and are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_trainer.checkpoint import sharded, tensors
from elastic_trainer.checkpoint.codec import Leaf
from elastic_trainer.checkpoint.tensorfile import Placed

if TYPE_CHECKING:
    import torch

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """The live tensors: ``state`` is a state dict; ``like`` has, by path, models of tensors that it lacks.

    The state of an optimizer that has made no step is empty; ``like`` then has its parameters, by the paths of their
    states. ``fits`` gets the stored state, with tensors on the meta device, before anything is changed; it may raise.
    If it returns False, the whole state is created as new tensors.
    """

    state: Mapping[str, Any] = field(default_factory=dict)
    like: Mapping[Path, torch.Tensor] = field(default_factory=dict)
    fits: Callable[[dict[str, Any]], bool] = lambda state: True

    def chosen(self, leaves: Mapping[Path, Leaf], found: Sequence[Placed]) -> dict[str, torch.Tensor]:
        """The tensors to fill, by the names of the stored ones."""
        stored = {each.name: each for each in found}
        result: dict[str, torch.Tensor] = {}
        for path, leaf in leaves.items():
            if leaf.mark != "tensor" or leaf.tensor is None or leaf.tensor in result:
                continue
            tensor = self._at(path, stored[leaf.tensor])
            if tensor is not None:
                result[leaf.tensor] = tensor
        return result

    def _at(self, path: Path, stored: Placed) -> torch.Tensor | None:
        there = _found(self.state, path)
        if sharded.is_elsewhere(there) and tuple(there.shape) == stored.shape:
            absent: torch.Tensor = there
            return absent
        if tensors.fits(there, stored):
            tensor: torch.Tensor = there
            return tensor
        model = self.like.get(path[:-1])
        if model is None or tuple(model.shape) != stored.shape:
            return None
        if not sharded.is_sharded(model) and not sharded.is_elsewhere(model):
            return None
        return tensors.new_like(model, stored.dtype)


NOTHING_LIVE = Live()


def _found(state: Any, path: Path) -> Any:
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state
