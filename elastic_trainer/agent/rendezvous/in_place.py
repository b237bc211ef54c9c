"""torchrun's rendezvous handler for in-place mode: workers start at once, and the conductor leads them through rounds.

``next_rendezvous`` returns a provisional world of this node alone; the workers get their real ranks through their
Session.

*Runs in* torchrun's main thread, and threads of the same process: ``join-timeout``, ``slots``, ``progress``,
``plain-script-guard``, those of the conductor.
*Owns* what the restart handler owns, and the conductor, its channel and threads, this node's TCP store, the guard
against plain scripts.
*Fails by* SystemExit with one sentence; a fatal verdict in a thread ends the process (``os._exit``) after its workers.
*Invariant*: an unreachable store never ends the node: no round can form then, and training may continue. Progress of a
round is written only while the store holds that round. All workers of one life keep the same slot in a shard group,
since they hold its shards.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import psutil
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from elastic_trainer.agent.rendezvous.launcher import RoundStore, failures, local_workers
from elastic_trainer.agent.rendezvous.restart import OTHERS_START_S, ArrivedNode, Etcd3RendezvousHandler
from elastic_trainer.agent.suspicion import Peers, Suspicion
from elastic_trainer.agent.workers.conductor import Conductor, ConductorConfig, FalseStart, WorkerFacts
from elastic_trainer.agent.workers.conductor_shell import (
    ChannelServer,
    ConductorPorts,
    ConductorShell,
    RecordWriter,
    ask_in_thread,
    guarded,
    nodes_of,
    records_of,
)
from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.agent.workers.watchdog import (
    Watchdog,
    await_session,
    children,
    kill_workers,
    queued_s,
    worker_pids,
)
from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import ConfigError, ElasticTrainerError, JoinTimeoutError, ReplacedError
from elastic_trainer.ipc.address import store_at
from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.cluster_view import (
    ClusterView,
    NodeView,
    Observation,
    Sightings,
    has_slots,
    move,
    slot_of,
)
from elastic_trainer.membership.documents import NodeState, RoundDocument, RoundMember, RoundState
from elastic_trainer.membership.member import Member, closed_error
from elastic_trainer.membership.rules import FALSE_STARTS
from elastic_trainer.store.api import RunKeys, Store, unchanged
from elastic_trainer.store.session import Slot
from elastic_trainer.telemetry import logs
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.variables import (
    ENV_CHANNEL,
    ENV_FORM_TIMEOUT,
    ENV_NODE,
    ENV_RECOVERY,
    ENV_ROUND,
    ENV_SHARD_NODES,
    ENV_SHARD_PLACE,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store as TorchStore

_NO_SESSION = "--rdzv-conf recovery=in_place needs a training script that opens an elastic_trainer.Session"
_NO_SESSION_HINT = "open one, or omit recovery=in_place"


@dataclass(frozen=True, slots=True)
class InPlaceNode:
    """What an arrived node needs to lead its workers through rounds in place."""

    arrived: ArrivedNode
    conductor: ConductorShell
    watchdog: PeriodicThread
    channel: ChannelServer
    record_writer: RecordWriter
    progress: ProgressWriter
    guard: PlainScriptGuard
    patience: JoinTimeout
    suspicion: Suspicion
    slots: ShardSlots
    tcp_store: Any
    """Kept alive, so that it continues to serve."""

    def close(self) -> None:
        """Stop leading the workers. The node's key and its workers remain."""
        for each in (self.slots, self.suspicion, self.patience, self.progress, self.record_writer, self.guard):
            each.close()

    def start(self) -> InPlaceNode:
        for each in (self.conductor, self.record_writer, self.progress, self.patience, self.suspicion, self.slots):
            each.start()
        return self


