"""What the conductor acts through: the channel to its workers, the writer of its records, the check of who is reached.

*Runs in* the agent: the listener's thread, one for each connection, one that waits for each worker's death, one named
``record_writer``, and short-lived ones that connect to other agents. *Owns* those threads and the listener.
*Fails by* nothing: a worker that breaks the protocol is treated as lost, an outage of the store is waited out, a
refused write is logged; every question whom this node reaches gets its answer, if only that it is unknown.
*Invariant*: a record is never written after a newer one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from elastic_trainer.agent.workers.conductor import Break, PendingWrites, Reached, Worker
from elastic_trainer.agent.workers.periodic import IDLE_S, Later, PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.ipc.address import LOOPBACK, refusal_proves
from elastic_trainer.ipc.channel import (
    CHANNEL_VERSION,
    Connection,
    Exit,
    Hello,
    Leaving,
    Listener,
    Message,
    MessageError,
    read_from_worker,
)
from elastic_trainer.ipc.mutex import await_death
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import DocumentError, NodeRecord
from elastic_trainer.membership.member import Member
from elastic_trainer.store.api import RunKeys, Store
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger


class WorkerHandler(Protocol):
    """The owner of the workers: admits or refuses (None) each, and receives its messages and its end."""

    def admit(self, connection: Connection, local_rank: int) -> Worker | None: ...

    def receive(self, worker: Worker, message: Message) -> None: ...

    def gone(self, worker: Worker) -> None: ...


class ChannelServer:
    """See the module."""

    def __init__(self, handler: WorkerHandler) -> None:
        self._handler = handler
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
                    self._handler.receive(worker, message)
                if isinstance(message, Leaving):
                    return  # closing the connection confirms that the message was processed, so the worker may exit now
        except MessageError as error:
            logger().error("worker.message_rejected", pid=connection.peer()[0], error=str(error))
        finally:
            if worker is not None:
                self._handler.gone(worker)

    def _welcome(self, connection: Connection, hello: Hello) -> Worker | None:
        if hello.version != CHANNEL_VERSION:
            reason = f"the worker speaks channel version {hello.version}, its agent {CHANNEL_VERSION}"
            connection.send(Exit(code=78, reason=reason))
            return None
        worker = self._handler.admit(connection, hello.local_rank)
        if worker is not None and hello.mutex is not None:
            arguments = (worker, Path(hello.mutex))
            threading.Thread(target=self._await_death, args=arguments, name=f"life-{worker.pid}", daemon=True).start()
        return worker

    def _await_death(self, worker: Worker, mutex: Path) -> None:
        try:
            if await_death(mutex):
                self._handler.gone(worker)
        except OSError as error:
            logger().warning("worker.mutex_unusable", pid=worker.pid, error=str(error))


ATTEMPT_S = 5.0
AGAIN_S = 0.1


class RecordWriter(PendingWrites):
    """See the module."""

    def __init__(self, member: Member, clock: Clock = SYSTEM) -> None:
        self._member = member
        self._thread = PeriodicThread("record_writer", self.turn, clock)
        super().__init__(self._thread.wake, clock)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and drop the pending write."""
        self._thread.close()

    def turn(self) -> float:
        """Try the pending write; returns the seconds until the next attempt."""
        record, broken = self.take()
        written = False
        try:
            self._write(record, broken)
            written = True
        except ConfigError as error:
            written = True
            logger().error("record.refused", error=str(error))
        except ElasticTrainerError as error:
            logger().warning("record.delayed", error=str(error))
        finally:
            if not written:
                self.keep(record, broken)
        return IDLE_S if written else AGAIN_S

    def _write(self, record: NodeRecord | None, broken: Break | None) -> None:
        deadline = Deadline.after(ATTEMPT_S, self._clock)
        if broken is not None:
            self._member.break_round(broken.failure, broken.until or deadline, record)
        if record is not None and record != self._member.published():
            self._member.announce(record, deadline)


CONNECT_S = 0.5
READ_S = 2.0
AT_ONCE = 32
LIMIT_S = 3.0
"""Nodes not tried by then do not count as missing. The worker's next messages wait for this check, and other nodes for
those: after a longer check they would continue without this node, as without a slow one, and add it again later."""
Reaches = Callable[[str, int], bool]


def reaches(host: str, port: int) -> bool:
    """Whether ``host`` answers at ``port``; a refused connection is an answer too: only the agent is dead."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


class Reachability:
    """Connects to the agents' ports. ``records()`` returns the records of all nodes, by name; ``own`` is the address
    that this node announces."""

    def __init__(
        self,
        records: Callable[[], Mapping[str, NodeRecord]],
        call_later: Later,
        try_one: Reaches = reaches,
        own: str = LOOPBACK,
    ) -> None:
        self._records, self._later, self._try_one, self._own = records, call_later, try_one, own

    def ask(self, nodes: tuple[str, ...], answered: Callable[[Reached], None]) -> None:
        """See :data:`Ask`. A worker's messages wait for the answer."""

        def look() -> None:
            reached = Reached()
            try:
                records = self._records()
                reached = Reached(self._missing(nodes, records), records)
            except Exception:  # noqa: BLE001 - the edge of a thread
                logger().exception("reachability.failed")
            answered(reached)

        self._later(0.0, look)

    def _missing(self, nodes: Iterable[str], records: Mapping[str, NodeRecord]) -> tuple[str, ...] | None:
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
            return refusal_proves(self._own, record.address) and self._try_one(record.address, record.probe_port)

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
