"""The collectives of all ranks of a round: how they are made, waited for, and told from other errors when they fail.

A collective ends in one of three ways. It completes. A peer is gone, or the round is over: then its wait ends at once,
with RoundBrokenError. Or ranks have come to different points of the script, where each waits for the others for ever.

*Runs in* the worker's main thread, and a thread for each round that looks for ranks elsewhere (:class:`Whereabouts`).
*Owns* three keys of the round's store. *Fails by* RoundBrokenError; ConfigError for ranks that call different things.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastic_trainer import torch_internals
from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import (
    EXIT_CONFIG,
    LONGEST_LINE,
    CheckpointError,
    ConfigError,
    DataError,
    ElasticTrainerError,
    NonFiniteError,
    PermanentError,
    RejoinError,
    RoundBrokenError,
    StorageError,
    TransientError,
)
from elastic_trainer.model import line_of_script, place_of
from elastic_trainer.telemetry.logs import complain, final_message, logger
from elastic_trainer.worker.report import HeartbeatReporter

# ---- which errors are those of a collective
#
# gloo raises plain RuntimeErrors, and scripts may raise them with any text ("S3 GET: socket timeout"). So a session
# marks its own collectives. Errors from elsewhere in a step (DistributedDataParallel, the script's own collectives)
# count if they have a type of torch.distributed or name a line of gloo's source. Even then nothing is repeated until
# the agent has confirmed that the round is over.


_REMOTE = re.compile(r"remote=\[([^\]\s]+)\]")
_PORT = re.compile(r"(remote=\[[^\]\s]+\]):\d+(?:\$\d+)?")


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from or during."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def summary(error: BaseException) -> str:
    """``error`` in a few words, without gloo's file names, advice, and the number of a pair that is gone."""
    text = str(error).partition("\n")[0]
    text = _PORT.sub(r"\1", re.sub(r"\[/[^\]]*\]\s*", "", text))
    return text.partition(". This is")[0][:160]


def tried(error: BaseException) -> str:
    """The address that gloo could not connect to, as far as its message says; a hint, since that is no interface."""
    found = (_REMOTE.search(str(each)) for each in chain(error))
    return next((match[1] for match in found if match is not None), "")


def trail(error: BaseException) -> list[str]:
    """``error`` and its causes, each with the calls that it came through, outermost first: for the log."""
    found = []
    for each in chain(error):
        codes = ((frame.f_code, line) for frame, line in walk_tb(each.__traceback__))
        calls = " > ".join(f"{Path(code.co_filename).name}:{line} {code.co_name}" for code, line in codes)
        found.append(f"{type(each).__name__}: {summary(each)} ({calls})")
    return found


def origin(error: BaseException) -> dict[str, Any]:
    """Where ``error`` comes from, for a verdict: the types of it and its causes, what this process did, the line of the
    script, and the innermost cause in a few words."""
    types, at, because = list[str](), "", ""
    files = list[str]()
    for each in _raised_from(error):
        if each is not error and str(each):
            because = f"{type(each).__name__}: {summary(each)}"
        kind = type(each)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        code = errno.errorcode.get(each.errno or 0) if isinstance(each, OSError) else None
        types.append(f"{name}[{code}]" if code else name)
        frames = [(frame.f_code, line) for frame, line in walk_tb(each.__traceback__)][::-1]
        files = [code.co_filename for code, _ in frames] + files  # the cause lies deeper
        at = line_of_script((code.co_filename, line, code.co_name) for code, line in frames) or at
    return {"types": types, "place": place_of(files), "at": at[:LONGEST_LINE], "because": because}


_MOST_TYPES = 6