class InPlaceHandler(Etcd3RendezvousHandler):
    """One node's handler in in-place mode; see the module."""

    _led: InPlaceNode | None = None
    """None before the first rendezvous, and after the end."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._dying = threading.Lock()
        """Acquired by the thread that ends this process, and never released."""

    @property
    def use_agent_store(self) -> bool:
        """True: a worker that calls ``init_process_group`` by itself must connect, and be detected, not serve."""
        return True

    def num_nodes_waiting(self) -> int:
        """Always 0: healthy workers are never restarted."""
        return 0

    def _is_misconfigured(self) -> bool:
        """Only if no worker opened a Session: an unreadable sample has the same exit code, and closes the run with the
        sample's name after some attempts."""
        return super()._is_misconfigured() and self._led is not None and not self._led.conductor.met.is_set()

    def _has_passed(self) -> bool:
        return self._led is not None and self._led.conductor.passed

    def _leave(self, error: BaseException | None) -> bool:
        led, self._led = self._led, None
        if led is not None:
            led.close()
        done = super()._leave(error)
        if led is not None:
            led.channel.close()
            led.watchdog.close()
            led.conductor.close()
        return done

    def shutdown(self) -> bool:
        if self._dying.locked():
            _await_the_end()  # no restart is left for the workers that the other thread has killed
        return super().shutdown()

    # ---- starting workers

    def _join(self) -> RendezvousInfo:
        try:
            if self._dying.locked():
                _await_the_end()  # this is torchrun's main thread, which sees the workers die before the process exits
            return self._begin_life()
        except (ElasticTrainerError, RuntimeError):
            if self._dying.locked():
                _await_the_end()
            raise

    def _begin_life(self) -> RendezvousInfo:
        workers = local_workers()
        deadline = Deadline.after(self._options.join_timeout, self._clock)
        led = self._led if self._led is not None else self._arrive_in_place(workers)
        conductor, member, health = led.conductor, led.arrived.member, led.arrived.health
        last = member.observation().round if conductor.life else None
        if last is not None:
            led.arrived.rescue.begin(last, in_place=True)
        self._how_workers_died(led.arrived)
        if conductor.passed:
            raise self._after_training()
        start = self._starts.end(failures(), stepped=conductor.met.is_set())

        first = conductor.life == 0
        slot = begin_life(conductor, member, led.slots, workers.local_world_size, deadline, start)
        if first:
            self._confirm(deadline)
        if start is not None and start.count == FALSE_STARTS:
            member.await_over(0, deadline.at_most(OTHERS_START_S))  # other nodes' starts may be a life behind
        closed = member.observation().round
        if closed is not None and closed.state is RoundState.CLOSED:
            raise closed_error(closed)
        self._starts.begin(None)
        self._watch_for_session(conductor)
        health.pages.employ(workers.local_world_size)
        health.starting()
        return self._provisional(workers, led, slot)

    def _arrive_in_place(self, workers: WorkerSpec) -> InPlaceNode:
        if workers.max_restarts < 1:
            raise ConfigError(
                "in-place recovery restarts crashed workers on their own node, but torchrun's --max-restarts is 0",
                hint="add --max-restarts, for example 100",
            )
        node = self._arrive()
        member, health, options = node.member, node.health, self._options
        tcp_store = store_at(self._address, timedelta(seconds=300))
        guard = PlainScriptGuard(
            lambda: self._fatal(ConfigError(_NO_SESSION, hint=_NO_SESSION_HINT)), self._without_session
        )
        record_writer = RecordWriter(member, self._clock)
        progress = ProgressWriter(self._store, self._keys, self._clock)
        base = self._record(node, tcp_store.port, workers, state=NodeState.WARMING)
        facts = WorkerFacts(
            member.create_revision,
            health.hung.take,
            guarded(health.pages.position_of, None),
            guarded(health.busy, ""),
            queued_s,
        )
        ask = partial(ask_in_thread, partial(records_of, self._store, self._keys), self._address)
        conductor = ConductorShell(
            Conductor(ConductorConfig(self._run_id, self.node_id, base, options.sever_timeout), facts),
            ConductorPorts(record_writer, partial(_report, member, progress), ask),
            self._clock,
        )
        member.on_round(conductor.see)
        watchdog = Watchdog(options.hang_timeout, conductor.watched, health.hung.kill, self._clock)
        watch = PeriodicThread("watchdog", watchdog.turn, self._clock)
        if options.hang_timeout > 0.0:
            watch.start()
        peers = Peers(self._run_id, self.node_id, member.nodes, self._clock)
        suspicion = Suspicion(conductor, health.pages, node.port, peers, self._clock, health.left_behind)
        patience = JoinTimeout(member, options.join_timeout, self._fatal, self._clock)
        channel = ChannelServer(conductor)
        slots = ShardSlots(member, self.node_id, partial(nodes_of, self._store, self._keys), conductor, self._clock)
        self._led = InPlaceNode(
            node,
            conductor,
            watch,
            channel,
            record_writer,
            progress,
            guard,
            patience,
            suspicion,
            slots,
            tcp_store,
        )
        return self._led.start()

    def _provisional(self, workers: WorkerSpec, led: InPlaceNode, slot: int | None) -> RendezvousInfo:
        """A world of this node alone: enough for torchrun to start and watch the workers."""
        os.environ[ENV_NODE] = self.node_id
        os.environ[ENV_ROUND] = "0"
        os.environ[ENV_RECOVERY] = str(self._options.recovery)
        os.environ[ENV_SHARD_NODES] = str(self._spec.shard_nodes)
        os.environ[ENV_SHARD_PLACE] = "" if slot is None else str(slot)
        os.environ[ENV_FORM_TIMEOUT] = str(self._options.form_timeout)
        os.environ[ENV_CHANNEL] = str(led.channel.path)
        led.arrived.lend_memory(self._address)
        alone = RoundMember(
            node=self.node_id,
            create_revision=0,
            life=led.conductor.life,
            first_rank=0,
            local_world_size=workers.local_world_size,
            role=workers.role,
        )
        document = RoundDocument(number=0, nonce="", state=RoundState.ACTIVE, members=(alone,))
        store = cast("TorchStore", RoundStore(document, self._finish))
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", led.guard.port))

    # ---- while they run

    def _watch_round(self, document: RoundDocument) -> None:
        """Does nothing: the conductor leads the workers out of a round that is over."""

    def _replaced(self, error: ReplacedError) -> None:
        """End this node: its workers would wait for ever for a round with it."""
        self._fatal(error)

    def _watch_for_session(self, conductor: ConductorShell) -> None:
        life = conductor.life

        def awaited() -> bool:
            """Whether the same workers are still awaited and the node has not given up."""
            led = self._led
            return not self._finished and led is not None and led.conductor is conductor and conductor.life == life

        workers = partial(worker_pids, self._run_id)
        watched = (conductor.met, awaited, workers, self._options.session_timeout, self._fatal, self._clock)
        threading.Thread(target=await_session, args=watched, name="session-watch", daemon=True).start()

    def _without_session(self) -> Iterator[int]:
        """The workers without a Session, and their children; this process has no other descendants."""
        opened = {each.pid for each in self._led.conductor.workers()} if self._led is not None else set[int]()
        return descendants(os.getpid(), opened)

    def _finish(self, outage_limit_s: float) -> None:
        """torchrun's exit barrier: this node's workers have succeeded."""
        led = self._led
        if led is None:
            return
        if not led.conductor.met.is_set():
            self._fatal(ConfigError(f"{_NO_SESSION}: the script ended without one", hint=_NO_SESSION_HINT))
        current = led.arrived.member.observation().round
        if current is not None and current.member(self.node_id) is not None:
            led.record_writer.close()
            self._await_end(led.arrived, current.number, outage_limit_s)

    def _fatal(self, error: ElasticTrainerError) -> None:
        """End this node from any thread: print why, kill the workers, exit. Only the first call prints."""
        if not self._dying.acquire(blocking=False):
            _await_the_end()
        try:
            logs.final_message(f"elastic-trainer: {error}")
            kill_workers(self._run_id, str(error))
            self._leave(error)
        finally:
            os._exit(error.exit_code)


