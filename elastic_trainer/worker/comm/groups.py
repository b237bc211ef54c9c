"""The process groups of a round: which rank this process has, how its ranks meet, form groups, and leave them.

In place one round follows another: a store prefix, a store connection and a group belong to one round only, nothing
waits for an abandoned group, and a rank that is blocked in the collective of a round that is over is freed.

*Runs in* the worker's main thread; the link's thread frees it, and abandoned groups end in threads of their own.
*Owns* torch's default group, and what a round has opened. *Fails by* ConfigError for what the environment or the nodes
say, TransientError when the ranks do not meet or connect, RoundBrokenError when the round is over meanwhile.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import xxhash

from elastic_trainer import torch_internals
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import ConfigError, RoundBrokenError, TransientError
from elastic_trainer.ipc import gloo
from elastic_trainer.ipc.address import is_loopback
from elastic_trainer.ipc.gloo import End, Sockets, listening, resolved
from elastic_trainer.settings import WorkerEnvironment, validated
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.torch_internals import PrefixStore, Store, TCPStore
from elastic_trainer.worker.comm.control import Control, InterruptibleWaits, ThreadedWork, collective
from elastic_trainer.worker.comm.lasting import ShardLayout, real_group
from elastic_trainer.worker.comm.placement import NCCL, Placement
from elastic_trainer.worker.report import HeartbeatReporter

# ---- which rank this process has


ENVIRONMENT = "env://"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The store at which the ranks of a round rendezvous.

    ``serve``: rank 0 hosts the store. ``prefix`` is used by no other round; without it the ranks agree on one.
    """

    host: str
    port: int
    serve: bool
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """One process's assignment in one round. Without ``store`` it is alone and needs no process group."""

    round: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store: StoreAddress | None = None
    reason: str = ""
    """Why this round was formed, for people."""
    address: str = ""
    """The address that this node's agent announces; empty without an agent."""

    def gloo_addresses(self) -> tuple[str, ...]:
        """This host's addresses for gloo in this round."""
        if self.store is None or self.local_world_size == self.world_size:
            return gloo.ONE_HOST
        return gloo.addresses(self.address, self.store.host, self.store.port)

    def misleads(self) -> str:
        """The loopback interfaces to which the user bound gloo here although ranks may be on other hosts; or empty."""
        return gloo.misleading() if self.gloo_addresses() is not gloo.ONE_HOST else ""


def self_started(
    environment: WorkerEnvironment, init_method: str | None, rank: int | None, world_size: int | None
) -> WorkerEnvironment:
    """``environment``, completed by what a script without a launcher says, as torch's ``init_process_group`` takes it.

    Ranks that meet at a loopback address are all on this machine; elsewhere LOCAL_RANK and LOCAL_WORLD_SIZE say which
    are. ConfigError for what is missing, wrong, or contradicts a launcher.
    """
    said = {name: value for name, value in (("rank", rank), ("world_size", world_size)) if value is not None}
    if init_method is None and not said:
        return environment
    method = init_method or ENVIRONMENT
    if "run_id" in environment.model_fields_set or environment.channel is not None:
        if method == ENVIRONMENT and not said:
            return environment
        raise ConfigError(
            "the session was given init_method, rank or world_size, but torchrun has started this process and decides"
            " them",
            hint="omit them, or start the processes without torchrun",
        )
    values: dict[str, Any] = {**environment.model_dump(exclude_unset=True), **said, "launched": True}
    if method != ENVIRONMENT:
        values["master_addr"], values["master_port"] = _address(method)
    missing = [name for name in ("rank", "world_size") if name not in (values if method == ENVIRONMENT else said)]
    if missing:
        raise ConfigError(
            f"init_method is {method!r}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            hint="give rank and world_size" + (", or set RANK and WORLD_SIZE" if method == ENVIRONMENT else ""),
        )
    if is_loopback(values.get("master_addr") or "") and not {"local_rank", "local_world_size"} & values.keys():
        values["local_rank"], values["local_world_size"] = values["rank"], values["world_size"]
    completed = validated(WorkerEnvironment, values, "Session")
    if completed.rank >= completed.world_size:
        raise ConfigError(
            f"rank is {completed.rank}, and world_size is {completed.world_size}",
            hint="ranks count from 0 to world_size - 1",
        )
    return completed


