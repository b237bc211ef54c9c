"""CallReplay that all ranks make together, when a round ends in the middle of one.

Some ranks may have completed the call and gone on, others not. Repeating it would leave the former in one place and the
latter in another; so the ranks count their completed calls, and who is one behind is given the result by who is not.

*Runs in* the worker's main thread of all ranks at once. *Fails by* RoundBrokenError when a peer is gone.
*Invariant*: ranks differ by at most one call, since the next cannot be completed without all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from elastic_trainer.worker.comm.control import Control

NEWCOMER = -1


@dataclass(frozen=True, slots=True)
class Codec:
    """How the result of a call travels."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


JSON = Codec(lambda result: json.dumps(result).encode(), lambda data: json.loads(data))


def packed_tensor(tensor: torch.Tensor) -> bytes:
    """``tensor`` (contiguous, on the CPU) with its dtype and shape."""
    head = json.dumps([str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode()
    return head + b"\n" + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def unpacked_tensor(data: bytes) -> torch.Tensor:
    """What :func:`packed_tensor` packed."""
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


class CallReplay:
    """Counts completed calls. ``count`` is NEWCOMER until this rank has met others."""

    def __init__(self) -> None:
        self.count = NEWCOMER
        self._last = b""
        self._answer: bytes | None = None

    @property
    def has_answer(self) -> bool:
        """Whether a peer has completed the call that this rank is in."""
        return self._answer is not None

    def completed(self, result: Any, codec: Codec) -> Any:
        """Note that a call was completed here; its result."""
        self.count = max(0, self.count) + 1
        self._last = codec.encode(result)
        return result

    def answer(self, codec: Codec) -> Any:
        """The result that a peer has given: the call counts as completed here."""
        data, self._answer = cast("bytes", self._answer), None
        self.count += 1
        self._last = data
        return codec.decode(data)

    def meet(self, control: Control, counts: Sequence[int]) -> None:
        """A round begins with ranks that have completed so many calls: bring those behind level."""
        most = max(counts)
        if any(0 <= count < most for count in counts):
            data = control.broadcast_bytes(self._last, counts.index(most))
            self._answer = data if 0 <= self.count < most else None
        if self.count == NEWCOMER:
            self.count = max(0, most)
