"""Which other nodes this one cannot reach: asked when rounds cannot be formed, though the store is there for all.

*Runs in* the agent: whoever asks waits for the answer, which takes some seconds at most, however many nodes there are.
*Owns* short-lived threads. *Fails by* nothing: where the store does not answer nothing is known.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ElasticTrainerError
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
"""Who has not been tried by then is not found missing. The worker's further words wait for the answer, and the others
for those: they would go on without this node, as without one that is slow, and take it in again."""
Reaches = Callable[[str, int], bool]


def reaches(host: str, port: int) -> bool:
    """Whether ``host`` answers at ``port``; refusing is an answer too: a dead agent is others' business."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


class Reachability:
    """Tries the ports that agents listen on. ``records()`` are those of all nodes, by name."""

    def __init__(self, records: Callable[[], Mapping[str, NodeRecord]], try_one: Reaches = reaches) -> None:
        self._records, self._try_one = records, try_one

    def missing(self, nodes: Iterable[str]) -> tuple[str, ...] | None:
        """Those of ``nodes`` that have a key and cannot be reached from here; None where no keys are known."""
        records = self._records()
        if not records:
            return None
        asked = [(name, records[name]) for name in nodes if name in records and records[name].probe_port > 0]
        if not asked:
            return ()
        limit = Deadline.after(LIMIT_S)

        def is_there(asked_for: tuple[str, NodeRecord]) -> bool:
            record = asked_for[1]
            return limit.expired or self._try_one(record.address, record.probe_port)

        with ThreadPoolExecutor(min(AT_ONCE, len(asked)), thread_name_prefix="contact") as pool:
            found = list(pool.map(is_there, asked))
        return tuple(name for (name, _), there in zip(asked, found, strict=True) if not there)


def records_of(store: Store, keys: RunKeys) -> Mapping[str, NodeRecord]:
    """The records of all nodes of the run; none where the store does not answer."""
    return {name: node.record for name, node in nodes_of(store, keys).items()}


def nodes_of(store: Store, keys: RunKeys) -> dict[str, NodeView]:
    """All nodes of the run; none where the store does not answer."""
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
        logger().info("contact.unknown", error=str(error))
    return nodes
