"""Plays the conductor: passes it events one at a time, and performs what follows.

Also the channel to its workers (``ChannelServer``), the writer of its records (``RecordWriter``), and the answer whom
this node reaches.

*Runs in* the agent: threads named ``conductor`` and ``record_writer``, the listener's thread, one for each connection,
one that waits for each worker's death, and short-lived ones that connect to other agents; events come from any thread.
*Owns* those threads, the conductor and the listener.
*Fails by* nothing: a worker that breaks the protocol is treated as lost, an outage of the store is waited out, a
refused write is logged; every question whom this node reaches gets its answer, if only that it is unknown.
*Invariant*: one event at a time. A record is never written after a newer one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, update_wrapper
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from elastic_trainer.agent.workers.conductor import (
    Announce,
    Ask,
    BreakRound,
    Conductor,
    Effect,
    Kill,
    Reached,
    ReportProgress,
    Send,
    Worker,
)
from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.agent.workers.watchdog import kill_now
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.ipc.address import LOOPBACK, refusal_proves
from elastic_trainer.ipc.channel import (
    CHANNEL_VERSION,
    ChannelClosedError,
    Connection,
    Exit,
    Hello,
    Leaving,
    Listener,
    MessageError,
    Progress,
    read_from_worker,
)
from elastic_trainer.ipc.mutex import await_death
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import DocumentError, NodeRecord
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.writes import RoundFailure
from elastic_trainer.preflight.examination import answers_at
from elastic_trainer.store.api import RunKeys, Store
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger

Told = ParamSpec("Told")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class ConductorPorts:
    """``on_progress`` receives rank 0's reports; ``ask(nodes, answered)`` finds out in another thread whether ``nodes``
    can be reached, and calls ``answered``; ``kill(pid, reason)`` ends a process."""

    record_writer: RecordWriter
    on_progress: Callable[[Progress], None]
    ask: Callable[[tuple[str, ...], Callable[[Reached], None]], object]
    kill: Callable[[int, str], object] = kill_now


def _event(
    method: Callable[Concatenate[Conductor, Told], Answer],
) -> Callable[Concatenate[ConductorShell, Told], Answer]:
    """An event of the conductor, played in any thread."""

    def played(shell: ConductorShell, /, *told: Told.args, **named: Told.kwargs) -> Answer:
        return shell.play(method, *told, **named)

    update_wrapper(played, method)
    return played


class ConductorShell:
    """The conductor, as threads see it: its events, and :attr:`met`."""

    def __init__(
        self,
        conductor: Conductor,
        ports: ConductorPorts,
        clock: Clock = SYSTEM,
        periodic: type[PeriodicThread] = PeriodicThread,
    ) -> None:
        self._conductor, self._ports, self._clock = conductor, ports, clock
        self._lock = threading.RLock()
        self.met = threading.Event()
        """Set when the first worker of the present life has opened a session."""
        self._thread = periodic("conductor", self._turn, clock)
        self._wakes_at = 0.0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Make no more calls, and close the workers' connections, which ends their lead."""
        self._thread.close()
        for worker in self.workers():
            worker.connection.close()

    @property
    def life(self) -> int:
        return self._conductor.life

    @property
    def passed(self) -> bool:
        return self._conductor.passed

    begin = _event(Conductor.begin)
    record_at = _event(Conductor.record_at)
    restart_workers = _event(Conductor.restart_workers)
    see = _event(Conductor.see)
    admit = _event(Conductor.admit)
    receive = _event(Conductor.receive)
    gone = _event(Conductor.gone)
    workers = _event(Conductor.workers)
    watched = _event(Conductor.watched)
    at_work = _event(Conductor.at_work)
    suspect = _event(Conductor.suspect)
    exclude = _event(Conductor.exclude)

    def play(
        self, method: Callable[Concatenate[Conductor, Told], Answer], *told: Told.args, **named: Told.kwargs
    ) -> Answer:
        """Play one event: pass the time, and perform what follows before another one comes."""
        with self._lock:
            outbox = self._conductor.outbox
            outbox.now = self._clock.monotonic()
            answer = method(self._conductor, *told, **named)
            while outbox.effects:
                self._perform(outbox.effects.popleft())
            if self._conductor.met != self.met.is_set():
                (self.met.set if self._conductor.met else self.met.clear)()
            if outbox.next_at < self._wakes_at:
                self._thread.wake()
            return answer

    def _turn(self) -> float:
        """Make the conductor's calls that are due; returns the seconds until the next one."""
        with self._lock:
            self._wakes_at = 0.0  # this turn looks by itself
            self.play(lambda conductor: conductor.outbox.play_due())
            now = self._clock.monotonic()
            self._wakes_at = min(self._conductor.outbox.next_at, now + IDLE_S)
            return max(0.0, self._wakes_at - now)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            try:
                effect.connection.send(effect.message)
            except ChannelClosedError as error:
                logger().debug("worker.unreachable", error=str(error))
        elif isinstance(effect, Announce):
            self._ports.record_writer.announce(effect.record)
        elif isinstance(effect, BreakRound):
            self._ports.record_writer.break_round(effect.failure, effect.record, effect.within_s)
        elif isinstance(effect, Ask):
            answered = effect.answered
            self._ports.ask(effect.nodes, lambda reached: self.play(lambda conductor: answered(reached)))
        elif isinstance(effect, Kill):
            self._ports.kill(effect.pid, effect.reason)
        elif isinstance(effect, ReportProgress):
            self._ports.on_progress(effect.progress)
        else:
            getattr(logger(), effect.level)(effect.event, **effect.fields)