def _address(method: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``."""
    try:
        parts = urlsplit(method)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port beyond 65535, half an IPv6 address
        parts, host, port = urlsplit(""), None, None
    if parts.scheme != "tcp" or not host or not port or parts.path or parts.query:
        raise ConfigError(f"init_method is {method!r}", hint="use 'tcp://HOST:PORT' of rank 0's machine, or 'env://'")
    return host, port


def assignment_of(environment: WorkerEnvironment) -> RankAssignment:
    """The assignment given by the launcher's environment variables. ConfigError if they contradict each other."""
    if environment.rank >= environment.world_size or environment.local_rank >= environment.local_world_size:
        raise ConfigError(
            f"environment: RANK {environment.rank} of WORLD_SIZE {environment.world_size}, LOCAL_RANK"
            f" {environment.local_rank} of LOCAL_WORLD_SIZE {environment.local_world_size} are invalid",
            hint="start the script with torchrun, or unset these variables",
        )
    return RankAssignment(
        round=environment.round,
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        store=_store_in(environment) if environment.launched else None,
        reason=environment.round_reason,
        address=environment.address,
    )


def _store_in(environment: WorkerEnvironment) -> StoreAddress:
    if environment.master_addr is None or environment.master_port is None:
        raise ConfigError(
            "environment: RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not",
            hint="start the script with torchrun, set all four, or give the session an init_method",
        )
    return StoreAddress(environment.master_addr, environment.master_port, serve=not environment.use_agent_store)


# ---- ranks of a launcher's store agree on a fresh prefix


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


def meet(store: Store, rank: int, world_size: int, deadline: Deadline) -> str:
    """The fresh prefix; the same on all ranks."""
    pauses = _Pauses(deadline)
    return _invite(store, world_size, pauses) if rank == 0 else _attend(store, rank, world_size, pauses)


class _Pauses:
    """Waits a little longer each time."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline, self._next_s = deadline, _FIRST_PAUSE_S

    def wait(self, missing: str) -> None:
        if self._deadline.expired:
            raise TransientError(f"the ranks did not rendezvous in time: {missing}", hint="see the other ranks' logs")
        pause(min(self._next_s, self._deadline.remaining_s()))
        self._next_s = min(2 * self._next_s, _LONGEST_PAUSE_S)


def _invite(store: Store, world_size: int, pauses: _Pauses) -> str:
    hellos = {str(rank): f"meeting/hello/{rank}" for rank in range(1, world_size)}
    offered: dict[str, str] = {}
    nonce = ""
    while True:
        tokens = {rank: store.get(key).decode() for rank, key in hellos.items() if store.check([key])}
        if len(tokens) == world_size - 1 and (tokens != offered or not nonce):
            nonce, offered = secrets.token_hex(8), tokens
            store.set(f"meeting/offer/{nonce}", json.dumps({"world": world_size, "tokens": tokens}))
            store.set("meeting/offer", nonce)
        waiting = [rank for rank in range(1, world_size) if str(rank) not in tokens]
        if nonce and not waiting:
            waiting = [rank for rank in range(1, world_size) if not store.check([f"meeting/accept/{nonce}/{rank}"])]
            if not waiting:
                store.set(f"meeting/go/{nonce}", "1")
                return nonce
        pauses.wait(f"rank 0 waits for {_listed(waiting)}")


def _attend(store: Store, rank: int, world_size: int, pauses: _Pauses) -> str:
    token = secrets.token_hex(8)
    store.set(f"meeting/hello/{rank}", token)
    seen = accepted = ""
    while True:
        if store.check(["meeting/offer"]):
            nonce = store.get("meeting/offer").decode()
            if nonce != seen:
                seen = nonce
                offer = json.loads(store.get(f"meeting/offer/{nonce}"))
                if offer["world"] == world_size and offer["tokens"].get(str(rank)) == token:
                    store.set(f"meeting/accept/{nonce}/{rank}", token)
                    accepted = nonce
        if accepted and store.check([f"meeting/go/{accepted}"]):
            return accepted
        pauses.wait(f"rank {rank} waits for rank 0")


def _listed(ranks: list[int]) -> str:
    return "ranks " + ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


# ---- groups


@dataclass(frozen=True, slots=True)
class FormTimeouts:
    """Limits for forming the groups, and for later operations on them."""

    forming_s: float
    working_s: float


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """The groups of this rank: its shard group, ``number`` of ``count``, and the ranks that hold the same shards."""

    number: int
    count: int
    whole: Any
    parts: tuple[Any, ...]
    """In the order of the layout's groups: those of the mesh's dimensions first."""
    peers: Control
    """The ranks of the shard group."""
    copies: Control
    """The ranks with this shard rank, by shard group."""
    replicas: Any
    """The process group of these ranks, for gradients; None if there is only one shard group."""
    works: InterruptibleWaits
    on_stream: bool = False
    """Whether gradients are summed by NCCL: a wait then only orders the device's stream, and blocks nobody."""
    names: tuple[str, ...] = ()
    """The store keys under which this rank's gloo published its addresses."""


def form_shard_groups(
    layout: ShardLayout, store: Any, control: Control, patience: FormTimeouts, at: Sequence[str], *, nccl: bool
) -> ShardGroups:
    """Form the groups of all ranks of ``control`` through ``store``, in the same order on each.

    ``at``: this host's addresses for gloo.
    """
    _check_alike(layout, control)
    forming, working = timedelta(seconds=patience.forming_s), timedelta(seconds=patience.working_s)
    size, shard_rank, works = layout.size, layout.shard_rank, control.works
    number, count = control.rank // size, control.world_size // size
    published: list[str] = []

    def made(name: str, rank: int, members: int) -> Any:
        if members == 1:
            return None
        group = real_group(PrefixStore(name, store), rank, members, forming, at, nccl=nccl)
        torch_internals.limit_gloo(group, working)
        published.append(f"{name}/0/{rank}")
        if nccl:
            works.abort_with(torch_internals.backend_of(group, torch.device("cuda")).abort)
        return group

    def make() -> tuple[Any, list[Any], Any]:
        whole = made(f"shards/{number}", shard_rank, size)
        parts = [  # never the whole group: its own sums detect ranks that call the model unequally often
            made(f"{name}/{number}/{layout.members(name)[0]}", group.rank(), group.size())
            for name, group in layout.groups.items()
        ]
        return whole, parts, made(f"copies/{shard_rank}", number, count)

    threaded = ThreadedWork(make, brief=True)
    works.wait(works.begun(threaded))
    whole, parts, replicas = threaded.result
    peers = Control(whole, shard_rank, size, works, working)
    copies = Control(replicas, number, count, works, working)
    data = InterruptibleWaits() if nccl else works
    return ShardGroups(number, count, whole, tuple(parts), peers, copies, replicas, data, nccl, tuple(published))


def _check_alike(layout: ShardLayout, control: Control) -> None:
    """Raise on ranks that differ from rank 0, and only on those: the others continue without them."""
    described = repr((layout.shape, layout.axes))
    mine = [layout.node_size, xxhash.xxh3_64_intdigest(described.encode()) >> 1]
    rows = control.gather(mine)
    if mine[0] != rows[0][0]:
        raise ConfigError(
            f"this node has {mine[0]} processes and the node of rank 0 has {rows[0][0]}, and a sharded model needs"
            " equally many on each node",
            hint="start all nodes with the same --nproc-per-node",
        )
    if mine != rows[0]:
        raise ConfigError(
            f"the device mesh {described} of this rank is not that of rank 0", hint="create the same mesh on all nodes"
        )
    if control.rank % layout.size != layout.shard_rank and all(row == mine for row in rows):
        raise ConfigError(
            f"rank {control.rank} holds the shards of place {layout.shard_rank}, but is needed at another place",
            hint="start all nodes with the same --rdzv-conf shard_nodes",
        )


REACH_S = 20.0
REACH_ATTEMPT_S = 2.5
ANSWER_S = 2.0
LINGER_S = 1.0
LAST_TEARDOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class Group:
    """The groups of one round."""

    formation: RankAssignment
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


def form(formation: RankAssignment, placement: Placement, patience: FormTimeouts, works: InterruptibleWaits) -> Group:
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
    formation: RankAssignment,
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


def store_ends(formation: RankAssignment) -> list[End]:
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


def _listening(fresh: PrefixStore, control: Control, more: tuple[str, ...] = ()) -> frozenset[End]:
    """All ranks' gloo addresses: each rank reads its own from what its gloo has published to the store."""
    keys = [f"control/0/{control.rank}", *more]
    if dist.get_backend() != NCCL:
        keys.append(f"data/0//cpu//0/{control.rank}")
    # Another torch version may use other keys: then all listening sockets count.
    mine = listening(b"".join(map(fresh.get, keys)) if fresh.check(keys) else None)
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


# ---- one round after the other, in place


SEVER_AGAIN_S = 0.005
SEVER_AGAIN_LONGEST_S = 0.5


class CollectiveAborter:
    """Frees a worker's main thread from the collectives of a round that is over, in place.

    The main thread enters and leaves rounds; the link's thread calls :meth:`over`. ``number`` is the round that this
    worker is or was last in. After a round is left, none of its sockets is severed.
    """

    def __init__(self, tracker: HeartbeatReporter) -> None:
        self._tracker = tracker
        self.number = 0
        self.sockets = Sockets()
        self._inside = threading.Event()
        self._works = InterruptibleWaits()

    @property
    def in_round(self) -> bool:
        return self._inside.is_set()

    def enter(self, number: int, store: Collection[End]) -> InterruptibleWaits:
        """Round ``number`` is being formed through ``store``; returns its waits."""
        self.number = number
        self._works = InterruptibleWaits(self._tracker, interruptible=True)
        self.sockets.forming(store, number)
        self._inside.set()
        return self._works

    def leave(self, *, planned: bool) -> None:
        """Leave the round; ``planned``: no peer waits in it either."""
        if not planned:
            self.sockets.sever()
        self._works.end("the round was left")  # a late wait returns what has arrived by now
        self._inside.clear()
        self.sockets.forget()

    def release_main_thread(self, number: int, why: str) -> None:
        """Free the main thread if it still forms round ``number``."""
        works = self._works
        if self.number == number:
            works.end(why)
            self.sockets.sever(number)

    def over(self, number: int) -> None:
        """Rounds up to ``number`` are over: free the main thread if it is in one of them.

        By a planned change it may enter the next round meanwhile, whose waits and sockets are left alone.
        """
        works = self._works  # before the number: a round that begins sets its number first
        present = self.number
        if self._inside.is_set() and number >= present:
            abort_nccl()
            works.abort()
            works.end("the round ended in the middle of a collective")
            self.sockets.sever(present)
            threading.Thread(target=self._sever_until_free, args=(present,), name="sever", daemon=True).start()

    def _sever_until_free(self, number: int) -> None:
        """Repeat until the main thread has left the group: a socket may have been busy the first time."""
        pause_s = SEVER_AGAIN_S
        while self._inside.is_set() and self.number == number:
            SYSTEM.wait(threading.Event(), pause_s)
            pause_s = min(2.0 * pause_s, SEVER_AGAIN_LONGEST_S)  # the main thread may be in an evaluation of an hour
            self.sockets.sever(number)


class ElasticGroups:
    """The groups of one round after the other, in the worker's main thread."""

    def __init__(
        self, aborter: CollectiveAborter, placement: Placement, timeouts: FormTimeouts, layout: ShardLayout | None
    ) -> None:
        self._aborter, self._placement, self._timeouts, self._layout = aborter, placement, timeouts, layout
        self._group: Group | None = None
        """None between two rounds."""

    @property
    def number(self) -> int:
        return self._aborter.number

    @property
    def in_round(self) -> bool:
        return self._aborter.in_round

    @property
    def leave_garbage(self) -> bool:
        return self._placement.backend == NCCL

    def form(self, assignment: RankAssignment, broken: Callable[[int], str | None]) -> Group:
        """Through a separate store connection and the round's own prefix."""
        number, address, aborter, timeouts = assignment.round, assignment.store, self._aborter, self._timeouts
        if address is None or address.prefix is None:
            raise ConfigError("the agent named no store for the round", hint="update elastic_trainer on all nodes")
        works = aborter.enter(number, store_ends(assignment))
        if broken(number) is not None:
            raise RoundBrokenError(f"round {number} is broken already")
        why = f"round {number} was not formed within {timeouts.forming_s:g} s"
        limit = threading.Timer(timeouts.forming_s, aborter.release_main_thread, (number, why))
        working = timedelta(seconds=timeouts.working_s)
        try:
            store = _reach(address, partial(broken, number))
            store.set_timeout(working)
            fresh = PrefixStore(f"round/{address.prefix}", store)
            # Ranks may arrive a whole step early for a planned change: the limit counts from when rank 0 is there.
            if assignment.rank == 0:
                fresh.set("go", "1")
            else:
                fresh.wait(["go"], working)
            limit.start()
            with collective("forming"):
                self._group = _formed(assignment, self._placement, store, fresh, timeouts, works, self._layout)
            aborter.sockets.formed(self._group.listening)
        finally:
            limit.cancel()
        return self._group

    def sever(self) -> None:
        self._aborter.sockets.sever()

    def abandon(self, *, planned: bool = False) -> None:
        self._aborter.leave(planned=planned)
        group, self._group = self._group, None
        abandon(group)