def _raised_from(error: BaseException) -> Iterator[BaseException]:
    """``error`` and its causes; not what a handler was busy with that failed itself."""
    current: BaseException | None = error
    for _ in range(_MOST_TYPES):
        if current is not None:
            yield current
            current = current.__cause__


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Turns any error of the body, which only peers can cause, into a RoundBrokenError."""
    try:
        yield
    except RuntimeError as error:
        raise RoundBrokenError(f"a peer was lost ({what}: {summary(error)})") from error


def is_collective_failure(error: BaseException) -> bool:
    """Whether ``error`` or one of its causes is a collective that lost a peer."""
    return any(
        isinstance(each, (RejoinError, TransientError))
        or (isinstance(each, dist.DistError) and not torch_internals.OWN_DEVICE.search(str(each)))
        or (isinstance(each, RuntimeError) and torch_internals.IN_GLOO.search(str(each)) is not None)
        for each in chain(error)
    )


# ---- waits that the end of the round ends


MOMENT_S = 0.02
AWAITED_S = 30.0
"""Seconds between log entries of a wait for storage."""
_MOMENT = timedelta(seconds=MOMENT_S)
_FEW = 64


class Work(Protocol):
    """The part of a ``torch.distributed`` operation that is used."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class ThreadedWork:
    """An action, or a wait, in a separate thread: transfers, and the creation of a group.

    gloo closes the connection when the wait for a transfer times out; other waits only check the clock. And the
    creation of a group cannot be interrupted while it waits for a peer to connect.

    ``brief``: the interpreter waits for the thread at exit, since C++ aborts if it returns to Python later.
    """

    def __init__(self, act: Callable[[], object], *, brief: bool = False) -> None:
        self._act = act
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.result: Any = None
        threading.Thread(target=self._run, name="threaded-work", daemon=not brief).start()

    def _run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: the waiting thread raises it
            self._error = error
        finally:
            self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """RuntimeError if it failed, or has not ended after ``timeout``."""
        if not self._ended.wait(timeout.total_seconds() if timeout is not None else None):
            raise RuntimeError("the operation is still in progress")
        if self._error is not None:
            raise self._error
        return True


@contextmanager
def storage_awaited() -> Iterator[None]:
    """While the body waits for storage, log it every ``AWAITED_S`` seconds: no other process may notice."""
    began, over = SYSTEM.monotonic(), threading.Event()

    def say() -> None:
        while not over.wait(AWAITED_S):
            waited_s = round(SYSTEM.monotonic() - began, 1)
            logger().warning("storage.awaited", waited_s=waited_s, effect="this process continues when storage answers")

    threading.Thread(target=copy_context().run, args=(say,), name="storage-awaited", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class InterruptibleWaits:
    """Waits for the works of one round. ``interruptible`` False: not split (the process has only one round).

    ``tracker`` notes when this process waits for others.
    """

    def __init__(self, tracker: HeartbeatReporter | None = None, *, interruptible: bool = False) -> None:
        self._tracker, self._interruptible = tracker, interruptible
        self.over = threading.Event()
        """Set when the round is over."""
        self._why = ""
        self._open: dict[int, Work] = {}
        self._most = _FEW
        self._aborts: list[Callable[[], object]] = []

    def begun(self, work: Work) -> Work:
        """It is kept until it was waited for; one that nobody waits for, until some time after it has completed."""
        if len(self._open) >= self._most:
            for each in list(self._open.values()):
                if each.is_completed():
                    self.forget(each)
            self._most = max(_FEW, 2 * len(self._open))
        self._open[id(work)] = work
        return work

    def forget(self, work: Work) -> None:
        """Treat ``work`` as ended, whatever it reports."""
        self._open.pop(id(work), None)

    def wait(self, work: Work) -> None:
        """Wait until ``work`` has ended, at most for its group's timeout, and in place no longer than the round."""
        if self._tracker is not None:
            self._tracker.begin_wait()
        try:
            self._wait(work)
        finally:
            if self._tracker is not None:
                self._tracker.resumes()
            if work.is_completed():
                self._open.pop(id(work), None)

    def wait_for_own(self, work: Work) -> None:
        """:meth:`wait` for storage, which this process reads or writes itself: it is not waiting for others."""
        with storage_awaited():
            self._wait(work)

    def check(self) -> None:
        """In place, raise RoundBrokenError if the round is over."""
        if self._interruptible and self.over.is_set():
            raise RoundBrokenError(self._why)

    def _wait(self, work: Work) -> None:
        """An error of ``work`` after the end of its round is raised as RoundBrokenError."""
        if not self._interruptible:
            work.wait()
            return
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):
                work.wait(_MOMENT)
                return
            if not work.is_completed():
                self.check()
        try:
            work.wait()  # the moment may have ended just before
        except RuntimeError as error:
            if self.over.is_set():
                raise RoundBrokenError(self._why) from error
            raise

    def end(self, why: str) -> None:
        """End all waits, because of ``why``. From any thread."""
        self._why = self._why or why
        self.over.set()

    def abort_with(self, act: Callable[[], object]) -> None:
        """Register ``act``, which frees a device's kernels that wait for a lost peer; no wait can do that."""
        self._aborts.append(act)

    def abort(self) -> None:
        """Call the registered action: the round is over in the middle of a collective. From any thread."""
        for act in self._aborts:
            try:
                act()
            except RuntimeError as error:
                logger().warning("nccl.not_aborted", error=str(error).partition("\n")[0])

    def outlive(self) -> int:
        """Wait until all operations have ended, successfully or not; returns how many there were."""
        left = list(self._open.values())
        for work in left:
            with contextlib.suppress(RuntimeError):
                work.wait()
        self._open.clear()
        return len(left)


