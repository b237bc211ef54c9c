"""Forms the process groups of one round and gives them up again.

Two groups: torch's default group for gradients and the user's own collectives, and a small gloo group for agreement
(:mod:`elastic_trainer.worker.comm.control`), so that neither waits behind the other.

*Runs in* the worker's main thread. *Owns* torch's default process group while formed.
*Fails by* TransientError when the ranks cannot reach each other in time.
*Invariant*: the store prefix of a group is never used twice, and each form has a store connection of its own.
"""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from elastic_trainer import settings
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, RoundBrokenError, TransientError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm import sever
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.failures import collective
from elastic_trainer.worker.comm.link import RoundPlace, StoreAddress
from elastic_trainer.worker.comm.placement import NCCL, Placement
from elastic_trainer.worker.comm.sever import End, resolved
from elastic_trainer.worker.comm.store_handshake import meet
from elastic_trainer.worker.comm.waits import Aside, InterruptibleWaits

REACH_S = 20.0
REACH_ATTEMPT_S = 2.5
LINGER_S = 1.0
LAST_TEARDOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class Group:
    """What one formation formed."""

    formation: RoundPlace
    control: Control
    store: Any = None
    """The dedicated connection; severing it frees a rank that blocks while forming."""
    listening: frozenset[End] = frozenset()
    """Where the ranks' gloo listens."""

    @property
    def formed(self) -> bool:
        return self.store is not None


@dataclass(frozen=True, slots=True)
class FormTimeouts:
    """Seconds that the forming of groups, and later an operation of theirs, may take."""

    forming_s: float
    working_s: float


def form(formation: RoundPlace, placement: Placement, patience: FormTimeouts, works: InterruptibleWaits) -> Group:
    """The groups of ``formation``; a process that is alone by nature needs none and opens no port."""
    if formation.store is None:
        return Group(formation, Control())
    if formation.one_host:
        settings.prefer_loopback()
    forming, working = timedelta(seconds=patience.forming_s), timedelta(seconds=patience.working_s)
    try:
        store = _connect(formation, formation.store, forming)
        prefix = formation.store.prefix or _agreed_prefix(store, formation, patience.forming_s)
        fresh = PrefixStore(f"round/{prefix}", store)
        control = _init(formation, placement, fresh, forming, working, works)
        control.set_timeout(working)
        listening = _listening(fresh, control)
    except (RuntimeError, ValueError) as error:
        leave_torch()
        address = f"{formation.store.host}:{formation.store.port}"
        raise TransientError(
            f"rank {formation.rank} of {formation.world_size} cannot form a process group at {address}:"
            f" {str(error).partition(chr(10))[0]}",
            hint="check that all nodes reach this address, and the other ranks' logs",
        ) from error
    return Group(formation, control, store, listening)


def _init(
    formation: RoundPlace,
    placement: Placement,
    fresh: PrefixStore,
    forming: timedelta,
    working: timedelta,
    works: InterruptibleWaits,
) -> Control:
    """Form both groups through ``fresh``, a store prefix that was never used before.

    The agreement group comes first, in a thread of its own: a rank that waits for a peer to connect cannot be
    interrupted, only abandoned, and torch's default group cannot be abandoned. Once it exists all ranks can reach each
    other, so the default group may start with its working timeout (a script's own sends and receives keep the first one
    for ever).
    """
    rank, world_size = formation.rank, formation.world_size
    made = Aside(lambda: dist.ProcessGroupGloo(PrefixStore("control", fresh), rank, world_size, forming), brief=True)
    works.wait(works.begun(made))
    # torch numbers the groups of a process, and ranks find each other under that number. A form that failed has been
    # counted, and only where it came so far: ranks would wait for each other under different numbers ever after.
    distributed_c10d._world.group_count = 0
    dist.init_process_group(
        placement.backend,
        store=PrefixStore("data", fresh),
        rank=rank,
        world_size=world_size,
        timeout=working,
        device_id=placement.device if placement.backend == NCCL else None,
    )
    return Control(made.result, rank, world_size, works)


def _connect(formation: RoundPlace, address: StoreAddress, timeout: timedelta) -> Any:
    serves = address.serve and formation.rank == 0
    return TCPStore(
        address.host, address.port, None, serves, timeout=timeout, wait_for_workers=False, multi_tenant=serves
    )


def _agreed_prefix(store: Any, formation: RoundPlace, timeout_s: float) -> str:
    return meet(store, formation.rank, formation.world_size, Deadline.after(timeout_s))


