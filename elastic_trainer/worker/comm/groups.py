"""Forms the process groups of one round and drops them again.

Two groups: torch's default group for gradients and the script's own collectives, and a small gloo group for agreement
(:mod:`elastic_trainer.worker.comm.control`), so that neither waits for the other.

*Runs in* the worker's main thread. *Owns* torch's default process group while formed.
*Fails by* TransientError when the ranks cannot reach each other in time.
*Invariant*: the store prefix of a group is never used twice, and each attempt has its own store connection.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_trainer import torch_internals
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, RoundBrokenError, TransientError
from elastic_trainer.ipc import gloo
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.torch_internals import PrefixStore, TCPStore
from elastic_trainer.worker.comm import sever
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.failures import collective
from elastic_trainer.worker.comm.lasting import ShardLayout
from elastic_trainer.worker.comm.placement import NCCL, Placement
from elastic_trainer.worker.comm.round_place import RoundPlace, StoreAddress
from elastic_trainer.worker.comm.sever import End, resolved
from elastic_trainer.worker.comm.shard_groups import FormTimeouts as FormTimeouts
from elastic_trainer.worker.comm.shard_groups import ShardGroups, form_shard_groups
from elastic_trainer.worker.comm.store_handshake import meet
from elastic_trainer.worker.comm.waits import InterruptibleWaits, ThreadedWork

REACH_S = 20.0
REACH_ATTEMPT_S = 2.5
ANSWER_S = 2.0
LINGER_S = 1.0
LAST_TEARDOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class Group:
    """The groups of one round."""

    formation: RoundPlace
    control: Control
    store: Any = None
    """This round's own connection; severing it frees a rank that blocks while the groups form."""
    listening: frozenset[End] = frozenset()
    """Addresses at which the ranks' gloo listens."""
    shards: ShardGroups | None = None
    fresh: Any = None
    """The store under this round's own prefix."""

    @property
    def formed(self) -> bool:
        return self.store is not None