# ---- what a call gives, for ranks that get its result from a peer


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes and decodes the result of a call."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


JSON = Codec(lambda result: json.dumps(result).encode(), lambda data: json.loads(data))


def packed_tensor(tensor: torch.Tensor) -> bytes:
    """``tensor`` with its dtype and shape."""
    tensor = tensor.detach().cpu().contiguous()
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
        return packed_tensor(result).partition(b"\n")[2]

    def decode(data: bytes) -> torch.Tensor:
        if not data:
            return tensor
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype)
        return tensor.copy_(flat.reshape(tensor.shape))

    return Codec(encode, decode)


# ---- the collectives


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
        self.group, self.rank, self.world_size = group, rank, world_size
        """The process group; None without one, or after :meth:`close`."""
        self.alone = world_size == 1
        self.begun = 0
        """Collectives of all ranks; equal on ranks that have come equally far."""
        self.newest = ""
        """What the newest of its sums is for."""
        self.works = works if works is not None else InterruptibleWaits()
        self._transfer_limit = transfer_limit
        """Limit for sending and receiving, in seconds; 0: the timeout with which the group was created."""

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
        torch_internals.limit_gloo(self.group, timeout)
        self._transfer_limit = timeout

    def close(self) -> None:
        """Drop the group; waits for its threads unless another reference to it exists."""
        self.group = None

    def _begin(self, name: str, *arguments: Any, threaded: bool = False) -> Any:
        if self.group is None:
            raise RoundBrokenError(f"the round of rank {self.rank} has been left")
        self.begun += not threaded
        with self._peers(name):
            work = getattr(self.group, name)(*arguments)
            return self.works.begun(ThreadedWork(partial(work.wait, self._transfer_limit)) if threaded else work)

    def finish(self, work: Any, what: str) -> None:
        with self._peers(what):
            self.works.wait(work)

    @contextmanager
    def _peers(self, what: str) -> Iterator[None]:
        """An error of the body means that one of them is gone."""
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise RoundBrokenError(f"a peer of rank {self.rank} was lost ({what}: {first_line})") from error


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
        parts = [float((number >> _BITS * index) & _MASK) for index in range(_PARTS)]
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


# ---- ranks that have come to different points of the script
#
# One has left its loop, or evaluates alone, while another is inside a step: they wait in different process groups, and
# nothing would end that before a timeout of minutes. A rank that stays where it is for long, and is not inside a step,
# says so in the round's store, with how many steps it has begun and how many collectives of the control group. One that
# is inside a later step, and has begun fewer of these, cannot have come by there: the script differs between the two.
# It says so in the store, and each rank ends with one sentence about both. What a rank says stays true when it has
# moved on, since counts are compared, not times.