def leave(group: Group) -> None:
    """Give the groups up for good, and wait a moment until their threads have ended (a peer may be gone)."""
    if group.formed:
        abandon(group)
        _TEARDOWNS.finish()


def store_ends(formation: RoundPlace) -> list[End]:
    """Where connections to the store of ``formation`` lead."""
    return resolved(formation.store.host, formation.store.port) if formation.store is not None else []


def leave_torch() -> None:
    """Destroy torch's default group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def form_in_place(
    formation: RoundPlace,
    placement: Placement,
    patience: FormTimeouts,
    begun: Callable[[], None],
    over: Callable[[], str | None],
    works: InterruptibleWaits,
) -> Group:
    """The groups of a round in place: through a store connection of this form only, under the round's own prefix.

    Ranks that wait for a planned change may be early by a whole step: all wait for rank 0's word, and ``begun`` is
    called then, from when on the forming itself may be bounded. ``over()`` says why the round has ended already.
    """
    if formation.store is None or formation.store.prefix is None:
        raise ConfigError("the agent named no meeting place for the round", hint="update elastic_trainer on all nodes")
    if formation.one_host:
        settings.prefer_loopback()
    store = _reach(formation.store, over)
    forming, working = timedelta(seconds=patience.forming_s), timedelta(seconds=patience.working_s)
    store.set_timeout(working)
    fresh = PrefixStore(f"round/{formation.store.prefix}", store)
    if formation.rank == 0:
        fresh.set("go", "1")
    else:
        fresh.wait(["go"], working)
    begun()
    with collective("forming"):
        control = _init(formation, placement, fresh, forming, working, works)
    control.set_timeout(working)
    return Group(formation, control, store, _listening(fresh, control))


def _listening(fresh: PrefixStore, control: Control) -> frozenset[End]:
    """All ranks' gloo addresses: each rank finds its own in what its gloo has published to the store."""
    keys = [f"control/0/{control.rank}"]
    if dist.get_backend() != NCCL:
        keys.append(f"data/0//cpu//0/{control.rank}")
    # Another version of torch may call them otherwise: then whatever listens here counts.
    mine = sever.listening(b"".join(map(fresh.get, keys)) if fresh.check(keys) else None)
    told = control.gather_bytes(json.dumps(mine).encode())
    return frozenset((host, port) for text in told for host, port in json.loads(text))


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
                raise RoundBrokenError(f"the round ended while its store was looked for: {reason}") from error
            if deadline.expired:
                raise TransientError(
                    f"the store of the round at {address.host}:{address.port} cannot be reached",
                    hint="check that all nodes reach each other; --rdzv-conf interface=... says by which address",
                ) from error


def abandon(group: Group | None) -> None:
    """Forget torch's default group at once. It and ``group``, the one settled in if any, are ended in the background.

    That takes as long as operations on them are under way, which can be as long as the group's timeout; and whoever
    lets go of a group last waits for that. So that it is not the main thread, they are held on to for a while.
    """
    kept: list[Any] = [group]
    if dist.is_initialized():
        kept.append(dist.group.WORLD)
        dist.destroy_process_group()
    _TEARDOWNS.begin(kept, group)


class _Teardowns:
    """Threads that end abandoned groups.

    The interpreter must not end while a thread of theirs, or of gloo's, is about to come back to Python: Python ends
    such a thread in places where C++ answers with an abort.
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

    def finish(self) -> None:
        """At exit: give the threads a moment. Those that hang in torch stay there."""
        self._hurry.set()
        deadline = Deadline.after(LAST_TEARDOWN_S)
        for thread in self._threads:
            thread.join(deadline.remaining_s())


_TEARDOWNS = _Teardowns()


def all_reduce(control: Control, tensor: torch.Tensor) -> None:
    """Sum ``tensor`` over the ranks of torch's default group, in place; the end of the round interrupts the wait."""
    if tensor.device.type == "cuda":
        dist.all_reduce(tensor)  # returns at once; waiting for it would wait for the device
        return
    works = control.works
    with collective("all_reduce"):
        works.wait(works.begun(dist.all_reduce(tensor, async_op=True)))


def abort_nccl() -> None:
    """Free kernels of NCCL that wait for a lost peer; from any thread. gloo's collectives need other means."""
    world = dist.group.WORLD
    if world is None or dist.get_backend() != NCCL:
        return
    try:
        world._get_backend(torch.device("cuda")).abort()
    except RuntimeError as error:
        logger().warning("nccl.not_aborted", error=str(error).partition("\n")[0])
