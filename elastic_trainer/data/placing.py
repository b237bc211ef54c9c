"""Nested data: put on a device, pinned for the copy to it, and recognised as untouched since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


def placed(data: Any, device: torch.device) -> Any:
    """``data`` with all tensors in it on ``device``."""
    return _mapped(data, lambda tensor: tensor if tensor.device == device else tensor.to(device, non_blocking=True))


def pinned(data: Any) -> Any:
    """``data`` with all CPU tensors in it in pinned memory, from which a device copies while the host goes on."""
    return _mapped(data, lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)


def versions(data: Any) -> tuple[int, ...] | None:
    """How often each tensor in ``data`` was changed in place; None if it holds what may change without a trace."""
    counts = []
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
            counts.append(leaf._version)
        elif not isinstance(leaf, (str, bytes, int, float, complex, type(None))):
            return None
    return tuple(counts)


def leaves(data: Any) -> Iterator[Any]:
    """What ``data`` consists of, containers apart."""
    if isinstance(data, Mapping):
        for value in data.values():
            yield from leaves(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from leaves(value)
    else:
        yield data


def _mapped(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return {key: _mapped(value, change) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_mapped(value, change) for value in data))
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return type(data)(_mapped(value, change) for value in data)  # type: ignore[call-arg]
    return data
