"""Encodes the results of calls for other ranks: JSON, and tensors with their dtype and shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes and decodes the result of a call."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


JSON = Codec(lambda result: json.dumps(result).encode(), lambda data: json.loads(data))


def packed_tensor(tensor: torch.Tensor) -> bytes:
    """``tensor`` (contiguous, on the CPU) with its dtype and shape."""
    head = json.dumps([str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode()
    return head + b"\n" + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def unpacked_tensor(data: bytes) -> torch.Tensor:
    """The inverse of :func:`packed_tensor`."""
    head, _, body = data.partition(b"\n")
    kind, shape = json.loads(head)
    dtype: torch.dtype = getattr(torch, kind)
    if not body:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(dtype).reshape(shape)


TENSOR = Codec(packed_tensor, unpacked_tensor)


def bytes_of(tensor: torch.Tensor) -> Codec:
    """The result is written into ``tensor``."""

    def encode(result: torch.Tensor) -> bytes:
        return bytes(result.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def decode(data: bytes) -> torch.Tensor:
        if not data:
            return tensor
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype)
        return tensor.copy_(flat.reshape(tensor.shape))

    return Codec(encode, decode)
