"""Which other nodes this one cannot reach: checked when rounds fail to form although all nodes reach the store.

*Owns* short-lived threads. *Fails by* nothing: if the store does not answer or no thread can be started, the result is
unknown. Every question gets its answer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from elastic_trainer.agent.workers.periodic import Later
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.ipc.own_address import LOOPBACK, refusal_proves
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import DocumentError, NodeRecord
from elastic_trainer.store.api import Store
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger

CONNECT_S = 0.5
READ_S = 2.0
AT_ONCE = 32
LIMIT_S = 3.0
"""Nodes not tried by then do not count as missing. The worker's next messages wait for this check, and other nodes for
those: after a longer check they would continue without this node, as without a slow one, and add it again later."""
Reaches = Callable[[str, int], bool]


@dataclass(frozen=True, slots=True)
class Reached:
    """The nodes that have a key but cannot be reached from here, None if that is unknown; the records of all nodes."""

    missing: tuple[str, ...] | None = None
    records: Mapping[str, NodeRecord] = field(default_factory=dict)


Ask = Callable[[tuple[str, ...], Callable[[Reached], None]], object]
"""``ask(nodes, answered)``: looks whether ``nodes`` can be reached and calls ``answered`` from another thread."""


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