def guarded(read: Callable[[int], Answer], otherwise: Answer) -> Callable[[int], Answer]:
    """``read(pid)`` of a worker's page; ``otherwise`` where that fails: what a page contains must hold up nothing."""

    def found(pid: int) -> Answer:
        try:
            return read(pid)
        except Exception:  # noqa: BLE001 - a page may be torn in any way
            logger().exception("page.unreadable", pid=pid)
            return otherwise

    return found


class ChannelServer:
    """The agent's end of the channel: one thread for each connected worker, which passes its messages on."""

    def __init__(self, conductor: ConductorShell) -> None:
        self._conductor = conductor
        self._listener = Listener(self._serve)

    @property
    def path(self) -> Path:
        return self._listener.path

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        worker: Worker | None = None
        try:
            for line in connection.lines():
                message = read_from_worker(line)
                if isinstance(message, Hello):
                    worker = self._welcome(connection, message)
                elif worker is not None:
                    self._conductor.receive(worker, message)
                if isinstance(message, Leaving):
                    return  # closing the connection confirms that the message was processed, so the worker may exit now
        except MessageError as error:
            logger().error("worker.message_rejected", pid=connection.peer()[0], error=str(error))
        finally:
            if worker is not None:
                self._conductor.gone(worker)

    def _welcome(self, connection: Connection, hello: Hello) -> Worker | None:
        if hello.version != CHANNEL_VERSION:
            reason = f"the worker speaks channel version {hello.version}, its agent {CHANNEL_VERSION}"
            connection.send(Exit(code=78, reason=reason))
            return None
        worker = self._conductor.admit(connection, connection.peer()[0], hello.local_rank)
        if worker is not None and hello.mutex is not None:
            arguments = (worker, Path(hello.mutex))
            threading.Thread(target=self._await_death, args=arguments, name=f"life-{worker.pid}", daemon=True).start()
        return worker

    def _await_death(self, worker: Worker, mutex: Path) -> None:
        try:
            if await_death(mutex):
                self._conductor.gone(worker)
        except OSError as error:
            logger().warning("worker.mutex_unusable", pid=worker.pid, error=str(error))


ATTEMPT_S = 5.0
AGAIN_S = 0.1


