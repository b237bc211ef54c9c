"""Encodes the results of calls for other ranks: JSON, and tensors with their dtype and shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elastic_trainer import torch_internals
from elastic_trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ElasticTrainerError,
    NonFiniteError,
    PermanentError,
    RoundBrokenError,
    StorageError,
    TransientError,
)
from elastic_trainer.worker.comm.abort import InterruptibleWaits, ThreadedWork


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


_PAYLOAD = 6
WIDTH = _PAYLOAD + 2
"""Of the vector of a sum."""


class Purpose(IntEnum):
    """What a sum is for. Values are part of the protocol."""

    BOUNDARY = 1
    LOSS = 2
    SAVE = 3
    EVALUATE = 4
    BARRIER = 5
    AGREE = 6
    STOP = 7
    FINISH = 8
    COUNT = 9
    PLAN = 10
    TRAINED = 11
    COMPARE = 12
    NORM = 13
    COMMIT = 14
    SKIP = 15
    FORWARD = 16
    BACKWARD = 17
    AVERAGE = 18


class CallsDifferError(ConfigError):
    """Ranks did different things at the same time."""


class Pending:
    """A pending sum. ``vector`` must stay alive until it is done; it has a ``tolist()``."""

    __slots__ = ("_control", "_purpose", "_vector", "_work")

    def __init__(self, control: Control, work: Any, vector: Any, purpose: Purpose) -> None:
        self._control, self._work, self._vector, self._purpose = control, work, vector, purpose

    def wait(self) -> list[float]:
        if self._work is not None:
            self._control.finish(self._work, self._purpose.name.lower())
        return self._control.checked(self._vector.tolist(), self._purpose)


class Control:
    """The collectives. Without a group the process is alone, and each collective returns its own values."""

    def __init__(
        self,
        group: Any = None,
        rank: int = 0,
        world_size: int = 1,
        works: InterruptibleWaits | None = None,
        transfer_limit: timedelta = timedelta(0),
    ) -> None:
        self._group, self.rank, self.world_size = group, rank, world_size
        self.alone = world_size == 1
        self.begun = 0
        """Collectives of all ranks; equal on ranks that have come equally far."""
        self.newest = ""
        """What the newest of its sums is for."""
        self.works = works if works is not None else InterruptibleWaits()
        self._transfer_limit = transfer_limit
        """Limit for sending and receiving, in seconds; 0: the timeout with which the group was created."""

    @property
    def group(self) -> Any:
        """The process group; None without one, or after :meth:`close`."""
        return self._group

    # ---- sums

    def start(self, purpose: Purpose, values: Sequence[float]) -> Pending:
        """Start summing up to six ``values`` over all ranks."""
        vector = torch.tensor(self.vector(purpose, values), dtype=torch.float64)
        self.newest = purpose.name.lower()
        return Pending(self, None if self.alone else self._begin("allreduce", [vector]), vector, purpose)

    @staticmethod
    def vector(purpose: Purpose, values: Sequence[float]) -> list[float]:
        """What this rank adds to a sum."""
        return [float(purpose), float(purpose) ** 2, *values, *[0.0] * (_PAYLOAD - len(values))]

    def sum(self, purpose: Purpose, values: Sequence[float] = ()) -> list[float]:
        """Sum up to six ``values`` over all ranks; each rank waits for all others."""
        return self.start(purpose, values).wait()

    def checked(self, summed: list[float], purpose: Purpose) -> list[float]:
        """The payload of a summed vector; ConfigError unless all ranks had one purpose (all equal <=> no variance)."""
        if summed[0] != purpose * self.world_size or summed[1] != purpose**2 * self.world_size:
            raise CallsDifferError(
                f"rank {self.rank} reached '{purpose.name.lower()}' while another rank did something else",
                hint=_EQUALLY if purpose in _PASSES else _ON_ALL,
            )
        return summed[2:]

    # ---- other collectives

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The ``values`` of all ranks, by rank; each rank passes equally many."""
        mine = torch.tensor(values, dtype=torch.int64)
        if self.alone:
            return [mine.tolist()]
        out = [torch.empty_like(mine) for _ in range(self.world_size)]
        self.finish(self._begin("allgather", [out], [mine]), "gather")
        return [row.tolist() for row in out]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The ``data`` of all ranks, by rank."""
        if self.alone:
            return [data]
        sizes = [row[0] for row in self.gather([len(data)])]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        out = [torch.empty_like(mine) for _ in sizes]
        self.finish(self._begin("allgather", [out], [mine]), "gather")
        return [bytes(row[:size].numpy().tobytes()) for row, size in zip(out, sizes, strict=True)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor`` (contiguous, on the CPU) with that of rank ``source``."""
        self.broadcast_all([(tensor, source)])

    def broadcast_all(self, tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
        """:meth:`broadcast` each tensor from its source, all at the same time."""
        if self.alone:
            return
        works = []
        for tensor, source in tensors:
            options = dist.BroadcastOptions()
            options.rootRank = source
            options.rootTensor = 0
            works.append(self._begin("broadcast", [tensor], options))
        for work in works:
            self.finish(work, "broadcast")

    def broadcast_bytes(self, data: bytes, source: int) -> bytes:
        """The ``data`` of rank ``source``; that of other ranks is ignored."""
        if self.alone:
            return data
        size = torch.tensor([len(data)], dtype=torch.int64)
        self.broadcast(size, source)
        if not int(size):
            return b""
        mine = self.rank == source
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if mine else torch.empty(int(size), dtype=torch.uint8)
        )
        self.broadcast(buffer, source)
        return bytes(buffer.numpy().tobytes())

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self.finish(self._begin("send", [tensor], target, 0, threaded=True), "send")

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self.finish(self._begin("recv", [tensor], source, 0, threaded=True), "receive")

    def exchange(self, sent: Sequence[tuple[bytes, int]], expected: Sequence[tuple[int, int]]) -> list[bytes]:
        """Send each piece to its rank, and receive those ``expected``, as (size, rank), all at the same time.

        Between two ranks at most one piece goes each way; none is empty.
        """
        leaving = [(torch.frombuffer(bytearray(data), dtype=torch.uint8), target) for data, target in sent]
        coming = [(torch.empty(size, dtype=torch.uint8), source) for size, source in expected]
        works = [self._begin("recv", [tensor], source, 0, threaded=True) for tensor, source in coming]
        works += [self._begin("send", [tensor], target, 0, threaded=True) for tensor, target in leaving]
        for work in works:
            self.finish(work, "exchange")
        return [tensor.numpy().tobytes() for tensor, _ in coming]

    def add_up(self, vector: torch.Tensor) -> None:
        if not self.alone:
            self.finish(self._begin("allreduce", [vector]), "all_reduce")

    def agree(self, error: ElasticTrainerError | None) -> None:
        """Raise on all ranks if any rank has an ``error``: its own, or else that of the first such rank."""
        if not self.sum(Purpose.AGREE, [float(error is not None)])[0]:
            return
        texts = self.gather_bytes(b"" if error is None else f"{_kind(error)}:{error}".encode())
        if error is not None:
            raise error
        rank, text = next((rank, text.decode()) for rank, text in enumerate(texts) if text)
        kind, _, message = text.partition(":")
        raise _KINDS[kind](f"rank {rank}: {message}")

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """:meth:`agree` about an error in the body."""
        problem: ElasticTrainerError | None = None
        try:
            yield
        except RoundBrokenError:
            raise
        except ElasticTrainerError as error:
            problem = error
        self.agree(problem)

    # ---- the group

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit all later collectives.

        gloo's connections keep the timeout that they were created with, so transfers pass theirs with each wait.
        """
        torch_internals.limit_gloo(self._group, timeout)
        self._transfer_limit = timeout

    def close(self) -> None:
        """Drop the group; waits for its threads unless another reference to it exists."""
        self._group = None

    def _begin(self, name: str, *arguments: Any, threaded: bool = False) -> Any:
        if self._group is None:
            raise RoundBrokenError(f"the round of rank {self.rank} has been left")
        self.begun += not threaded
        try:
            work = getattr(self._group, name)(*arguments)
            return self.works.begun(ThreadedWork(partial(work.wait, self._transfer_limit)) if threaded else work)
        except RuntimeError as error:
            raise RoundBrokenError(f"a peer of rank {self.rank} was lost ({name}: {_first_line(error)})") from error

    def finish(self, work: Any, what: str) -> None:
        try:
            self.works.wait(work)
        except RuntimeError as error:
            raise RoundBrokenError(f"a peer of rank {self.rank} was lost ({what}: {_first_line(error)})") from error


_PASSES = (Purpose.FORWARD, Purpose.BACKWARD, Purpose.NORM, Purpose.COMMIT)
_EQUALLY = "in each step all ranks that share a sharded model must call it, and step.backward(), equally often"
_ON_ALL = "call save(), evaluate(), barrier() and step.loss on all ranks, never on rank 0 alone"
_BITS, _PARTS = 20, 3
"""With it the sum of squares over 8192 ranks is exact: a double has 53 bits."""
_MASK = (1 << _BITS) - 1


class EqualityCheck:
    """Whether the low 60 bits of ``number`` are equal on all ranks, computed in the background by one sum.

    Equal values have no variance: if the sums of values and squares over W ranks are W times a rank's own value and
    square, all ranks have that value.
    """

    def __init__(self, control: Control, purpose: Purpose, number: int) -> None:
        parts = [float((number >> _BITS * place) & _MASK) for place in range(_PARTS)]
        mine = [*parts, *(part * part for part in parts)]
        self._wanted = [control.world_size * each for each in mine]
        self._pending = control.start(purpose, mine)

    def wait(self) -> bool:
        return self._pending.wait() == self._wanted


_KINDS: dict[str, type[ElasticTrainerError]] = {
    kind.__name__: kind
    for kind in (StorageError, CheckpointError, DataError, ConfigError, NonFiniteError, TransientError, PermanentError)
}


def _kind(error: ElasticTrainerError) -> str:
    """The nearest base class that every rank can construct."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), PermanentError.__name__)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
