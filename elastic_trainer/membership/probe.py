"""Which agents to probe: the kernel of a node whose agent is dead refuses the connection. Pure.

A timeout proves nothing (a partition, a loaded host) and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from elastic_trainer.membership.cluster_view import ClusterView, NodeView, live_members, newcomers
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.membership.effects import Probe, Probed

PROBE_TIMEOUT_S = 0.5
PROBE_INTERVAL_S = 0.1
PROBES_AT_ONCE = 32
"""A thousand nodes may be silent together; those probed longest ago come first."""


class AgentProbes:
    """The nodes whose agents were found dead, by the mod-revision of their keys."""

    def __init__(self) -> None:
        self._dead: frozenset[tuple[str, int]] = frozenset()
        self._asked: dict[str, float] = {}
        self._asking = 0

    def dead(self, nodes: Mapping[str, NodeView]) -> frozenset[str]:
        """The nodes whose keys have not changed since their agents were found dead. In any thread."""
        return frozenset(
            name for name, revision in self._dead if name in nodes and nodes[name].mod_revision == revision
        )

    def on_probed(self, answer: Probed) -> None:
        self._asking -= 1
        if answer.dead:
            self._dead |= {(answer.node, answer.mod_revision)}

    def turn(self, view: ClusterView, now: float) -> tuple[Probe | None, float]:
        """The nodes to probe now, and the seconds until the next look is due."""
        silent = unconfirmed(view)
        before = now - PROBE_INTERVAL_S
        due = sorted((self._asked.get(node.id, before), node.id, node) for node in silent)
        chosen = tuple(node for asked, _, node in due if asked <= before)[: PROBES_AT_ONCE - self._asking]
        self._asking += len(chosen)
        self._asked.update((node.id, now) for node in chosen)
        return Probe(chosen) if chosen else None, PROBE_INTERVAL_S if silent else math.inf


def unconfirmed(view: ClusterView) -> list[NodeView]:
    """The nodes that must be alive for the next transition and have sent no recent news.

    These are members of a broken or draining round that have not reported that they are free, and newcomers about to be
    added: a round with a dead node would make no progress until its lease ends.
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