def form(formation: RoundPlace, placement: Placement, patience: FormTimeouts, works: InterruptibleWaits) -> Group:
    """The groups of ``formation``; a single process without a launcher needs none and opens no port."""
    if formation.store is None:
        return Group(formation, Control())
    host, port, serves = formation.store.host, formation.store.port, formation.store.serve and formation.rank == 0
    limit = timedelta(seconds=patience.forming_s)
    # Torch has no limit for an answer: a program of another kind may listen at the port.
    reached = ThreadedWork(
        lambda: TCPStore(host, port, None, serves, timeout=limit, wait_for_workers=False, multi_tenant=serves)
    )
    try:
        reached.wait(limit + timedelta(seconds=ANSWER_S))
        store = reached.result
        deadline = Deadline.after(patience.forming_s)
        prefix = formation.store.prefix or meet(store, formation.rank, formation.world_size, deadline)
        return _formed(formation, placement, store, PrefixStore(f"round/{prefix}", store), patience, works)
    except (RuntimeError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        hint = "check that all nodes reach this address, and the other ranks' logs"
        if "EADDRINUSE" in cause:
            cause, hint = "another program listens there", "end it, or choose another port"
        elif reached.result is None and (not reached.is_completed() or "timed out" in cause):  # torch may be late
            if _listens(host, port):
                cause, hint = "what listens there does not answer as a store", "another program may use the port"
            else:
                cause = f"timed out after {patience.forming_s:g} s: it accepts no connection"
        raise TransientError(
            f"rank {formation.rank} of {formation.world_size} cannot form a process group at {host}:{port}: {cause}",
            hint=hint,
        ) from error


def _listens(host: str, port: int) -> bool:
    """Whether a program accepts connections there."""
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except OSError:
        return False
    return True


def _formed(
    formation: RoundPlace,
    placement: Placement,
    store: TCPStore,
    fresh: PrefixStore,
    patience: FormTimeouts,
    works: InterruptibleWaits,
    layout: ShardLayout | None = None,
) -> Group:
    """Form both groups through ``fresh``, an unused store prefix.

    The agreement group comes first, in a separate thread: a rank that waits for a peer to connect cannot be
    interrupted, only abandoned, and torch's default group cannot be abandoned. Once it exists all ranks can reach each
    other, so the default group may start with its final timeout (the script's own sends and receives keep the first
    timeout for ever).
    """
    rank, world_size = formation.rank, formation.world_size
    forming, working = timedelta(seconds=patience.forming_s), timedelta(seconds=patience.working_s)
    at = formation.gloo_addresses()
    gloo.lead(at)
    made = ThreadedWork(lambda: gloo.group(PrefixStore("control", fresh), rank, world_size, forming, at), brief=True)
    works.wait(works.begun(made))
    torch_internals.number_groups_anew()
    control, shards = Control(made.result, rank, world_size, works), None
    control.set_timeout(working)
    try:
        if layout is not None:
            shards = form_shard_groups(layout, fresh, control, patience, at, nccl=placement.backend == NCCL)
        with _HOOK.replaced():
            dist.init_process_group(
                placement.backend,
                store=PrefixStore("data", fresh),
                rank=rank,
                world_size=world_size,
                timeout=working,
                device_id=placement.device if placement.backend == NCCL else None,
            )
        listening = _listening(fresh, control, shards.names if shards is not None else ())
    except BaseException:
        abandon(Group(formation, control, store, shards=shards))  # this thread would wait for what is pending
        raise
    return Group(formation, control, store, listening, shards, fresh)


def leave(group: Group) -> None:
    """Drop the groups for good, and wait briefly for their threads (a peer may be gone)."""
    if group.formed:
        abandon(group)
        _TEARDOWNS.finish()


def store_ends(formation: RoundPlace) -> list[End]:
    """Addresses of the store of ``formation``."""
    return resolved(formation.store.host, formation.store.port) if formation.store is not None else []


class ExceptionHook:
    """torch's init_process_group() wraps sys.excepthook, to put the rank before each line of a traceback, each time."""

    def __init__(self) -> None:
        self._before, self._torchs = sys.excepthook, sys.excepthook

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """The body wraps the hook that the last such body found, unless the script has set another one since."""
        if sys.excepthook is self._torchs:
            sys.excepthook = self._before
        self._before = sys.excepthook
        try:
            yield
        finally:
            self._torchs = sys.excepthook


_HOOK = ExceptionHook()


def form_in_place(
    formation: RoundPlace,
    placement: Placement,
    patience: FormTimeouts,
    begun: Callable[[], None],
    over: Callable[[], str | None],
    works: InterruptibleWaits,
    layout: ShardLayout | None = None,
) -> Group:
    """The groups of a round in place, through a separate store connection and the round's own prefix.

    Ranks may arrive a whole step early for a planned change, so all wait for rank 0's signal; then ``begun`` is called,
    from which a time limit for forming may count. ``over()`` says why the round has already ended.
    """
    if formation.store is None or formation.store.prefix is None:
        raise ConfigError("the agent named no store for the round", hint="update elastic_trainer on all nodes")
    store = _reach(formation.store, over)
    working = timedelta(seconds=patience.working_s)
    store.set_timeout(working)
    fresh = PrefixStore(f"round/{formation.store.prefix}", store)
    if formation.rank == 0:
        fresh.set("go", "1")
    else:
        fresh.wait(["go"], working)
    begun()
    with collective("forming"):
        return _formed(formation, placement, store, fresh, patience, works, layout)


def _listening(fresh: PrefixStore, control: Control, more: tuple[str, ...] = ()) -> frozenset[End]:
    """All ranks' gloo addresses: each rank reads its own from what its gloo has published to the store."""
    keys = [f"control/0/{control.rank}", *more]
    if dist.get_backend() != NCCL:
        keys.append(f"data/0//cpu//0/{control.rank}")
    # Another torch version may use other keys: then all listening sockets count.
    mine = sever.listening(b"".join(map(fresh.get, keys)) if fresh.check(keys) else None)
    texts = control.gather_bytes(json.dumps(mine).encode())
    return frozenset((host, port) for text in texts for host, port in json.loads(text))


def _reach(address: StoreAddress, over: Callable[[], str | None]) -> TCPStore:
    """Connect to the store of a round in place, in short attempts that the end of the round interrupts.

    The agent that serves the store may have died; the others then learn that the round is over.
    """
    deadline, attempt = Deadline.after(REACH_S), timedelta(seconds=REACH_ATTEMPT_S)
    while True:
        try:
            return TCPStore(address.host, address.port, None, False, timeout=attempt, wait_for_workers=False)
        except dist.DistNetworkError as error:
            reason = over()
            if reason is not None:
                raise RoundBrokenError(f"the round ended before its store was reached: {reason}") from error
            if deadline.expired:
                raise TransientError(
                    f"the store of the round at {address.host}:{address.port} cannot be reached",
                    hint="check that all nodes reach each other; --rdzv-conf interface=... chooses the address",
                ) from error


def abandon(group: Group | None) -> None:
    """Drop torch's default group at once. It and ``group`` end in the background.

    Ending takes as long as pending operations, at most the group's timeout, and blocks the thread that drops the last
    reference. A separate thread keeps the references so that the main thread does not block.
    """
    kept: list[Any] = [group]
    if dist.is_initialized():
        kept.append(dist.group.WORLD)
        dist.destroy_process_group()
    _TEARDOWNS.begin(kept, group)


class _Teardowns:
    """Threads that end abandoned groups.

    At exit Python ends threads that return to it from C++, which aborts the process; so the interpreter must not exit
    before these threads and gloo's.
    """

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._threads: list[threading.Thread] = []
        self._registered = False

    def begin(self, kept: list[Any], group: Group | None) -> None:
        if not self._registered:
            atexit.register(self.finish)
            self._registered = True
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._hurry.clear()
        thread = threading.Thread(target=self._outlive, args=(kept, group), name="group-teardown", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _outlive(self, kept: list[Any], group: Group | None) -> None:
        if group is not None:
            group.control.works.outlive()
        self._hurry.wait(LINGER_S)
        if group is not None:
            group.control.close()
        kept.clear()
        _return_free_memory()

    def finish(self) -> None:
        """At exit: wait briefly for the threads. Those that hang in torch are left."""
        self._hurry.set()
        deadline = Deadline.after(LAST_TEARDOWN_S)
        for thread in self._threads:
            thread.join(deadline.remaining_s())


def _return_free_memory() -> None:
    """To the kernel: what a round leaves behind in glibc's heaps is too scattered for glibc to return it by itself.

    Takes some milliseconds. Not all C libraries can do this.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


_TEARDOWNS = _Teardowns()


def all_reduce(control: Control, *tensors: torch.Tensor) -> None:
    """Sum each of ``tensors``, all on one device, over the ranks of torch's default group, in place.

    The end of the round interrupts the wait.
    """
    if tensors and tensors[0].device.type == "cuda":
        for tensor in tensors:
            dist.all_reduce(tensor)  # asynchronous; a wait would block on the device
        return
    works = control.works
    with collective("all_reduce"):
        begun = [works.begun(dist.all_reduce(tensor, async_op=True)) for tensor in tensors]
        for work in begun:
            works.wait(work)


def abort_nccl() -> None:
    """Free NCCL kernels that wait for a lost peer; from any thread. gloo's collectives need other means."""
    world = dist.group.WORLD
    if world is None or dist.get_backend() != NCCL:
        return
    try:
        torch_internals.backend_of(world, torch.device("cuda")).abort()
    except RuntimeError as error:
        logger().warning("nccl.not_aborted", error=str(error).partition("\n")[0])
