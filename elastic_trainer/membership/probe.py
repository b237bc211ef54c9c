"""Ask the kernels of nodes in doubt whether their agents still live: a refused connection means dead.

*Runs in* the deciding thread; connections are made in short-lived threads. *Owns* nothing lasting.
A time-out proves nothing (a partition, a loaded host) and changes nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.membership.cluster_view import ClusterView, NodeView, live_members, newcomers
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.telemetry.logs import logger

PROBE_TIMEOUT_S = 0.5
PROBE_INTERVAL_S = 0.1
PROBES_AT_ONCE = 32
"""A thousand nodes may be silent together; those that were asked longest ago come first."""


def refuses(host: str, port: int, timeout_s: float) -> bool:
    """Whether ``host`` answers that nobody listens on ``port``."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


class Prober:
    """Remembers which nodes' agents were found dead, by the mod-revision of their keys."""

    def __init__(self, clock: Clock = SYSTEM, probe: Callable[[str, int, float], bool] = refuses) -> None:
        self._clock, self._probe = clock, probe
        self._dead: set[tuple[str, int]] = set()
        self._asked: dict[str, float] = {}
        self._asking = 0
        self._lock = threading.Lock()

    def dead(self, nodes: Mapping[str, NodeView]) -> frozenset[str]:
        """The nodes whose keys are as they were when their agents were found dead."""
        with self._lock:
            return frozenset(
                name for name, revision in self._dead if name in nodes and nodes[name].mod_revision == revision
            )

    def look(self, view: ClusterView, found: Callable[[], None]) -> float:
        """Probe the nodes that are in doubt; ``found`` is called when one is dead.

        Returns the seconds until the next look is due.
        """
        silent = doubtful(view)
        now = self._clock.monotonic()
        before = now - PROBE_INTERVAL_S
        due = sorted((self._asked.get(node.id, before), node.id, node) for node in silent)
        with self._lock:
            chosen = [node for asked, _, node in due if asked <= before][: PROBES_AT_ONCE - self._asking]
            self._asking += len(chosen)
        for node in chosen:
            self._asked[node.id] = now
            threading.Thread(target=self._ask, args=(node, found), name=f"probe-{node.id}", daemon=True).start()
        return PROBE_INTERVAL_S if silent else float("inf")

    def _ask(self, node: NodeView, found: Callable[[], None]) -> None:
        try:
            self._find_out(node, found)
        finally:
            with self._lock:
                self._asking -= 1

    def _find_out(self, node: NodeView, found: Callable[[], None]) -> None:
        if self._probe(node.record.address, node.record.probe_port, PROBE_TIMEOUT_S):
            with self._lock:
                known = (node.id, node.mod_revision) in self._dead
                self._dead.add((node.id, node.mod_revision))
            if not known:
                logger().warning("node.found_dead", node=node.id, address=node.record.address)
                found()


def doubtful(view: ClusterView) -> list[NodeView]:
    """The nodes that must not be dead for what comes next, of which nobody has heard just now.

    Members of a broken or draining round that have not said that they are free, and newcomers that are about to be
    taken in: a round with a dead one would stand still until its lease ends.
    """
    return [
        node
        for node in _awaited(view)
        if node.id != view.me and node.id not in view.suspects and node.record.probe_port > 0
    ]


def _awaited(view: ClusterView) -> list[NodeView]:
    current = view.round
    if current is None or current.state is RoundState.CLOSED:
        return []
    if current.state is RoundState.ACTIVE:
        return newcomers(view)[: max(0, view.limits.max_nodes - len(current.members))]
    silent = [node for _, node in live_members(view) if node.record.acknowledged <= current.number]
    if current.next is None:
        return silent
    joining = {member.node for member in current.next.members} - {member.node for member in current.members}
    return silent + [view.nodes[name] for name in sorted(joining) if name in view.nodes]