def begin_life(
    conductor: ConductorShell,
    member: Member,
    slots: ShardSlots,
    size: int,
    deadline: Deadline,
    start: FalseStart | None = None,
) -> int | None:
    """Begin a life of ``size`` workers, and announce it; the node's slot of a shard group, if nodes have slots."""
    conductor.begin(size, start)
    return slots.take(lambda slot: member.announce(conductor.record_at(slot), deadline))


def _report(member: Member, writer: ProgressWriter, progress: Progress) -> None:
    """Pass rank 0's ``progress`` on if it belongs to the round that this node knows."""
    seen = member.observation()
    if seen.round is not None and seen.round.number == progress.round:
        writer.offer(progress, seen.round_revision)


def _await_the_end() -> NoReturn:
    """Wait for another thread to end the process."""
    while True:
        pause(1.0)


# ---- while the node waits for others

LOOK_EVERY_S = 0.5


class JoinTimeout(PeriodicThread):
    """Ends a node that has waited for a round for ``join_timeout_s`` seconds because too few nodes joined.

    It owns the thread ``join-timeout``, and calls ``give_up`` once with the JoinTimeoutError. An unreachable store
    never ends the node: no round can form then, and training may continue.
    """

    def __init__(
        self,
        member: Member,
        join_timeout_s: float,
        give_up: Callable[[JoinTimeoutError], None],
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__("join-timeout", self.turn, clock)
        self._member, self._join_timeout_s, self._give_up = member, join_timeout_s, give_up
        self._pause_s = min(LOOK_EVERY_S, join_timeout_s / 4)
        self._since = clock.monotonic()

    def turn(self) -> float:
        """Check whether this node still waits; returns the seconds until the next look."""
        seen, mine = self._member.observation(), self._member.published()
        waits = mine is not None and mine.state is not NodeState.WARMING  # otherwise others wait for this node
        now = self._clock.monotonic()
        if not (waits and seen.connected) or _under_way(seen):
            self._since = now
        elif now - self._since >= self._join_timeout_s:
            self._give_up(self._member.join_timeout(self._join_timeout_s))
            return IDLE_S
        return self._pause_s


def _under_way(seen: Observation) -> bool:
    """Whether the run has ended, or a round with live members is in effect or soon will be."""
    current = seen.round
    if current is None:
        return False
    if current.state is RoundState.BROKEN:  # a node that watches only the round will watch the nodes if this lasts
        return any(node.record.busy for node in _members(seen, current))
    if current.state is RoundState.CLOSED:
        return True
    if current.state is RoundState.DRAINING and current.next is None:
        return False  # too few nodes will remain
    if not seen.follows_nodes:
        return True  # the deciding nodes handle it
    return bool(_members(seen, current))


def _members(seen: Observation, current: RoundDocument) -> list[NodeView]:
    """The members of the round that are present."""
    keys = {(member.node, member.create_revision) for member in current.members}
    return [node for node in seen.nodes.values() if (node.id, node.create_revision) in keys]


# ---- which shards its workers hold

SETTLE_S, SETTLES = 0.25, 20
"""How long nodes that start together wait to see each other's slots, and how often."""
LOOK_S, STANDING_S = 2.0, 0.3
"""Interval at which a spare looks while others train, and while nobody does; with hundreds of nodes it is longer."""
CROWD = 50
PATIENCE_S = 30.0
"""How long a spare that holds state waits for another node to take the missing slot of its group."""


class ShardSlots(PeriodicThread):
    """The slot of this node's workers in a shard group; it owns the thread ``slots``.

    It never fails: a slot that another node also has leaves this node a spare until one of them changes.
    ``nodes()`` are all nodes of the run, read from the store.
    """

    def __init__(
        self,
        member: Member,
        node: str,
        nodes: Callable[[], dict[str, NodeView]],
        conductor: ConductorShell,
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__("slots", self.turn, clock)
        self._member, self._node, self._nodes, self._conductor = member, node, nodes, conductor
        self._looked_at, self._crowd = -math.inf, 1.0
        self._since: float | None = None
        """Since when this node is the one that should restart its workers."""

    def take(self, announce: Callable[[int | None], None]) -> int | None:
        """Choose and announce the slot of new workers; None if nodes have no slots."""
        slot = None
        for slot in self.choices():
            announce(slot)
            if slot is not None:
                pause(SETTLE_S, clock=self._clock)
        return slot

    def choices(self) -> Iterator[int | None]:
        """The slot of new workers, and another one each time that the nodes which start with them are seen there."""
        if not has_slots(self._member.limits):
            yield None
            return
        slot = None
        for _ in range(SETTLES):
            view = self._view(self._nodes(), self._member.observation().round)
            found = slot_of(view.living, self._node, view.limits.shard_nodes)
            if found == slot:
                return
            yield (slot := found)

    def turn(self) -> float:
        """Restart the workers at another slot if that completes a group; returns the seconds until the next look."""
        if not has_slots(self._member.limits):
            return IDLE_S
        seen, mine = self._member.observation(), self._member.published()
        current = seen.round
        trains = current is not None and current.state is not RoundState.BROKEN and current.member(self._node)
        if trains or mine is None or mine.state is not NodeState.READY or not seen.connected:
            self._since = None
            return LOOK_S
        stands = current is not None and current.state is RoundState.BROKEN
        now, look_s = self._clock.monotonic(), STANDING_S if stands else LOOK_S
        if now - self._looked_at < look_s * self._crowd:
            return STANDING_S
        nodes = self._nodes()
        self._looked_at, self._crowd = now, max(1.0, len(nodes) / CROWD)
        found = move(self._view(nodes, current))
        if found is None or found[0].id != self._node:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= (PATIENCE_S if mine.identity is not None else look_s):
            self._since = None
            self._conductor.restart_workers(f"this spare is needed at place {found[1]} of a shard group")
        return STANDING_S

    def _view(self, nodes: dict[str, NodeView], current: RoundDocument | None) -> ClusterView:
        dead = self._member.found_dead(nodes)
        return ClusterView(self._node, nodes, current, self._member.limits, Sightings(), nonce="", suspects=dead)


# ---- what it publishes, and what it guards against

PROGRESS_EVERY_S = 1.0


class ProgressWriter(PeriodicThread):
    """Publishes the job's progress: rank 0's node writes it to the store, at most once a second.

    It owns the thread ``progress``. If a write fails, the next progress replaces it; progress of a round is written
    only while the store holds that round.
    """

    def __init__(self, store: Store, keys: RunKeys, clock: Clock = SYSTEM) -> None:
        super().__init__("progress", self.turn, clock)
        self._keys = keys
        self._slot = Slot(store, keys.progress)
        self._lock = threading.Lock()
        self._latest: tuple[Progress, int] | None = None
        self._not_before = 0.0

    def offer(self, progress: Progress, round_revision: int) -> None:
        """Replace the pending progress; ``round_revision`` is that of the round document that it belongs to."""
        with self._lock:
            self._latest = (progress, round_revision)
        self.wake()

    def close(self) -> None:
        """Stop the thread; tries to write the last progress."""
        super().close()
        self._not_before = 0.0
        self.turn()

    def turn(self) -> float:
        """Write the newest progress if it is due; returns the seconds until the next turn."""
        now = self._clock.monotonic()
        if now < self._not_before:
            return self._not_before - now
        with self._lock:
            latest, self._latest = self._latest, None
        if latest is None:
            return IDLE_S
        self._not_before = now + PROGRESS_EVERY_S
        progress, round_revision = latest
        guard = unchanged(self._keys.round, round_revision)
        try:
            self._slot.replace(progress.encode().strip(), Deadline.after(2.0), [guard])
        except ElasticTrainerError as error:
            logger().debug("progress.not_written", error=str(error))
        return PROGRESS_EVERY_S


def descendants(pid: int, without: Collection[int]) -> Iterator[int]:
    """The descendants of ``pid``, without the processes in ``without`` and their descendants."""
    for child in children(pid) - set(without):
        yield child
        yield from descendants(child, without)


PAUSE_S = 0.1
"""Pause after each check of the open connections."""
_WAITING = 128


class PlainScriptGuard:
    """Detects a script that would train alone: in place, every node starts its workers as rank 0 of a world of one.

    A script without a Session would not notice. Therefore this guard listens at its MASTER_PORT, on 127.0.0.1 until
    closed: a worker that connects there has called ``init_process_group`` by itself. Other processes of this machine
    may connect too, which proves nothing: the kernel says which process owns each connection. However many connect, it
    asks the kernel a few times a second at most. It owns the thread ``plain-script-guard`` and the socket, and calls
    ``caught`` once; ``suspects()`` returns the processes that may not connect.
    """

    def __init__(self, caught: Callable[[], None], suspects: Callable[[], Iterable[int]]) -> None:
        self._caught, self._suspects = caught, suspects
        self._closing = threading.Event()
        self._warned = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(_WAITING)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._watch, name="plain-script-guard", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closing.wait(PAUSE_S):  # otherwise this process is out of descriptors for now
                    return
                continue
            with connection:  # a worker that waits for an answer stays connected, and can be found
                guilty = self._find_suspect()
            if guilty:
                self._caught()
                return
            self._closing.wait(PAUSE_S)

    def _find_suspect(self) -> bool:
        """Whether a suspect is connected, or is waiting to be accepted."""
        try:
            connections = psutil.net_connections("tcp")
        except (OSError, RuntimeError, psutil.Error):  # what the kernel does not show proves nothing
            connections = []
        trap = [(address, self.port) for address in ("127.0.0.1", "::ffff:127.0.0.1")]
        connected = {each.pid for each in connections if each.raddr in trap}
        if not connected.isdisjoint(self._suspects()):
            return True
        if not self._warned:
            self._warned = True
            logger().warning("connection.refused", port=self.port, reason="it is not of a worker without a Session")
        return False

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
