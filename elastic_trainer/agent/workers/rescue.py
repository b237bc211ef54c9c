"""Keeps the snapshots of this node's workers past their death, and copies of another node's shards, in memory.

``Rescue``: new workers resume from the newest snapshots of those that died (checkpoint.memory). It also commits them to
storage, without torch, since the next failure may take the node. Rank 0's node does so at once; the other nodes check
after a while whether it was done or is in progress. They hold the same step with their own ranks' buffers, and storage
needs those of only one. Each worker has its own memory files: the first worker's for whole states, all workers' for the
ranks of a sharded model.

``NeighbourCopies``: a model that is sharded over all nodes loses shards with a node. Each node therefore leaves a copy
of its own with the next one (checkpoint.neighbours has the protocol), and the workers that start after a failure read
all parts from the agents that have them. There are two copies of each worker's part: one is whole while the other is
overwritten. It also serves the bundle of what the compilers made (``compile_cache``), and nothing else, to clients that
know only its digest.

*Runs in* the agent: a thread each time this node's workers die, torchrun's main thread when the node leaves; a thread
``neighbours`` that takes connections of other nodes from the agent's port, and one for each of them.
*Owns* the memory files (those of copies are empty at first: workers that start before learn their paths).
*Fails by* nothing: a failed commit is logged, and new workers still resume from memory; a client that breaks the
protocol, is silent for long or lacks the key is hung up on.
*Invariant*: bytes that changed after they were sealed are never committed (checkpoint.commit). A copy without its seal
is none, and the copy that the sender needs is never overwritten.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import Any

from elastic_trainer.checkpoint import CheckpointManager, Owner, StateSnapshot
from elastic_trainer.checkpoint.manifest import PIECE, rescued_name
from elastic_trainer.checkpoint.memory import (
    DATA,
    KEPT_FREE,
    MEMORY_NAME,
    SLOTS,
    available,
    break_seal,
    newest,
    read,
    reseal,
)
from elastic_trainer.checkpoint.neighbours import IDLE_S, LONGEST_REQUEST, admitted, framed
from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import CheckpointError, ElasticTrainerError
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import MOST_WORKERS, NodeState, RoundDocument, RoundState
from elastic_trainer.telemetry.logs import logger

APART_S = 2.0
"""How much later than the previous node a node checks whether the state was committed."""
LOOK_S = 0.2
"""In place, other nodes may have survived; their keys show it by then."""
LOOKING_S = 1.0
LEAVING_S = 60.0
"""How long a leaving node waits for a rescue in progress."""
PATIENCE_S = 600.0
"""How long an agent waits for another agent that is writing the state."""


Nodes = Callable[[Sequence[str], Deadline], Mapping[str, NodeView]]
"""Reads the present keys of the nodes with these names from the store."""


class Rescue:
    """See the module."""

    def __init__(
        self,
        node: str,
        nodes: Nodes,
        workers: int,
        clock: Clock = SYSTEM,
        copies: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """``copies()`` are the memory files with shards of another node."""
        self._node, self._nodes, self._clock, self._copies = node, nodes, clock, copies
        self._files = [os.memfd_create(f"{MEMORY_NAME}snapshot-{number}") for number in range(SLOTS * workers)]
        self._under_way = threading.Lock()
        self._closing = threading.Event()

    @property
    def paths(self) -> str:
        """The paths at which workers open the memory files."""
        return os.pathsep.join(f"/proc/{os.getpid()}/fd/{each}" for each in self._held())

    def _held(self) -> list[int]:
        return [*self._files, *self._copies()]

    def begin(self, document: RoundDocument, *, in_place: bool) -> None:
        """The workers of this node, members of the round of ``document``, are dead: start to rescue their state."""
        if newest(self._held()) is not None:
            threading.Thread(
                target=self._rescue, args=(document, in_place), name="snapshot-rescue", daemon=True
            ).start()

    def close(self, document: RoundDocument | None = None) -> None:
        """The node leaves: commit what is not in storage, and free the memory, which a rescue that takes longer keeps.

        Commits nothing if it left by agreement: then the others continue to train in the round of ``document``.
        """
        self._closing.set()
        others_train = document is not None and document.state is RoundState.ACTIVE
        if document is not None and others_train and document.member(self._node) is None:
            logger().debug("snapshot.left_to_others", round=document.number)
        elif self._under_way.acquire(timeout=LEAVING_S):
            self.commit(_turn(document, self._node) if document is not None else 0)
        else:
            logger().error("snapshot.not_rescued", reason=f"storage takes longer than {LEAVING_S:g} s, the node leaves")
            return  # what is still being written is read from this memory
        files, self._files = self._files, []
        for each in files:
            os.close(each)

    def _rescue(self, document: RoundDocument, in_place: bool) -> None:
        order = [member.node for member in document.members]
        turn = _turn(document, self._node)
        if in_place:
            pause(LOOK_S, self._closing, self._clock)
        with self._under_way:
            living = self._look(order) if in_place or turn else None
            if in_place and survivors(document, living or {}):
                return
            earlier = turn if living is None else sum(1 for name in order[:turn] if name in living)
            if not pause(APART_S * earlier, self._closing, self._clock):
                self.commit(turn)

    def _look(self, names: Sequence[str]) -> Mapping[str, NodeView] | None:
        """The nodes that live; None if the store is unreachable."""
        try:
            return self._nodes(names, Deadline.after(LOOKING_S, self._clock))
        except ElasticTrainerError as error:
            logger().debug("snapshot.nodes_unknown", error=str(error))
            return None

    def commit(self, turn: int = 0) -> None:
        """Commit the newest snapshot, unless storage has it or a newer state, or another agent is writing it."""
        try:
            snapshot = newest(self._held())
            if snapshot is not None and not snapshot.stored:
                self._commit(snapshot, turn)
        except Exception as error:  # noqa: BLE001 - a failed rescue must not keep a node from leaving
            logger().error("snapshot.not_rescued", reason=str(error) or type(error).__name__)

    def _commit(self, snapshot: StateSnapshot, turn: int) -> None:
        manager = CheckpointManager(snapshot.location, owner=Owner(snapshot.manifest.run, snapshot.job))
        draft = snapshot.manifest.model_copy(update={"name": rescued_name(*snapshot.order, turn)})
        patience = Deadline.after(LEAVING_S if self._closing.is_set() else PATIENCE_S, self._clock)
        try:
            while manager.offered(draft) and not patience.expired:
                pause(APART_S, clock=self._clock)
            if _has(manager, snapshot):
                return
            committed = manager.write(snapshot.image(), draft)
        finally:
            manager.close()
        took_s = round(committed.duration_s, 3)
        logger().warning("snapshot.rescued", checkpoint=committed.name, step=snapshot.manifest.step, took_s=took_s)


def _has(manager: CheckpointManager, snapshot: StateSnapshot) -> bool:
    stored = manager.newest()
    return stored is not None and (stored.round, stored.step) >= snapshot.order


def _turn(document: RoundDocument, node: str) -> int:
    order = [member.node for member in document.members]
    return order.index(node) if node in order else len(order)


def survivors(document: RoundDocument, nodes: Mapping[str, NodeView]) -> list[str]:
    """The members of the round whose workers live and hold its state."""
    return [
        member.node
        for member in document.members
        if (view := nodes.get(member.node)) is not None
        and (view.create_revision, view.record.life) == (member.create_revision, member.life)
        and view.record.state is not NodeState.WARMING
    ]


_MOST_AT_ONCE = 1024


class NeighbourCopies:
    """See the module."""

    def __init__(self, workers: int) -> None:
        self._copies = {number: _memory(number) for number in range(workers)}
        self._lock = threading.Lock()
        self._permits = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._clients: SimpleQueue[socket.socket | None] = SimpleQueue()
        self._closing = False
        self._bundle = ("", -1)
        self.key = secrets.token_hex(16)
        """What a client has to know."""
        threading.Thread(target=self._run, name="neighbours", daemon=True).start()

    def lend_bundle(self, digest: str, descriptor: int) -> None:
        """Serve the memory file ``descriptor``, and close it, to clients that know its ``digest``; "" and -1: none."""
        with self._lock:
            before, self._bundle = self._bundle, (digest, descriptor)
            if before[1] >= 0:
                os.close(before[1])

    @property
    def files(self) -> list[int]:
        """The memory files of the copies."""
        with self._lock:
            return [each for slots in self._copies.values() for each in slots]

    def stop(self) -> None:
        """Stop serving."""
        self._closing = True
        self._clients.put(None)

    def close(self) -> None:
        """Stop serving, and free the memory."""
        self.stop()
        with self._lock:
            copies, self._copies = self._copies, {}
        for each in copies.values():
            for descriptor in each:
                os.close(descriptor)

    def serve(self, client: socket.socket) -> None:
        """Have the client that connects there served. The caller answers other agents, and waits for no thread."""
        if self._closing:
            client.close()
        else:
            self._clients.put(client)

    def _run(self) -> None:
        while (client := self._clients.get()) is not None:
            self._start(client)
        with suppress(Empty):
            while True:  # who came as this ended
                if (late := self._clients.get_nowait()) is not None:
                    late.close()

    def _start(self, client: socket.socket) -> None:
        if self._closing or not self._permits.acquire(blocking=False):
            client.close()
            return
        try:
            threading.Thread(target=self._serve, args=(client,), name="neighbour", daemon=True).start()
        except RuntimeError as error:  # the limit of processes is reached
            logger().warning("neighbour_copies.refused", reason=str(error))
            client.close()
            self._permits.release()

    def _serve(self, client: socket.socket) -> None:
        try:
            with framed(client) as link, ExitStack() as held:
                with self._lock:
                    digest, bundle = self._bundle
                    if digest:  # its owner may replace it meanwhile
                        held.callback(os.close, bundle := os.dup(bundle))
                key = admitted(link, *filter(None, (self.key, digest)))
                if not key:
                    logger().warning("neighbour_copies.refused", reason="a client does not know the key")
                    return
                while not self._closing and link.poll(IDLE_S):
                    request = json.loads(link.recv_bytes(LONGEST_REQUEST))
                    if key != self.key:
                        self._send_file(link, request, bundle)
                    elif "read" in request:
                        self._send(link, request)
                    else:
                        self._keep(link, request)
        except EOFError:
            pass  # it has what it wanted
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger().debug("neighbour_copies.hung_up", reason=str(error) or type(error).__name__)
        finally:
            self._permits.release()

    def _send(self, link: Any, request: dict[str, Any]) -> None:
        descriptor = int(str(request["read"]).rpartition("/")[2])
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{MEMORY_NAME}"):
            raise ValueError(f"{request['read']} is not a memory file of a snapshot")
        self._send_file(link, request, descriptor)

    def _send_file(self, link: Any, request: dict[str, Any], descriptor: int) -> None:
        begin, end = int(request["begin"]), int(request["begin"]) + int(request["size"])
        while begin < end and not self._closing:
            piece = os.pread(descriptor, min(PIECE, end - begin), begin)
            link.send_bytes(piece)
            if not piece:
                return
            begin += len(piece)

    def _keep(self, link: Any, request: dict[str, Any]) -> None:
        number, size = int(request["put"]), int(request["size"])
        if not (0 <= number < MOST_WORKERS and size > DATA):
            raise ValueError(f"a copy of worker {number} with {size} bytes")
        descriptor = self._oldest(number, tuple(request["keep"] or ()))
        refused = _make_room(descriptor, size)
        link.send_bytes(refused.encode())
        if refused:
            return
        break_seal(descriptor)
        begin = DATA
        while begin < size:
            begin += os.pwrite(descriptor, link.recv_bytes(PIECE), begin)
        reseal(descriptor, link.recv_bytes(LONGEST_REQUEST), size)
        link.send_bytes(b"")

    def _oldest(self, number: int, keep: tuple[Any, ...]) -> int:
        """The memory file of worker ``number`` to overwrite: that with the older copy, but not the one to ``keep``."""
        with self._lock:
            if self._closing:
                raise ValueError("this agent leaves")
            if number not in self._copies:
                self._copies[number] = _memory(number)
            return min(self._copies[number], key=lambda each: (_order(each) == keep, _order(each)))


def _memory(number: int) -> list[int]:
    return [os.memfd_create(f"{MEMORY_NAME}copy-{number}") for _ in range(SLOTS)]


def _order(descriptor: int) -> tuple[int, int]:
    try:
        found = read(descriptor)
    except CheckpointError:
        return -1, -1
    return found.order if found is not None else (-1, -1)


def _make_room(descriptor: int, size: int) -> str:
    """Let the file have ``size`` bytes; why not, if there is too little memory."""
    there, free = os.fstat(descriptor).st_size, available()
    if size <= there:
        return ""
    if free is not None and free < size - there + KEPT_FREE:
        return f"a copy needs {size / 1e6:,.0f} MB of memory on the next node, which has {free / 1e6:,.0f} MB left"
    os.ftruncate(descriptor, size)
    return ""