UNNAMED = "local"
"""The node of a process whose launcher names none."""
LOOK_S = 0.5
LEAST_S = 1.0
STEPS = 3.0
"""A rank looks when it has stayed where it is for this many steps' time, and LEAST_S."""
GRACE_S = 3 * LOOK_S
"""From the moment when one rank knows until the first one ends: all read the sentence meanwhile."""
END_S = 15.0
_AGAIN_S = 0.05
_OUTSIDE, _PARTED, _CALLS = "whereabouts/outside", "whereabouts/parted", "whereabouts/calls"
HINT = "all ranks must make the same steps and calls: decide by what they have in common, such as session.all_reduce()"


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a rank is: inside a step or not, the steps begun in this round and committed ever, and what it does."""

    inside: bool
    begun: int
    step: int
    doing: str


class Whereabouts:
    """Looks for such ranks in a thread, and ends the process if its main thread does not notice what was found.

    ``stand()`` says where the main thread is, ``free()`` ends what it waits for in C++.
    """

    def __init__(
        self,
        store: Any,
        control: Control,
        node: str,
        stand: Callable[[], Stand],
        span_s: Callable[[], float],
        free: Callable[[], object],
    ) -> None:
        self._store, self._control = store, control
        self._stand, self._span_s, self._free = stand, span_s, free
        self._who = f"rank {self._control.rank}" + (f" (node {node})" if node != UNNAMED else "")
        self._before, self._parted = control.begun, ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if self._store is not None and not self._control.alone:
            self._thread = threading.Thread(
                target=copy_context().run, args=(self._watch,), name="whereabouts", daemon=True
            )
            self._thread.start()

    @property
    def error(self) -> ConfigError | None:
        """Why the ranks cannot go on together, once it is known."""
        return ConfigError(self._parted, hint=HINT) if self._parted else None

    def compared(self, error: CallsDifferError) -> ConfigError:
        """What ``error`` does not know: who else called what. All ranks come here, unless one is in a step."""
        own, rank, others = self._control.newest, self._control.rank, range(self._control.world_size)
        mine = self._whereabouts(self._stand())
        deadline, found = Deadline.after(GRACE_S), ""
        try:
            self._store.set(f"{_CALLS}/{rank}", json.dumps([own, mine]))
            while not found and not deadline.expired:
                keys = [f"{_CALLS}/{each}" for each in others if self._store.check([f"{_CALLS}/{each}"])]
                said = [json.loads(self._store.get(key)) for key in keys]
                found = next((theirs for call, theirs in said if call != own), "")
                self._closed.wait(_AGAIN_S)
        except (RuntimeError, ValueError):  # the store is gone
            return error
        first, second = sorted((mine, found))
        return ConfigError(f"{first}, and {second}", hint=error.hint) if found else error

    def close(self) -> None:
        """The round has ended."""
        self._closed.set()

    def join(self) -> None:
        """After :meth:`close`, before the process ends: Python must not end the thread inside torch's store."""
        if self._thread is not None:
            self._thread.join(LEAST_S)

    def _watch(self) -> None:
        seen, since = (self._stand(), 0), SYSTEM.monotonic()
        while not self._closed.wait(LOOK_S):
            now, where = SYSTEM.monotonic(), (self._stand(), self._control.begun - self._before)
            if where != seen or self._control.works.over.is_set():
                seen, since = where, now
            elif now - since >= max(LEAST_S, STEPS * self._span_s()):
                try:
                    self._parted = self._compared(*where)
                except (RuntimeError, ValueError) as error:  # the store is gone, and the round with it
                    logger().debug("whereabouts.unknown", reason=str(error).partition("\n")[0])
                    return
                if self._parted:
                    self._part()
                    return

    def _compared(self, stand: Stand, collectives: int) -> str:
        """What all are told; empty if nothing is known to be wrong."""
        if self._store.check([_PARTED]):
            return str(self._store.get(_PARTED).decode())
        if not stand.inside:
            self._store.set(_OUTSIDE, json.dumps([stand.begun, collectives, self._whereabouts(stand)]))
        elif self._store.check([_OUTSIDE]):
            begun, theirs, where = json.loads(self._store.get(_OUTSIDE))
            if begun < stand.begun and collectives < theirs:
                sentence = f"{where}, and {self._who} is inside step {stand.step + 1}"
                self._store.set(_PARTED, sentence)
                return sentence
        return ""

    def _whereabouts(self, stand: Stand) -> str:
        return f"{self._who} {stand.doing} after step {stand.step}"

    def _part(self) -> None:
        """Let all others read it; then end what the main thread waits for, until the session is closed."""
        logger().error("ranks.parted", reason=self._parted)
        self._closed.wait(GRACE_S)
        self._control.works.end(self._parted)
        ends_at = SYSTEM.monotonic() + END_S
        while SYSTEM.monotonic() < ends_at:
            self._free()
            if self._closed.wait(LOOK_S):
                return
        complain(ConfigError(self._parted, hint=HINT), sys.stderr)
        final_message()
        os._exit(EXIT_CONFIG)