class RecordWriter:
    """Writes this node's record to the store, newest first: no other thread of the agent waits for the store."""

    def __init__(self, member: Member, clock: Clock = SYSTEM, periodic: type[PeriodicThread] = PeriodicThread) -> None:
        self._member, self._clock = member, clock
        self._thread = periodic("record_writer", self.turn, clock)
        self._lock = threading.Lock()
        self._record: NodeRecord | None = None
        self._broken: tuple[RoundFailure, Deadline | None] | None = None
        """The round to break, until the deadline if there is one."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and drop the pending write."""
        self._thread.close()

    def announce(self, record: NodeRecord) -> None:
        """See :class:`Announce`."""
        with self._lock:
            self._record = record
        self._thread.wake()

    def break_round(self, failure: RoundFailure, record: NodeRecord, within_s: float | None = None) -> None:
        """See :class:`BreakRound`."""
        until = Deadline.after(within_s, self._clock) if within_s is not None else None
        with self._lock:
            self._record, self._broken = record, (failure, until)
        self._thread.wake()

    def turn(self) -> float:
        """Try the pending write; returns the seconds until the next attempt."""
        with self._lock:
            record, self._record = self._record, None
            broken, self._broken = self._broken, None
        deadline, written = Deadline.after(ATTEMPT_S, self._clock), False
        try:
            if broken is not None:
                failure, until = broken
                self._member.break_round(failure, until or deadline, record)
            if record is not None and record != self._member.published():
                self._member.announce(record, deadline)
            written = True
        except ConfigError as error:
            written = True
            logger().error("record.refused", error=str(error))
        except ElasticTrainerError as error:
            logger().warning("record.delayed", error=str(error))
        finally:
            with self._lock:
                if not written and self._record is None:  # for a retry, unless a newer one is pending
                    self._record = record
                if not written and self._broken is None and broken is not None:
                    self._broken = None if broken[1] is not None and broken[1].expired else broken
        return IDLE_S if written else AGAIN_S


CONNECT_S = 0.5
READ_S = 2.0
AT_ONCE = 32
LIMIT_S = 3.0
"""Nodes not tried by then do not count as missing. The worker's next messages wait for this check, and other nodes for
those: after a longer check they would continue without this node, as without a slow one, and add it again later."""
Reaches = Callable[[str, int], bool]
reaches: Reaches = partial(answers_at, limit_s=CONNECT_S)
"""Whether ``host`` answers at ``port``."""


def ask_in_thread(
    records: Callable[[], Mapping[str, NodeRecord]],
    own: str,
    nodes: tuple[str, ...],
    answered: Callable[[Reached], None],
    try_one: Reaches = reaches,
) -> None:
    """Connect to the agents' ports of ``nodes`` in another thread, and call ``answered``: a worker's messages wait for
    the answer. ``records()`` returns the records of all nodes by name; ``own`` is the address that this node announces.
    """

    def look() -> None:
        reached = Reached()
        try:
            known = records()
            reached = Reached(missing_of(nodes, known, own, try_one), known)
        except Exception:  # noqa: BLE001 - the edge of a thread
            logger().exception("reachability.failed")
        answered(reached)

    try:
        threading.Thread(target=look, name="reachability", daemon=True).start()
    except RuntimeError as error:  # the limit of processes is reached
        logger().info("reachability.unknown", error=str(error))
        answered(Reached())


def missing_of(
    nodes: Iterable[str], records: Mapping[str, NodeRecord], own: str = LOOPBACK, try_one: Reaches = reaches
) -> tuple[str, ...] | None:
    """Those of ``nodes`` that have a key but do not answer; None if that is unknown."""
    if not records:
        return None
    asked = [(name, records[name]) for name in nodes if name in records and records[name].probe_port > 0]
    if not asked:
        return ()
    limit = Deadline.after(LIMIT_S)

    def is_there(asked_for: tuple[str, NodeRecord]) -> bool:
        record = asked_for[1]
        if limit.expired:
            return True
        return refusal_proves(own, record.address) and try_one(record.address, record.probe_port)

    try:
        with ThreadPoolExecutor(min(AT_ONCE, len(asked)), thread_name_prefix="contact") as pool:
            found = list(pool.map(is_there, asked))
    except RuntimeError as error:  # the limit of processes is reached
        logger().info("reachability.unknown", error=str(error))
        return None
    return tuple(name for (name, _), there in zip(asked, found, strict=True) if not there)


def records_of(store: Store, keys: RunKeys) -> Mapping[str, NodeRecord]:
    """The records of all nodes of the run; empty if the store does not answer."""
    return {name: node.record for name, node in nodes_of(store, keys).items()}


def nodes_of(store: Store, keys: RunKeys) -> dict[str, NodeView]:
    """All nodes of the run; empty if the store does not answer."""
    nodes = {}
    try:
        for item in store.range(keys.nodes, Deadline.after(READ_S)).items:
            name = keys.node_id(item.key)
            try:
                if name is not None:
                    record = NodeRecord.decode(item.value, item.key)
                    nodes[name] = NodeView(name, item.create_revision, item.mod_revision, record)
            except DocumentError as error:
                logger().info("document.refused", key=plain(item.key), error=str(error))
    except ElasticTrainerError as error:
        logger().info("reachability.unknown", error=str(error))
    return nodes
